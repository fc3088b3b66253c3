"""Images and texts to vectors of one space: a CLIP model with its checks, for scoring interleaved answers.

Fits `samrag.metrics.rag_igbench.ImageTextEncoder`. The benchmark's model is `openai/clip-vit-large-patch14`, which
knows English alone; for Chinese take a multilingual one of the same classes. Left out: remote code, pickled weights,
and vectors kept on the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samrag.errors import UserError
from samrag.files import within
from samrag.images import IMAGE_ERRORS, read_image

if TYPE_CHECKING:
    import torch


class ClipEncoder:
    """A loaded CLIP model. Make one with `ClipEncoder.load`."""

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any, image_root: Path, batch_size: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._image_root = image_root
        self._batch_size = batch_size
        self._by_content: dict[str, NDArray[np.float32]] = {}
        """Vectors of the images seen, by the digest of their bytes."""

    @classmethod
    def load(cls, folder: Path, image_root: Path, batch_size: int = 64, device: str | None = None) -> ClipEncoder:
        """Load a model in float32 from a folder; the network is never touched.

        Args:
            folder: a CLIP model with tokenizer and image processor, in safetensors.
            image_root: folder that image paths are relative to.
            batch_size: images or texts that are encoded at a time.
            device: a torch device; None takes an accelerator if there is one.

        Raises:
            UserError: the folder is no such model, or batch_size is below 1.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
        import torch
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no model; download one, such as openai/clip-vit-large-patch14.")
        try:
            model = CLIPModel.from_pretrained(str(folder), use_safetensors=True, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
            image_processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder} could not be loaded as a CLIP model: {error}") from error
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.to(device).eval(), tokenizer, image_processor, Path(image_root), batch_size)

    def encode_images(self, images: Sequence[str]) -> NDArray[np.float32]:
        """Vectors[N, D] of images, by their paths below the image root; equal files are encoded once.

        Raises:
            UserError: an image cannot be read, or its path leaves the image root.
        """
        paths = [within(self._image_root, name) for name in images]
        digests = [_digest(path) for path in paths]
        new = {digest: path for digest, path in zip(digests, paths, strict=True) if digest not in self._by_content}
        for batch in self._batches(list(new)):
            pixels = self._image_processor([_pixels(new[digest]) for digest in batch], return_tensors="pt")
            vectors = self._run("get_image_features", pixel_values=pixels["pixel_values"])
            self._by_content.update(zip(batch, vectors, strict=True))
        return np.stack([self._by_content[digest] for digest in digests])

    def encode_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors[N, D] of texts, each cut to the model's length."""
        length = self._model.config.text_config.max_position_embeddings
        vectors = []
        for batch in self._batches(texts):
            tokens = self._tokenizer(list(batch), padding=True, truncation=True, max_length=length, return_tensors="pt")
            names = ("input_ids", "attention_mask")
            vectors.append(self._run("get_text_features", **{name: tokens[name] for name in names}))
        return np.concatenate(vectors)

    def _batches(self, items: Sequence[str]) -> Iterator[Sequence[str]]:
        for start in range(0, len(items), self._batch_size):
            yield items[start : start + self._batch_size]

    def _run(self, method: str, **inputs: torch.Tensor) -> NDArray[np.float32]:
        """The projected vectors of one batch."""
        import torch

        with torch.inference_mode():
            out = getattr(self._model, method)(**{name: value.to(self._model.device) for name, value in inputs.items()})
        vectors = out if isinstance(out, torch.Tensor) else out.pooler_output
        return np.asarray(vectors.float().cpu().numpy())


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"the image {path} cannot be read ({error.strerror}); fetch it, or leave CLIP out.") from error


def _pixels(path: Path) -> Any:
    try:
        return read_image(path)
    except IMAGE_ERRORS as error:
        raise UserError(f"the image {path} cannot be read ({error}); mend it, or leave CLIP out.") from error
