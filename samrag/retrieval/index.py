"""The index of a corpus: build it, bring it up to date, search it.

Searching is exact unless an approximate method was asked for when the index was built. Such a method only proposes
candidates: their scores are those of the exact search, and equal scores keep the order of the corpus.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import samrag
from samrag.errors import UserError
from samrag.files import sha256
from samrag.progress import Advance, progress
from samrag.retrieval.finders import FaissFinder, Finder, MilvusFinder, sampled, write_faiss
from samrag.retrieval.nearest import ExactSearch, Nearest
from samrag.retrieval.store import (
    MANIFEST,
    ElementType,
    File,
    Manifest,
    Search,
    SearchOptions,
    Space,
    Store,
    clear,
    commit,
    digest,
    mapped,
    read_manifest,
    read_store,
    text_hash,
    write_rows,
    write_shards,
)
from samrag.schema import Document

TIE_SLACK = 16
"""Candidates taken beyond k from an approximate search, so that ties at the border are cut in corpus order."""
QUERIES_AT_ONCE = 256
RECALL_QUERIES = 256
RECALL_DEPTH = 10


class DocumentEmbedder(Protocol):
    """What an index needs of `samrag.retrieval.embedder.Embedder`."""

    @property
    def identity(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def pooling(self) -> str: ...
    @property
    def query_instruction(self) -> str: ...
    def encode_documents(
        self, texts: Sequence[str], max_batch_tokens: int | None = None, advance: Advance | None = None
    ) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """One document of a ranking."""

    doc_id: str
    score: float


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How an index is built."""

    dtype: ElementType = "float32"
    """How components are stored; float16 takes half the place and rounds them to three digits."""
    shard_size: int = 65_536
    """Documents of a file: what a killed build may lose."""
    max_batch_tokens: int | None = None
    """See `Embedder.encode_documents`."""
    search: SearchOptions = field(default_factory=SearchOptions)
    """How documents are looked for."""


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """Outcome of `build_index`."""

    index: Index
    num_encoded: int
    """Texts that were encoded; those of a former index or of whole shards were not."""
    skipped: bool = False
    """True when the folder already held this very index."""


