"""InfoNCE for the retriever (SAM-RAG, equation 1): a function over tensors, and the module the trainer calls.

Shapes: Q queries, P passages, D vector length, B rows of a batch, C passage columns of a row (the positive, then
negatives), M known positives of a query. Left out: negatives gathered across devices, and distillation scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

NO_KEY = -1
"""Fills a row's list of known positives up to M."""


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


def known_positives_mask(passage_keys: Tensor, known_keys: Tensor) -> Tensor:
    """bool[Q, P]: which passages, by passage_keys[P], are among each query's known_keys[Q, M].

    Keys are integers, one for each distinct text; `NO_KEY` in `known_keys` matches nothing.
    """
    return (known_keys[:, :, None] == passage_keys[None, None, :]).any(dim=1)


class InfoNceLoss(nn.Module):
    """Loss for `SentenceTransformerTrainer`: columns query, positive, negative_1, ..., all in-batch passages.

    The label column holds, for each row, the keys of its passages (C) and then the keys of all known positives of its
    query (M, filled up with `NO_KEY`). A passage of another row that is a known positive of this query, by its text,
    is left out of this query's denominator. Without a label column nothing is left out.
    """

    def __init__(self, model: SentenceTransformer, temperature: float) -> None:
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0.")
        self.model = model
        self.temperature = temperature

    def forward(self, features: list[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """Mean loss of a batch; `features` has a tokenized batch for each column, `labels` is int64[B, C + M]."""
        query, *columns = (functional.normalize(self.model(f)["sentence_embedding"], dim=-1) for f in features)
        passages = torch.cat(columns)
        targets = torch.arange(len(query), device=query.device)
        excluded = None
        if labels is not None:
            passage_keys = labels[:, : len(columns)].T.reshape(-1)
            excluded = known_positives_mask(passage_keys, labels[:, len(columns) :])
        return info_nce(query, passages, targets, self.temperature, excluded) / len(query)

    def get_config_dict(self) -> dict[str, Any]:
        """Settings for the model card."""
        return {"temperature": self.temperature}
