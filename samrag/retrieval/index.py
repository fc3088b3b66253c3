"""An exact inner-product index in a folder.

The manifest is written last and taken away first, so a folder with a manifest is a whole index. FAISS finds the
candidates; their scores are then computed pair by pair, because FAISS's blocked product may give equal vectors scores
that differ in the last bit, and ties must follow the order of the corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import samrag
from samrag.errors import UserError
from samrag.files import read_json, replacing, write_json
from samrag.schema import Document

if TYPE_CHECKING:
    from samrag.retrieval.embedder import Embedder

MANIFEST = "manifest.json"
VECTORS = "vectors.faiss"
DOC_IDS = "doc_ids.json"
TIE_SLACK = 16
"""Candidates taken beyond k, so that ties at the border are cut in corpus order."""
QUERIES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Hit:
    """One document of a ranking."""

    doc_id: str
    score: float


@dataclass(frozen=True, slots=True)
class IndexManifest:
    """What an index was built from."""

    embedder: str
    """`Embedder.identity`."""
    dimension: int
    num_documents: int
    documents: str
    """Hash of ids and retrieval texts (`hash_documents`)."""
    samrag_version: str


@dataclass(frozen=True, slots=True)
class BuiltIndex:
    """Outcome of `build_index`."""

    index: Index
    skipped: bool
    """True when the folder already held this very index."""


class Index:
    """Vectors[N, D] of a corpus and the documents' ids."""

    def __init__(self, vectors: Any, doc_ids: Sequence[str], manifest: IndexManifest) -> None:
        self._faiss = vectors
        self.doc_ids = tuple(doc_ids)
        self._places = {doc_id: place for place, doc_id in enumerate(self.doc_ids)}
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.doc_ids)

    @property
    def vectors(self) -> NDArray[np.float32]:
        """The documents' vectors[N, D], as FAISS holds them: valid as long as the index, and not to be changed."""
        import faiss

        count, dimension = self._faiss.ntotal, self._faiss.d
        matrix: NDArray[np.float32] = faiss.rev_swig_ptr(self._faiss.get_xb(), count * dimension)
        return matrix.reshape(count, dimension)

    @classmethod
    def load(cls, folder: Path, embedder: Embedder | None = None) -> Index:
        """Load an index; with `embedder`, only if it was built by that one.

        Raises:
            UserError: no whole index there, or another embedder's.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        if embedder is not None and embedder.identity != manifest.embedder:
            raise UserError(
                f"the index {folder} was built with another embedder (or query instruction, or max_length); "
                "load that embedder, or build the index again with this one."
            )
        import faiss

        try:
            vectors = faiss.read_index(str(folder / VECTORS))
        except RuntimeError as error:
            raise UserError(f"{folder / VECTORS} is missing or broken; build the index again.") from error
        doc_ids = read_json(folder / DOC_IDS)
        if (
            vectors.ntotal != manifest.num_documents
            or len(doc_ids) != vectors.ntotal
            or vectors.d != manifest.dimension
        ):
            raise UserError(f"the files of the index {folder} do not belong together; build the index again.")
        return cls(vectors, doc_ids, manifest)

    def vectors_of(self, doc_ids: Sequence[str]) -> NDArray[np.float32]:
        """Vectors[N, D] of documents, in the order asked for."""
        return self.vectors[[self._places[doc_id] for doc_id in doc_ids]]

    def search(self, query_vectors: NDArray[np.float32], k: int) -> list[list[Hit]]:
        """The k best documents of each query[N, D], best first; equal scores in corpus order.

        Raises:
            UserError: k is below 1, or the vectors have another dimension.
        """
        if k < 1:
            raise UserError(f"k is {k}; at least one document must be asked for.")
        queries = np.ascontiguousarray(query_vectors, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self._faiss.d:
            raise UserError(f"query vectors have shape {queries.shape}; the index needs [N, {self._faiss.d}].")
        depth = min(len(self), k + TIE_SLACK)
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            block = queries[start : start + QUERIES_AT_ONCE]
            _, positions = self._faiss.search(block, depth)
            scores = self._pair_scores(block, positions)
            hits.extend(self._ranked(row, rank, k) for row, rank in zip(scores, positions, strict=True))
        return hits

    def _pair_scores(self, queries: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Inner products scores[Q, K] of queries[Q, D] with the documents at positions[Q, K]."""
        matrix = self.vectors
        return np.stack([(matrix[row] * query).sum(axis=1) for query, row in zip(queries, positions, strict=True)])

    def _ranked(self, scores: NDArray[np.float32], positions: NDArray[np.int64], k: int) -> list[Hit]:
        order = np.lexsort((positions, -scores))[:k]
        return [Hit(self.doc_ids[positions[i]], float(scores[i])) for i in order]