class Index:
    """Vectors of a corpus and the documents' ids. Open one with `Index.load`."""

    def __init__(self, store: Store, finder: Finder | None = None) -> None:
        self.folder = store.folder
        self.manifest = store.manifest
        self.doc_ids = store.doc_ids
        self.shards = store.shards
        """Vectors[rows, D] in corpus order, mapped from files, as they are stored."""
        self._finder = finder

    def __len__(self) -> int:
        return len(self.doc_ids)

    @classmethod
    def load(cls, folder: Path, embedder: DocumentEmbedder | None = None) -> Index:
        """Load an index; with `embedder`, only if it was built by that one.

        Raises:
            UserError: no whole index there, another embedder's, or its Milvus cannot be reached.
        """
        folder = Path(folder)
        if embedder is not None and embedder.identity != read_manifest(folder).space.embedder:
            raise UserError(
                f"the index {folder} was built with another embedder (or query instruction, or max_length); "
                "load that embedder, or build the index again with this one (overwrite: true)."
            )
        store = read_store(folder)
        return cls(store, _finder(folder, store.manifest))

    def check_documents(self, documents: Sequence[Document]) -> None:
        """See that the index is of these documents.

        Raises:
            UserError: it was built from others, or from others' texts.
        """
        if self.manifest.documents != hash_documents(documents):
            raise UserError(
                f"the index {self.folder} was built from other documents; bring it up to date with "
                "inference/build_index.py."
            )

    @functools.cached_property
    def exact(self) -> ExactSearch:
        """Exact search by positions."""
        return ExactSearch(*self.shards)

    @property
    def vectors(self) -> NDArray[np.float32]:
        """The documents' vectors[N, D]; read from the disk as they are used where one float32 file has all."""
        if len(self.shards) == 1:
            return self.shards[0].astype(np.float32, copy=False)
        return np.concatenate(self.shards, dtype=np.float32)

    def vectors_of(self, doc_ids: Sequence[str]) -> NDArray[np.float32]:
        """Vectors[N, D] of documents, in the order asked for."""
        positions = np.array([self._places[doc_id] for doc_id in doc_ids], dtype=np.int64)
        vectors = np.empty((len(positions), self.manifest.space.dimension), dtype=np.float32)
        start = 0
        for shard in self.shards:
            rows = (positions >= start) & (positions < start + len(shard))
            vectors[rows] = shard[positions[rows] - start]
            start += len(shard)
        return vectors

    def search(self, query_vectors: NDArray[np.float32], k: int) -> list[list[Hit]]:
        """The k best documents of each query[N, D], best first; equal scores in corpus order.

        Raises:
            UserError: k is below 1, or the vectors have another dimension or are not finite.
        """
        if k < 1:
            raise UserError(f"k is {k}; at least one document must be asked for.")
        queries = np.ascontiguousarray(query_vectors, dtype=np.float32)
        dimension = self.manifest.space.dimension
        if queries.ndim != 2 or queries.shape[1] != dimension:
            raise UserError(f"query vectors have shape {queries.shape}; the index needs [N, {dimension}].")
        k = min(k, len(self))
        if self._finder is None:
            return self._hits(self.exact.search(queries, k))
        blocks = (queries[start : start + QUERIES_AT_ONCE] for start in range(0, len(queries), QUERIES_AT_ONCE))
        return [hits for block in blocks for hits in self._hits(self._approximate(self._finder, block, k))]

    def _approximate(self, finder: Finder, queries: NDArray[np.float32], k: int) -> Nearest:
        """What a finder proposes, ordered; queries for which it finds fewer than k are searched exactly."""
        if not np.isfinite(queries).all():
            raise UserError("a query vector is not finite; look at the question and the embedder.")
        found = finder.candidates(queries, min(len(self), k + TIE_SLACK))
        found = np.sort(np.where(found < 0, len(self), found), axis=1)  # equal scores in corpus order
        found[found == len(self)] = -1
        scores = self.exact.scores_of(queries, found)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        positions, scores = np.take_along_axis(found, order, axis=1), np.take_along_axis(scores, order, axis=1)
        short = (positions < 0).any(axis=1)
        if short.any():
            rest = self.exact.search(queries[short], k)
            positions[short], scores[short] = rest.positions, rest.scores
        return Nearest(positions, scores)

    def recall(self) -> float:
        """Share of the 10 nearest other documents that the search finds, for documents at even distances.

        Questions lie farther from documents than those from one another: theirs may be lower.
        """
        k = min(RECALL_DEPTH + 1, len(self))
        if self._finder is None or k == 1:
            return 1.0
        queries = sampled(self.shards, RECALL_QUERIES)
        least = self.exact.search(queries, k).scores[:, -1:]
        found = (self._approximate(self._finder, queries, k).scores >= least).sum(axis=1) - 1  # without the query
        return float(found.mean() / (k - 1))

    def _hits(self, nearest: Nearest) -> list[list[Hit]]:
        return [
            [Hit(self.doc_ids[position], score) for position, score in zip(row, values, strict=True)]
            for row, values in zip(nearest.positions.tolist(), nearest.scores.tolist(), strict=True)
        ]

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {doc_id: place for place, doc_id in enumerate(self.doc_ids)}


def build_index(
    documents: Sequence[Document],
    embedder: DocumentEmbedder,
    folder: Path,
    options: IndexOptions | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
) -> BuiltIndex:
    """Bring a folder to hold the index of these documents.

    A text is encoded once, however often it occurs, and not at all if the folder has its vector: from an index of
    other documents, which is brought up to date so, or from the whole shards of a build that was killed.

    Args:
        documents: The corpus; its order breaks ties.
        embedder: Makes the vectors.
        folder: Where the index is.
        options: How vectors are stored and looked for.
        overwrite: Replace an index of another embedder or element type, or a broken one.
        show_progress: Show a progress bar.

    Raises:
        UserError: no documents, an id twice, vectors that are not finite or of another dimension, or an index of
            another embedder or element type in the folder.
    """
    folder, options = Path(folder), options or IndexOptions()
    _check_documents(documents)
    space = Space(embedder.identity, embedder.dimension, embedder.pooling, embedder.query_instruction, options.dtype)
    known = _known(folder, space, overwrite)
    corpus = hash_documents(documents)
    same = known is not None and (known.manifest.documents, known.manifest.search.options) == (corpus, options.search)
    if known is not None and same and options.search.method != "milvus":  # a server may have lost its vectors
        return BuiltIndex(Index(known, _finder(folder, known.manifest)), 0, skipped=True)
    encoded = 0
    bar = progress("documents", len(documents)) if show_progress else contextlib.nullcontext()
    with bar as advance:

        def encode(rows: list[int]) -> NDArray[np.float32]:
            nonlocal encoded
            texts = [documents[row].retrieval_text for row in rows]
            vectors = embedder.encode_documents(texts, options.max_batch_tokens, advance)
            _check_vectors(vectors, [documents[row].doc_id for row in rows], space)
            encoded += len(rows)
            return vectors

        hashes = [text_hash(document.retrieval_text) for document in documents]
        shards = write_shards(folder, space, hashes, options.shard_size, encode, known, advance)
    doc_ids = tuple(document.doc_id for document in documents)
    rows = write_rows(folder, doc_ids, hashes)
    manifest = Manifest(space, corpus, len(doc_ids), rows, tuple(shards), Search(options.search), samrag.__version__)
    arrays = tuple(mapped(folder / file.name) for file in shards)
    index = _with_search(Store(folder, manifest, doc_ids, tuple(hashes), arrays), options.search)
    commit(folder, index.manifest)
    if known is not None and known.manifest.search.options.method == "milvus" and known.manifest.documents != corpus:
        _milvus(known.manifest, known.manifest.search.options).drop()
    return BuiltIndex(index, encoded)


