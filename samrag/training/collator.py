"""Rows of token ids to padded batches, and the order the rows come in.

TRL's vision collator renders, tokenizes and preprocesses every row again at each step of each epoch, and its length
sampler yields long batches first and short ones last. Here all that happens once, before training, and batches of
similar length come in random order. Left out: packing, and truncation (rows that do not fit never get here).

Shapes: B rows of a batch, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from samrag.errors import UserError
from samrag.images import IMAGE_ERRORS
from samrag.vlm import ChatProcessor, Picture

IGNORED = -100
"""Label of a position without loss."""
RESPONSE_MASK = "response_mask"
PARTS = "parts"


def read_picture(chat: ChatProcessor, path: Path) -> Picture:
    """A row's image, preprocessed.

    Raises:
        UserError: the file is missing or no image.
    """
    if not path.is_file():
        raise UserError(f"the image {path} does not exist; run the stage that writes it, or remove its rows.")
    try:
        return chat.picture(path)
    except IMAGE_ERRORS as error:
        raise UserError(f"the image {path} cannot be read ({error}); replace it, or remove its rows.") from error


def padded(rows: Sequence[Sequence[int]], pad_token_id: int, left: bool = False) -> tuple[Tensor, Tensor]:
    """input_ids[B, T] and attention_mask[B, T] of rows of token ids."""
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        input_ids[i, place] = torch.tensor(row)
        attention_mask[i, place] = 1
    return input_ids, attention_mask


class SftCollator:
    """Encoded rows to a batch: padded on the right, loss on the completion alone."""

    def __init__(self, chat: ChatProcessor, with_response: bool = False, max_tokens: int | None = None) -> None:
        """Keep the parts.

        Args:
            chat: Of the model.
            with_response: Also mark the response's tokens, which the trainer weighs and takes out again.
            max_tokens: Give a batch in parts of similar length, of so many tokens with padding; None in one.
        """
        self._chat = chat
        self._with_response = with_response
        self._max_tokens = max_tokens

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate rows of `input_ids`, `label_start` and `response_start` (indexes of tokens) and `images` (paths).

        Returns:
            input_ids[B, T], attention_mask[B, T], labels[B, T], and what the model wants for the rows' images; with
            the response also response_mask[B, T]. In parts: a list of such batches, longest rows first, and the labels
            of all, by which the trainer counts what a step learns from.
        """
        if self._max_tokens is None:
            return self._whole(rows)
        parts = [self._whole(part) for part in by_length(rows, self._max_tokens)]
        return {"labels": torch.cat([part["labels"].flatten() for part in parts]), PARTS: parts}

    def _whole(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        input_ids, attention_mask = padded([row["input_ids"] for row in rows], self._chat.pad_token_id)
        labels = input_ids.masked_fill(attention_mask == 0, IGNORED)
        for own, row in zip(labels, rows, strict=True):
            start, length = row["label_start"], len(row["input_ids"])
            assert 0 < start < length, f"row has {length} tokens and its target starts at {start}"
            own[:start] = IGNORED
        pictures = [read_picture(self._chat, Path(path)) for row in rows for path in row["images"]]
        batch = {**self._chat.inputs(input_ids, attention_mask, pictures), "labels": labels}
        if self._with_response:
            starts = torch.tensor([row["response_start"] for row in rows])
            batch[RESPONSE_MASK] = (torch.arange(input_ids.shape[1]) >= starts[:, None]) & (attention_mask == 1)
        return batch


def by_length(rows: Sequence[Mapping[str, Any]], max_tokens: int) -> list[list[Mapping[str, Any]]]:
    """The rows, longest first, in parts of so many tokens with padding; a row alone may have more."""
    parts: list[list[Mapping[str, Any]]] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0]["input_ids"]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


class LengthGroupedBatches(Sampler[int]):
    """Row order in which each run of `batch_size` rows has similar lengths, and the runs come in random order.

    Rows with and without image stay apart as far as they fill runs, so that on several processes all have one or none:
    where the vision tower's weights are sharded, a process without an image would leave the others waiting. The order
    depends on seed and epoch alone, so a resumed run sees the rows that the whole run would have seen.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int, with_image: Sequence[bool] | None = None
    ) -> None:
        self._lengths = list(lengths)
        self._with_image = list(with_image) if with_image is not None else [False] * len(self._lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader when an epoch begins."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        whole: list[list[int]] = []
        rest: list[int] = []
        for side in (False, True):
            rows = [row for row in order if self._with_image[row] is side]
            window = 50 * self._batch_size
            for start in range(0, len(rows), window):
                part = sorted(rows[start : start + window], key=self._lengths.__getitem__)
                batches = [part[i : i + self._batch_size] for i in range(0, len(part), self._batch_size)]
                # A short batch goes last, or all rows after it would straddle two batches.
                whole += [batch for batch in batches if len(batch) == self._batch_size]
                rest += [row for batch in batches if len(batch) < self._batch_size for row in batch]
        for i in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[i]
        yield from rest