def build_index(
    documents: Sequence[Document],
    embedder: Embedder,
    folder: Path,
    batch_size: int = 32,
    progress: bool = False,
    overwrite: bool = False,
) -> BuiltIndex:
    """Embed the documents and write the index folder.

    Equal retrieval texts are embedded once, so they have equal vectors.

    Args:
        documents: The corpus; its order breaks ties.
        embedder: Makes the vectors.
        folder: Where the index is written; a whole index of the same documents and embedder is kept as it is.
        batch_size: Texts a step.
        progress: Show a progress bar.
        overwrite: Replace an index of other documents or another embedder.

    Raises:
        UserError: no documents, an id twice, or another index in the folder.
    """
    folder = Path(folder)
    _check_documents(documents)
    manifest = IndexManifest(
        embedder=embedder.identity,
        dimension=embedder.dimension,
        num_documents=len(documents),
        documents=hash_documents(documents),
        samrag_version=samrag.__version__,
    )
    if (folder / MANIFEST).exists():
        found = _read_manifest(folder)
        if (found.embedder, found.documents) == (manifest.embedder, manifest.documents):
            return BuiltIndex(Index.load(folder), skipped=True)
        if not overwrite:
            what = "another embedder" if found.embedder != manifest.embedder else "other documents"
            raise UserError(f"{folder} holds an index of {what}; choose another folder, or overwrite it.")
    vectors = _embed_distinct([document.retrieval_text for document in documents], embedder, batch_size, progress)
    _write_index(folder, vectors, [document.doc_id for document in documents], manifest)
    return BuiltIndex(Index.load(folder), skipped=False)


def hash_documents(documents: Sequence[Document]) -> str:
    """Hash of the corpus as the retriever sees it: ids and retrieval texts, in order."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.doc_id.encode(), document.retrieval_text.encode()):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def _check_documents(documents: Sequence[Document]) -> None:
    if not documents:
        raise UserError("the corpus is empty; an index needs at least one document.")
    seen: set[str] = set()
    for document in documents:
        if document.doc_id in seen:
            raise UserError(f"the document id {document.doc_id!r} occurs twice; ids must be unique in a corpus.")
        seen.add(document.doc_id)


def _embed_distinct(texts: Sequence[str], embedder: Embedder, batch_size: int, progress: bool) -> NDArray[np.float32]:
    """Vectors[N, D]; a text that occurs n times is encoded once."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    vectors = embedder.encode_documents(list(rows), batch_size=batch_size, progress=progress)
    return vectors[[rows[text] for text in texts]]


def _write_index(folder: Path, vectors: NDArray[np.float32], doc_ids: list[str], manifest: IndexManifest) -> None:
    import faiss

    (folder / MANIFEST).unlink(missing_ok=True)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors))
    with replacing(folder / VECTORS) as temporary:
        faiss.write_index(index, str(temporary))
    write_json(folder / DOC_IDS, doc_ids)
    write_json(folder / MANIFEST, asdict(manifest))


def _read_manifest(folder: Path) -> IndexManifest:
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is no index, or one whose building was cut short (no {MANIFEST}); "
            "run inference/build_index.py for it."
        )
    try:
        return IndexManifest(**read_json(folder / MANIFEST))
    except TypeError as error:
        raise UserError(f"{folder / MANIFEST} is no manifest of this version; build the index again.") from error
