"""A stand-in embedder, so that most tests need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from samrag.progress import Advance
from samrag.schema import Document, Modality


class BagEmbedder:
    """Unit vectors from a hash of the words; equal texts have equal vectors."""

    pooling = "sum"
    query_instruction = ""

    def __init__(self, identity: str = "bag", dimension: int = 32) -> None:
        self.identity = identity
        self.dimension = dimension
        self.num_encoded = 0

    def encode_documents(
        self, texts: Sequence[str], max_batch_tokens: int | None = None, advance: Advance | None = None
    ) -> NDArray[np.float32]:
        self.num_encoded += len(texts)
        if advance is not None:
            advance(len(texts))
        return np.stack([self._vector(text) for text in texts])

    encode_queries = encode_documents

    def _vector(self, text: str) -> NDArray[np.float32]:
        seeds = [int.from_bytes(word.encode(), "big") for word in text.lower().split()]
        vector = sum(np.random.default_rng(seed).standard_normal(self.dimension) for seed in seeds)
        return (vector / np.linalg.norm(vector)).astype(np.float32)


def text_document(doc_id: str, title: str, text: str = "") -> Document:
    return Document(doc_id, Modality.TEXT, title, text=text)


@pytest.fixture
def bag() -> BagEmbedder:
    return BagEmbedder()


@pytest.fixture
def corpus() -> list[Document]:
    towns = ["Arle", "Borv", "Cald", "Dune", "Eske", "Fenn", "Gorl", "Holt"]
    return [
        text_document(f"d{i}", f"{town} Rowing Club", f"Founded in {1900 + i} at {town} pier")
        for i, town in enumerate(towns)
    ]
