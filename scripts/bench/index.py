"""The index: encoding against sentence-transformers, a million vectors killed and resumed, and what searches find.

    python scripts/bench/index.py encoding --documents_file runs/quickstart/data/dev/documents.captioned.jsonl
    python scripts/bench/index.py million --folder runs/bench_index
    python scripts/bench/index.py approximate

`encoding` pairs `Embedder.encode_documents` with sentence-transformers' `encode` (batches of 32) on MiniLM: the mini
world's documents, each as it is and joined with its neighbours into texts of mixed lengths; all texts are distinct.
`million` builds an index of synthetic vectors through the library, kills it with signal 9 halfway, resumes it, and
compares with an undisturbed build; then searches it exactly. `approximate` compares IVF and HNSW with exact search on
queries that are no documents. The synthetic vectors lie around random centres, as texts lie around topics.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samrag.files import read_records
from samrag.progress import Advance
from samrag.provenance import fingerprint
from samrag.retrieval.index import Index, IndexOptions, build_index
from samrag.retrieval.store import SearchOptions
from samrag.schema import Document, Modality

DIMENSION = 384
CENTRES = 2000
SPREAD = 0.7
"""Length of the noise around a centre of length 1."""


class Synthetic:
    """Gives text `n` the vector of number n; dies once it has given so many."""

    identity, dimension, pooling, query_instruction = "synthetic", DIMENSION, "mean", ""

    def __init__(self, dies_after: int | None = None) -> None:
        centres = np.random.default_rng(0).standard_normal((CENTRES, DIMENSION), dtype=np.float32)
        self._centres = centres / np.linalg.norm(centres, axis=1, keepdims=True)
        self._dies_after = dies_after
        self._given = 0

    def encode_documents(
        self, texts: Sequence[str], max_batch_tokens: int | None = None, advance: Advance | None = None
    ) -> NDArray[np.float32]:
        """Vectors of texts that follow one another."""
        if self._dies_after is not None and self._given >= self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self._given += len(texts)
        return self.drawn(int(texts[0]), len(texts))

    def drawn(self, seed: int, count: int) -> NDArray[np.float32]:
        """Vectors[count, D] around the centres."""
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((count, DIMENSION), dtype=np.float32) * np.float32(SPREAD / DIMENSION**0.5)
        noise += self._centres[rng.integers(CENTRES, size=count)]
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        return noise


def numbered(count: int) -> list[Document]:
    return [Document(f"d{i}", Modality.TEXT, str(i), text="") for i in range(count)]


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def encoding(options: argparse.Namespace) -> None:
    """Texts per second of both, alternately."""
    from samrag.retrieval.embedder import Embedder

    embedder = Embedder.load("quickstart", device="cpu", num_threads=options.num_threads)
    single = [document.retrieval_text for document in read_records(options.documents_file, Document)]
    rng = random.Random(0)
    mixed = [" ".join(rng.sample(single, min(8, 1 + int(rng.expovariate(0.7))))) for _ in range(len(single))]
    texts = list(dict.fromkeys([*single, *mixed]))
    rng.shuffle(texts)
    texts = texts[: options.num_texts]
    embedder.encode_documents(texts[:64])
    ways: dict[str, Callable[[], NDArray[np.float32]]] = {
        "theirs": lambda: np.asarray(embedder.model.encode(texts, normalize_embeddings=True)),
        "ours": lambda: embedder.encode_documents(texts),
    }
    vectors, ratios = {}, []
    for repeat in range(options.repeats):
        taken = {}
        for way in sorted(ways, reverse=repeat % 2 == 0):
            begun = time.perf_counter()
            vectors[way] = ways[way]()
            taken[way] = time.perf_counter() - begun
        ratios.append(taken["theirs"] / taken["ours"])
        print({way: f"{len(texts) / seconds:.0f} texts/s" for way, seconds in taken.items()}, flush=True)
    least = float((vectors["theirs"] * vectors["ours"]).sum(axis=1).min())
    print(
        f"{len(texts)} texts: ours / theirs, texts/s: median {statistics.median(ratios):.2f}; least cosine {least:.6f}"
    )


def build(options: argparse.Namespace) -> None:
    """Build in this process (the script starts it)."""
    documents = numbered(options.count)
    seconds = timed(lambda: build_index(documents, Synthetic(options.dies_after), options.folder))
    print(f"built in {seconds:.0f} s, memory peak {peak_gib():.2f} GiB", flush=True)


def million(options: argparse.Namespace) -> None:
    """Build, kill, resume, compare, search."""
    killed, whole = options.folder / "killed", options.folder / "whole"
    for folder, more in ((killed, ["--dies_after", str(options.count // 2)]), (killed, []), (whole, [])):
        command = [sys.executable, __file__, "build", "--folder", str(folder), "--count", str(options.count), *more]
        print(folder.name, "killed" if subprocess.run(command, check=False).returncode < 0 else "finished", flush=True)
    print("same bytes:", fingerprint(killed) == fingerprint(whole))
    index = Index.load(whole)
    queries = Synthetic().drawn(10**9, options.num_queries)
    print(f"codes of the documents made in {timed(lambda: index.search(queries[:1], 1)):.1f} s")
    rates = [len(queries) / timed(lambda: index.search(queries, 10)) for _ in range(options.repeats)]
    print(f"exact, {len(index)} documents, k 10: median {statistics.median(rates):.0f} queries/s")
    print(f"memory peak of the search, mapped files counted: {peak_gib():.2f} GiB")


def approximate(options: argparse.Namespace) -> None:
    """Recall and queries/s of each search."""
    documents, queries = numbered(options.count), Synthetic().drawn(10**9, options.num_queries)
    true: list[set[str]] = []
    for method in ("exact", "ivf", "hnsw"):
        with tempfile.TemporaryDirectory() as folder:
            search = SearchOptions(method)
            begun = time.perf_counter()
            index = build_index(documents, Synthetic(), Path(folder), IndexOptions(search=search)).index
            built_s = time.perf_counter() - begun
            index.search(queries[:1], 10)
            rates = [len(queries) / timed(lambda: index.search(queries, 10)) for _ in range(options.repeats)]  # noqa: B023
            found = [{hit.doc_id for hit in hits} for hits in index.search(queries, 10)]
            true = true or found
            recall = sum(len(a & b) for a, b in zip(found, true, strict=True)) / (10 * len(queries))
            stored = index.manifest.search.recall_at_10
            print(
                f"{method}: built in {built_s:.0f} s, recall@10 {recall:.3f} (measured at build time: {stored}), "
                f"median {statistics.median(rates):.0f} queries/s",
                flush=True,
            )


def main() -> None:
    """One measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("encoding", "million", "approximate", "build"))
    parser.add_argument("--documents_file", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_index"))
    parser.add_argument("--num_texts", type=int, default=1500)
    parser.add_argument("--count", type=int, help="vectors; none takes a million, 100,000 for approximate")
    parser.add_argument("--num_queries", type=int, default=1000)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dies_after", type=int, help="used by the script itself")
    options = parser.parse_args()
    options.count = options.count or (100_000 if options.what == "approximate" else 1_000_000)
    {"encoding": encoding, "million": million, "approximate": approximate, "build": build}[options.what](options)


if __name__ == "__main__":
    main()