def hash_documents(documents: Sequence[Document]) -> str:
    """Hash of the corpus as the retriever sees it: ids and retrieval texts, in order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.doc_id.encode(), document.retrieval_text.encode()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def _known(folder: Path, space: Space, overwrite: bool) -> Store | None:
    """The index in a folder, if there is one of this space."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        found = read_manifest(folder).space
        if found == space:
            return read_store(folder)
        what = f"vectors as {found.dtype}" if found.embedder == space.embedder else "another embedder"
        raise UserError(f"{folder} holds an index of {what}; choose another folder, or replace it (overwrite: true).")
    except UserError:
        if not overwrite:
            raise
        clear(folder)
        return None


def _with_search(store: Store, options: SearchOptions) -> Index:
    """The index with what its search needs, and how much that finds."""
    if options.method == "exact":
        return Index(store)
    file = None
    if options.method == "milvus":
        _milvus(store.manifest, options).fill(store.shards)
    else:
        path = (
            store.folder / f"search-{digest(asdict(options), [shard.sha256 for shard in store.manifest.shards])}.faiss"
        )
        if not path.exists():
            write_faiss(path, store.shards, options)
        file = File(path.name, sha256(path))
    manifest = replace(store.manifest, search=Search(options, file))
    finder = _finder(store.folder, manifest)
    assert finder is not None
    recall = Index(store, finder).recall()
    return Index(replace(store, manifest=replace(manifest, search=Search(options, file, recall))), finder)


def _finder(folder: Path, manifest: Manifest) -> Finder | None:
    """What proposes candidates; None where all documents are looked at."""
    options, file = manifest.search.options, manifest.search.file
    if file is not None:
        return FaissFinder(folder / file.name, options)
    if options.method == "milvus":
        milvus = _milvus(manifest, options)
        milvus.check(manifest.num_documents)
        return milvus
    return None


def _milvus(manifest: Manifest, options: SearchOptions) -> MilvusFinder:
    """The collection of this very index: another one's name differs."""
    assert options.milvus_uri is not None, "the options were checked"
    return MilvusFinder(options.milvus_uri, f"samrag_{digest(asdict(manifest.space), manifest.documents)}")


def _check_documents(documents: Sequence[Document]) -> None:
    if not documents:
        raise UserError("the corpus is empty; an index needs at least one document.")
    seen: set[str] = set()
    for document in documents:
        if document.doc_id in seen:
            raise UserError(f"the document id {document.doc_id!r} occurs twice; ids must be unique in a corpus.")
        seen.add(document.doc_id)


def _check_vectors(vectors: NDArray[np.float32], doc_ids: Sequence[str], space: Space) -> None:
    if vectors.shape != (len(doc_ids), space.dimension):
        raise UserError(
            f"the embedder gave vectors of shape {vectors.shape} for {len(doc_ids)} texts; "
            f"({len(doc_ids)}, {space.dimension}) is needed: look at its dimension."
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(vectors.astype(space.dtype)).all(axis=1)
    if not finite.all():
        raise UserError(
            f"the vector of document {doc_ids[int(finite.argmin())]!r} is not finite as {space.dtype}; "
            "look at its text and the embedder."
        )
