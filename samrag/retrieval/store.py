"""The folder of an index: its files, how they are written, and how they are checked.

    manifest.json                names all other files with their hashes; written last, by one rename
    documents-<hash>.json        ids and text hashes of the documents, row by row
    vectors-00000-<hash>.npy     vectors[rows, D] of the first documents, and so on; read by memory mapping
    search-<hash>.faiss          an approximate index, if one was asked for

A shard is named by what its vectors are made of (embedder, element type, texts) and never changed. So a build that was
killed goes on at the last whole shard; a build for other documents takes the vectors of all texts that it knows, while
readers see the old index until the new manifest takes its place. What no manifest names is then removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from samrag.errors import UserError
from samrag.files import read_json, replacing, sha256, within, write_json
from samrag.progress import Advance

MANIFEST = "manifest.json"
KINDS = ("vectors-*.npy", "documents-*.json", "search-*.faiss")
"""Names of the files that a manifest may name."""
ElementType: TypeAlias = Literal["float32", "float16"]
Encode: TypeAlias = "Callable[[list[int]], NDArray[np.float32]]"
"""Gives vectors[N, D] of the documents at N positions."""


@dataclass(frozen=True, slots=True)
class Space:
    """What decides a vector besides its text."""

    embedder: str
    """`Embedder.identity`."""
    dimension: int
    pooling: str
    query_instruction: str
    dtype: ElementType


@dataclass(frozen=True, slots=True)
class File:
    """A file of the folder."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How documents are looked for."""

    method: Literal["exact", "ivf", "hnsw", "milvus"] = "exact"
    """All documents are looked at, or those that FAISS's cells or graph, or Milvus, propose."""
    num_lists: int | None = None
    """IVF: cells that vectors are sorted into; None takes 4 times the root of their number."""
    num_probes: int = 32
    """IVF: cells that are searched."""
    num_links: int = 32
    """HNSW: neighbours of a vector."""
    ef_construction: int = 128
    """HNSW: candidates while building."""
    ef_search: int = 128
    """HNSW: candidates while searching."""
    milvus_uri: str | None = None
    """Milvus: a server's address, or a file for Milvus Lite."""


@dataclass(frozen=True, slots=True)
class Search:
    """How documents are looked for in this index, and how well."""

    options: SearchOptions
    file: File | None = None
    recall_at_10: float | None = None
    """Share of the 10 nearest that are found, over documents taken as queries; None for exact search."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index was built from, and its files."""

    space: Space
    documents: str
    """Hash of ids and retrieval texts, in order."""
    num_documents: int
    rows: File
    shards: tuple[File, ...]
    search: Search
    samrag_version: str


@dataclass(frozen=True, slots=True)
class Store:
    """A whole folder, checked."""

    folder: Path
    manifest: Manifest
    doc_ids: tuple[str, ...]
    text_hashes: tuple[str, ...]
    shards: tuple[NDArray[Any], ...]
    """Vectors[rows, D], mapped into memory."""


def read_store(folder: Path) -> Store:
    """Open a folder; every file is read once, to see that it is the one that was written.

    Raises:
        UserError: there is no whole index, or a file is missing, cut off, or another one.
    """
    manifest = read_manifest(folder)
    for file in (manifest.rows, *manifest.shards, *filter(None, [manifest.search.file])):
        path = within(folder, file.name)
        if not path.is_file() or sha256(path) != file.sha256:
            raise UserError(
                f"{path} is missing or not the file that was written; build the index again with overwrite: true."
            )
    rows = read_json(folder / manifest.rows.name)
    shards = tuple(mapped(folder / file.name) for file in manifest.shards)
    num_rows = sum(len(shard) for shard in shards)
    if not len(rows["doc_ids"]) == len(rows["text_hashes"]) == num_rows == manifest.num_documents:
        raise UserError(f"the files of the index {folder} do not belong together; build it with overwrite: true.")
    for shard in shards:
        if shard.ndim != 2 or shard.shape[1] != manifest.space.dimension or shard.dtype != manifest.space.dtype:
            raise UserError(f"{folder} holds vectors of another kind than its manifest says; build it again.")
    return Store(folder, manifest, tuple(rows["doc_ids"]), tuple(rows["text_hashes"]), shards)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, without a look at the other files.

    Raises:
        UserError: there is none, or one of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} is no index, or one whose building was cut short (no {MANIFEST}); "
            "run inference/build_index.py for it."
        )
    try:
        return TypeAdapter(Manifest).validate_python(read_json(path))
    except ValidationError as error:
        raise UserError(
            f"{path} is no manifest of this version; build the index again with overwrite: true."
        ) from error


