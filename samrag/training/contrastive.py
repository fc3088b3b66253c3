"""InfoNCE for the retriever (SAM-RAG, equation 1): functions over tensors, and the module the trainer calls.

Shapes: Q queries, P passages, D vector length, B rows of a batch, C passage columns of a row (the positive, then
negatives), M known positives of a query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

NO_KEY = -1
"""Fills a row's list of known positives up to M."""
_TOKENS = ("input_ids", "attention_mask", "token_type_ids")


def info_nce(
    queries: Tensor, passages: Tensor, targets: Tensor, temperature: float, excluded: Tensor | None = None
) -> Tensor:
    """Sum over queries[Q, D] of the InfoNCE loss against passages[P, D]; the caller divides by Q.

    Args:
        queries: Unit vectors.
        passages: Unit vectors, shared by all queries: one's positives are the others' negatives.
        targets: Row of each query's positive among the passages, int64[Q].
        temperature: Tau of equation 1.
        excluded: bool[Q, P], True where a passage is no negative of the query; a target is never excluded.

    Returns:
        A scalar, in float32 whatever the type of the vectors.
    """
    assert temperature > 0, "checked where it is read"
    scores = queries.float() @ passages.float().T / temperature
    if excluded is not None:
        own = functional.one_hot(targets, num_classes=scores.shape[1]).bool()
        scores = scores.masked_fill(excluded & ~own, float("-inf"))
    return functional.cross_entropy(scores, targets, reduction="sum")


def distillation(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """Sum over rows of the cross-entropy of scores[B, C] against the softmax of teacher_scores[B, C].

    Up to a constant the Kullback-Leibler divergence from the teacher; the gradient is the same.
    """
    return functional.cross_entropy(scores.float(), teacher_scores.float().softmax(-1), reduction="sum")


def known_positives_mask(passage_keys: Tensor, known_keys: Tensor) -> Tensor:
    """bool[Q, P]: which passages, by passage_keys[P], are among each query's known_keys[Q, M].

    Keys are integers, one for each distinct text; `NO_KEY` in `known_keys` matches nothing.
    """
    return (known_keys[:, :, None] == passage_keys[None, None, :]).any(dim=1)


def gathered(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensors[N, ...] of all processes, joined, and where this one's begin; gradients flow to every process.

    Alone, the tensor itself.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return tensor, 0
    if tensor.requires_grad:
        from torch.distributed.nn.functional import all_gather

        parts = list(all_gather(tensor))
    else:
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts), torch.distributed.get_rank() * len(tensor)


def encode_by_length(
    model: SentenceTransformer, columns: Sequence[Mapping[str, Any]], max_tokens: int, cache_gradients: bool
) -> list[Tensor]:
    """Unit vectors[B, D] of each column of tokenized texts, all encoded together in chunks of similar length.

    A batch's columns are padded to their longest texts; sorted by length, hardly any padding is computed. With cached
    gradients (Gao et al., 2021) a chunk's activations are not kept but computed again when its gradient is due: the
    memory is that of one chunk, whatever the batch, for one more forward pass.

    Args:
        model: The encoder.
        columns: Tokenized batches, padded on the right; others are encoded column by column.
        max_tokens: Tokens of a chunk, padding included.
        cache_gradients: See above.
    """

    def vectors(batch: dict[str, Any]) -> Tensor:
        return functional.normalize(model(batch)["sentence_embedding"], dim=-1)

    def encoded(batch: dict[str, Any]) -> Tensor:
        if not (cache_gradients and torch.is_grad_enabled()):
            return vectors(batch)
        names = list(batch)
        kept: Tensor = checkpoint(
            lambda *values: vectors(dict(zip(names, values, strict=True))), *batch.values(), use_reentrant=False
        )
        return kept

    names = [name for name in _TOKENS if name in columns[0]]
    known = {*_TOKENS, "modality"}
    plain = all(set(column) <= known and bool((column["attention_mask"][:, 0] == 1).all()) for column in columns)
    if not plain:
        return [encoded(dict(column)) for column in columns]
    width = max(column["input_ids"].shape[1] for column in columns)
    joined = {
        name: torch.cat([functional.pad(c[name], (0, width - c[name].shape[1])) for c in columns]) for name in names
    }
    lengths = joined["attention_mask"].sum(1)
    order = lengths.argsort(descending=True, stable=True)
    parts = [
        encoded({name: value[rows, : int(lengths[rows[0]])] for name, value in joined.items()})
        for rows in _chunks(order, lengths, max_tokens)
    ]
    restored = torch.cat(parts)[order.argsort()]
    return list(restored.split([len(column["input_ids"]) for column in columns]))


def _chunks(order: Tensor, lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    start = 0
    while start < len(order):
        size = max(1, max_tokens // int(lengths[order[start]]))
        yield order[start : start + size]
        start += size


class InfoNceLoss(nn.Module):
    """Loss for `SentenceTransformerTrainer`: columns query, positive, negative_1, ..., all in-batch passages.

    The label column holds, for each row, the keys of its passages (C), then the keys of all known positives of its
    query (M, filled up with `NO_KEY`), then with distillation the teacher's scores of its passages (C). A passage of
    another row that is a known positive of this query, by its text, is left out of this query's denominator. Without a
    label column nothing is left out.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float,
        *,
        max_chunk_tokens: int = 16384,
        cache_gradients: bool = False,
        across_processes: bool = False,
        distillation_weight: float = 0.0,
    ) -> None:
        """Keep the settings.

        Args:
            model: The encoder.
            temperature: Tau.
            max_chunk_tokens: Tokens encoded at once, padding included.
            cache_gradients: See `encode_by_length`.
            across_processes: Passages of all processes are negatives.
            distillation_weight: Of the teacher's term beside InfoNCE; 0 reads no teacher's scores.
        """
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0.")
        self.model = model
        self.temperature = temperature
        self.max_chunk_tokens = max_chunk_tokens
        self.cache_gradients = cache_gradients
        self.across_processes = across_processes
        self.distillation_weight = distillation_weight

    def forward(self, features: list[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Mean loss of a batch; `features` has a tokenized batch for each column, `labels` is [B, C + M (+ C)]."""
        query, *columns = encode_by_length(self.model, features, self.max_chunk_tokens, self.cache_gradients)
        num_columns = len(columns)
        passages, first = torch.cat(columns), 0
        teacher = None
        if labels is not None and self.distillation_weight:
            labels, teacher = labels[:, :-num_columns], labels[:, -num_columns:]
        passage_keys = None if labels is None else labels[:, :num_columns].T.reshape(-1)
        if self.across_processes:
            passages, first = gathered(passages)
            passage_keys = None if passage_keys is None else gathered(passage_keys)[0]
        targets = first + torch.arange(len(query), device=query.device)
        excluded = None
        if labels is not None and passage_keys is not None:
            excluded = known_positives_mask(passage_keys, labels[:, num_columns:])
        loss = info_nce(query, passages, targets, self.temperature, excluded)
        if teacher is not None:
            scores = torch.stack([(query.float() * column.float()).sum(-1) for column in columns], dim=1)
            loss = loss + self.distillation_weight * distillation(scores / self.temperature, teacher)
        return loss / len(query)

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return {"temperature": self.temperature, "distillation_weight": self.distillation_weight}
