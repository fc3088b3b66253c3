"""Rows of token ids to padded batches, images from a cache, and the order the rows come in.

TRL's vision collator renders, tokenizes and preprocesses every row again at each step of each epoch, and its length
sampler yields long batches first and short ones last. Here all that happens once, before training, and batches of
similar length come in random order. Left out: packing, and truncation (rows that do not fit never get here).

Shapes: B rows of a batch, T tokens of the longest, I images of the batch, C, H, W channels, height, width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from samrag.errors import UserError
from samrag.images import IMAGE_ERRORS, read_image

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

IGNORED = -100
"""Label of a position without loss."""


class PixelCache:
    """Preprocessed images by path, as the image processor gives them.

    An image is kept as uint8 before normalisation, a quarter of the memory, when that gives the processor's own values
    back (checked on the first image); otherwise as float32.
    """

    def __init__(self, image_processor: BaseImageProcessor, max_bytes: int) -> None:
        self._processor = image_processor
        self._free_bytes = max_bytes
        self._kept: dict[str, Tensor] = {}
        self._affine: tuple[Tensor, Tensor] | None = None
        self._probed = False

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, path: str) -> torch.Size:
        """Read an image, keep it if there is room, and return its preprocessed shape [C, H, W].

        Raises:
            UserError: the file is missing or no image.
        """
        if path not in self._kept:
            pixels = self._read(path)
            if pixels.nbytes > self._free_bytes:
                return pixels.shape
            self._free_bytes -= pixels.nbytes
            self._kept[path] = pixels
        return self._kept[path].shape

    def __getitem__(self, path: str) -> Tensor:
        """Preprocessed float32[C, H, W] of an image."""
        pixels = self._kept[path] if path in self._kept else self._read(path)
        return pixels if self._affine is None else pixels * self._affine[0] + self._affine[1]

    def _read(self, path: str) -> Tensor:
        if not Path(path).is_file():
            raise UserError(f"the image {path} does not exist; run the stage that writes it, or remove its rows.")
        try:
            image = read_image(Path(path))
        except IMAGE_ERRORS as error:
            raise UserError(f"the image {path} cannot be read ({error}); replace it, or remove its rows.") from error
        if not self._probed:
            self._probed = True
            self._affine = self._find_affine(image)
        raw = {} if self._affine is None else {"do_rescale": False, "do_normalize": False}
        pixels: Tensor = self._processor(image, return_tensors="pt", **raw)["pixel_values"][0]
        return pixels

    def _find_affine(self, image: Any) -> tuple[Tensor, Tensor] | None:
        """(scale, shift) from uint8 to the processor's values; None when the processor does something else."""
        processor = self._processor
        if not (getattr(processor, "do_normalize", False) and getattr(processor, "do_rescale", False)):
            return None
        wanted = processor(image, return_tensors="pt")["pixel_values"][0]
        raw = processor(image, return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"][0]
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (processor.image_mean, processor.image_std))
        scale, shift = processor.rescale_factor / std, -mean / std
        fits = raw.dtype == torch.uint8 and torch.allclose(raw * scale + shift, wanted, atol=1e-5)
        return (scale, shift) if fits else None


class SftCollator:
    """Encoded rows to a batch: padded on the right, loss on the completion alone."""

    def __init__(self, pixels: Mapping[str, Tensor] | PixelCache, pad_token_id: int) -> None:
        self._pixels = pixels
        self._pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate rows of `input_ids`, `label_start` (index of the first target token) and `images` (paths).

        Returns:
            input_ids[B, T], attention_mask[B, T], labels[B, T] and, if there are images, pixel_values[I, C, H, W].
        """
        width = max(len(row["input_ids"]) for row in rows)
        input_ids = torch.full((len(rows), width), self._pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, IGNORED)
        for i, row in enumerate(rows):
            ids, start = torch.tensor(row["input_ids"]), row["label_start"]
            assert 0 < start < len(ids), f"row has {len(ids)} tokens and its target starts at {start}"
            input_ids[i, : len(ids)] = ids
            attention_mask[i, : len(ids)] = 1
            labels[i, start : len(ids)] = ids[start:]
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        images = [path for row in rows for path in row["images"]]
        if images:
            batch["pixel_values"] = torch.stack([self._pixels[path] for path in images])
        return batch


class LengthGroupedBatches(Sampler[int]):
    """Row order in which each run of `batch_size` rows has similar lengths, and the runs come in random order.

    The order depends on seed and epoch alone, so a resumed run sees the rows that the whole run would have seen.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths = list(lengths)
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
        window = 50 * self._batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            part = sorted(order[start : start + window], key=self._lengths.__getitem__)
            batches += [part[i : i + self._batch_size] for i in range(0, len(part), self._batch_size)]
        # A short batch goes last, or all rows after it would straddle two batches.
        whole = [batch for batch in batches if len(batch) == self._batch_size]
        rest = [batch for batch in batches if len(batch) < self._batch_size]
        for i in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[i]
        for batch in rest:
            yield from batch
