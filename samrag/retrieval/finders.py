"""Approximate search: which documents may be the nearest; `samrag.retrieval.index` then computes their scores.

FAISS's IVF and HNSW hold vectors in 8 bits a component, which suffices to find candidates. They are built by one
thread, because links that several threads add depend on chance. Milvus is asked for an exact search of its own.
Left out: training or searching on a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from samrag.errors import UserError
from samrag.files import replacing

if TYPE_CHECKING:
    from samrag.retrieval.store import SearchOptions

TRAINING_VECTORS_PER_LIST = 64
MIN_TRAINING_VECTORS = 20_000
ROWS_AT_ONCE = 16_384
MILVUS_ROWS_AT_ONCE = 1000
MILVUS_DEPTH = 16_384
"""Documents that Milvus gives at most."""
MILVUS_TOKEN = "MILVUS_TOKEN"
"""Environment variable of a Milvus server's secret."""


class Finder(Protocol):
    """Finds candidates."""

    def candidates(self, queries: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
        """Positions[Q, depth] of documents near each query[Q, D]; -1 where fewer are found."""
        ...


class FaissFinder:
    """IVF or HNSW in a file."""

    def __init__(self, path: Path, options: SearchOptions) -> None:
        import faiss

        try:
            self._index: Any = faiss.read_index(str(path))
        except RuntimeError as error:
            raise UserError(f"{path} is broken; build the index again with overwrite: true.") from error
        self._options = options

    def candidates(self, queries: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
        """See `Finder`."""
        if self._options.method == "ivf":
            self._index.nprobe = self._options.num_probes
        else:
            self._index.hnsw.efSearch = max(self._options.ef_search, depth)
        positions: NDArray[np.int64] = self._index.search(np.ascontiguousarray(queries), depth)[1]
        return positions


def write_faiss(path: Path, shards: Sequence[NDArray[Any]], options: SearchOptions) -> None:
    """Build an IVF or HNSW index over vectors and write it to a file."""
    import faiss

    count, dimension = sum(map(len, shards)), shards[0].shape[1]
    num_lists = min(options.num_lists or round(4 * count**0.5), max(1, count // 40))
    kind = f"IVF{num_lists},SQ8" if options.method == "ivf" else f"HNSW{options.num_links}_SQ8"
    with _one_thread():
        index: Any = faiss.index_factory(dimension, kind, faiss.METRIC_INNER_PRODUCT)
        if options.method == "hnsw":
            index.hnsw.efConstruction = options.ef_construction
        sample = max(MIN_TRAINING_VECTORS, TRAINING_VECTORS_PER_LIST * num_lists)
        index.train(sampled(shards, sample))
        for shard in shards:
            for start in range(0, len(shard), ROWS_AT_ONCE):
                index.add(np.ascontiguousarray(shard[start : start + ROWS_AT_ONCE], dtype=np.float32))
    with replacing(path) as temporary:
        faiss.write_index(index, str(temporary))


class MilvusFinder:
    """A collection on a Milvus server, or in a file of Milvus Lite, that holds the vectors of one index.

    Args:
        uri: the server's address, or a file's path that ends in `.db`; a secret is read from `MILVUS_TOKEN`.
        name: the collection.

    Raises:
        UserError: pymilvus is not installed, or there is no Milvus at that address.
    """

    def __init__(self, uri: str, name: str) -> None:
        try:
            from pymilvus import MilvusClient
            from pymilvus.exceptions import MilvusException
        except ImportError as error:
            raise UserError("search: milvus needs pymilvus; pip install samrag[milvus]") from error
        try:
            self._client = MilvusClient(uri=uri, token=os.environ.get(MILVUS_TOKEN, ""))
        except (MilvusException, OSError, ValueError) as error:
            raise UserError(f"there is no Milvus at {uri} ({error}); start it, or give another milvus_uri.") from error
        self._name = name
        self._uri = uri

    def check(self, count: int) -> None:
        """See that the collection holds all vectors.

        Raises:
            UserError: it is missing, or holds another number.
        """
        if not self._client.has_collection(self._name) or self._count() != count:
            raise UserError(
                f"Milvus at {self._uri} does not hold the {count} vectors of this index; "
                "run inference/build_index.py again for it."
            )
        self._client.load_collection(self._name)

    def fill(self, shards: Sequence[NDArray[Any]]) -> None:
        """Write vectors into the collection, unless it holds them all."""
        from pymilvus import DataType

        total, dimension = sum(map(len, shards)), shards[0].shape[1]
        if self._client.has_collection(self._name):
            if self._count() == total:
                return
            self._client.drop_collection(self._name)
        schema = self._client.create_schema(auto_id=False)
        schema.add_field("position", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dimension)
        index = self._client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="IP")
        self._client.create_collection(self._name, schema=schema, index_params=index, consistency_level="Strong")
        position = 0
        for shard in shards:
            for start in range(0, len(shard), MILVUS_ROWS_AT_ONCE):
                rows = shard[start : start + MILVUS_ROWS_AT_ONCE].astype(np.float32)
                records = [{"position": position + row, "vector": vector.tolist()} for row, vector in enumerate(rows)]
                self._client.insert(self._name, records)
                position += len(rows)
        self._client.flush(self._name)

    def drop(self) -> None:
        """Remove the collection."""
        self._client.drop_collection(self._name)

    def candidates(self, queries: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
        """See `Finder`."""
        if depth > MILVUS_DEPTH:
            raise UserError(f"Milvus gives at most {MILVUS_DEPTH} documents a query, {depth} are needed; lower k.")
        found = self._client.search(
            self._name, data=[query.tolist() for query in queries], limit=depth, search_params={"metric_type": "IP"}
        )
        positions = np.full((len(queries), depth), -1, dtype=np.int64)
        for row, hits in zip(positions, found, strict=True):
            row[: len(hits)] = [hit["position"] for hit in hits]
        return positions

    def _count(self) -> int:
        return int(self._client.get_collection_stats(self._name)["row_count"])


def sampled(shards: Sequence[NDArray[Any]], count: int) -> NDArray[np.float32]:
    """At most `count` vectors, at even distances."""
    step = max(1, -(-sum(map(len, shards)) // count))
    start, parts = 0, []
    for shard in shards:
        parts.append(shard[-start % step :: step].astype(np.float32))
        start += len(shard)
    return np.concatenate(parts)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