def text_hash(text: str) -> str:
    """What a retrieval text is known by."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_rows(folder: Path, doc_ids: Sequence[str], text_hashes: Sequence[str]) -> File:
    """Write which document each row is."""
    path = folder / f"documents-{digest(doc_ids, text_hashes)}.json"
    if not path.exists():
        write_json(path, {"doc_ids": doc_ids, "text_hashes": text_hashes})
    return File(path.name, sha256(path))


def write_shards(
    folder: Path,
    space: Space,
    text_hashes: Sequence[str],
    shard_size: int,
    encode: Encode,
    known: Store | None = None,
    advance: Advance | None = None,
) -> list[File]:
    """Write all vectors, shard by shard; only texts that neither a whole shard nor `known` has are encoded.

    A shard's vectors depend on its texts and on earlier shards alone, so that a resumed build ends with the same bytes.

    Args:
        folder: where to.
        space: what the vectors are.
        text_hashes: of each document.
        shard_size: documents of a file.
        encode: the embedder.
        known: an index of the same space whose vectors are taken over.
        advance: called with the number of documents that need no encoding.
    """
    vectors = _Known(space)
    if known is not None:
        start = 0
        for array in known.shards:
            vectors.add(array, known.text_hashes[start : start + len(array)])
            start += len(array)
    files = []
    for number, start in enumerate(range(0, len(text_hashes), shard_size)):
        hashes = text_hashes[start : start + shard_size]
        path = folder / f"vectors-{number:05d}-{digest(asdict(space), hashes)}.npy"
        new: dict[str, int] = {}
        if not _is_whole(path, (len(hashes), space.dimension), space.dtype):
            new = {key: start + row for row, key in reversed([*enumerate(hashes)]) if key not in vectors}
            if new:
                vectors.add(encode(sorted(new.values())), sorted(new, key=new.__getitem__))
            with replacing(path) as temporary, temporary.open("wb") as handle:
                np.save(handle, vectors.of(hashes), allow_pickle=False)
        vectors.add(mapped(path), hashes)
        if advance is not None:
            advance(len(hashes) - len(new))
        files.append(File(path.name, sha256(path)))
    return files


class _Known:
    """Vectors by the hashes of their texts; of arrays in memory no more is kept than is not in a file by now."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._place: dict[str, tuple[NDArray[Any], int]] = {}
        """Array and row."""

    def __contains__(self, text_hash: str) -> bool:
        return text_hash in self._place

    def add(self, array: NDArray[Any], text_hashes: Sequence[str]) -> None:
        """Learn vectors[N, D] of texts."""
        self._place.update({key: (array, row) for row, key in enumerate(text_hashes)})

    def of(self, text_hashes: Sequence[str]) -> NDArray[Any]:
        """Vectors[N, D] of texts."""
        vectors = np.empty((len(text_hashes), self._space.dimension), dtype=self._space.dtype)
        places = [self._place[key] for key in text_hashes]
        array_of, row_of = (np.array(column) for column in zip(*((id(a), row) for a, row in places), strict=True))
        for array in {id(array): array for array, _ in places}.values():
            rows = array_of == id(array)
            vectors[rows] = array[row_of[rows]]
        return vectors


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a manifest the folder's, and remove what it does not name."""
    write_json(folder / MANIFEST, asdict(manifest))
    kept = {file.name for file in (manifest.rows, *manifest.shards, *filter(None, [manifest.search.file]))}
    for path in _own_files(folder):
        if path.name not in kept:
            path.unlink()


def clear(folder: Path) -> None:
    """Remove an index; the manifest goes first, so that no part of it is taken for whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in _own_files(folder):
        path.unlink()


def _own_files(folder: Path) -> list[Path]:
    """Files of this format, and what writers that were killed left of them."""
    left = [f".{name}.*.part" for name in (MANIFEST, *KINDS)]
    return [path for pattern in (*KINDS, *left) for path in folder.glob(pattern)]


def _is_whole(path: Path, shape: tuple[int, int], dtype: ElementType) -> bool:
    """Whether a shard was written before; one of another shape or cut off is not."""
    if not path.is_file():
        return False
    try:
        array = mapped(path)
    except UserError:  # cut off
        return False
    return array.shape == shape and array.dtype == dtype


def mapped(path: Path) -> NDArray[Any]:
    """The vectors[N, D] of a file, read as they are used.

    Raises:
        UserError: the file is cut off, or none of vectors.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is no whole array of vectors ({error}); build the index again.") from error
    return array


def digest(*facts: object) -> str:
    """A short hash for a file's name."""
    return hashlib.sha256(json.dumps(facts, ensure_ascii=False).encode()).hexdigest()[:16]
