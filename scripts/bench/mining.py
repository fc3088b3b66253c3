"""Hard-negative mining against sentence-transformers and FlagEmbedding, on the same vectors, in one run.

    python scripts/bench/mining.py --num_queries 20000 --num_documents 60000 --rounds 3

Vectors are drawn, so nothing is encoded: each miner gets the same unit vectors and turns them into negatives. Each
query lies near one document, its positive. The miners take turns, each in a process of its own, with as many threads:

- ours: `mine_negatives`, 10 at random of the top 50, relative margin 5 %, texts masked, scores kept;
- st: sentence-transformers' `mine_hard_negatives` with the same rule (and with FAISS: st_faiss);
- flag: what FlagEmbedding's hn_mine does (its scripts are not in the wheel): flat FAISS index, 64 queries at a time,
  ranks 10 to 210, 15 at random that are not the positive's text.

Time is wall clock without imports, and beside it processor time, which other work on the machine disturbs less; memory
is the process's peak beyond what it held with the inputs ready.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samrag.retrieval.mining import MiningRule, mine_negatives
from samrag.schema import Document, Modality, Question

NEAR = 0.6
"""Cosine of a query and its positive, about."""
RULE = MiningRule(num_negatives=10, top=50, relative_margin=0.05)
FLAG_RANKS, FLAG_NEGATIVES, FLAG_BATCH = (10, 210), 15, 64
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every miner gets."""

    queries: NDArray[np.float32]
    documents: NDArray[np.float32]
    positives: NDArray[np.int64]
    """Position of each query's positive, [Q]."""
    query_texts: list[str]
    document_texts: list[str]


Rows = list[list[int]]
"""Positions of each query's negatives."""


def draw(num_queries: int, num_documents: int, dimension: int, seed: int) -> Inputs:
    """Unit vectors."""
    rng = np.random.default_rng(seed)
    documents = _unit(rng.standard_normal((num_documents, dimension), dtype=np.float32))
    positives = rng.integers(0, num_documents, num_queries)
    noise = _unit(rng.standard_normal((num_queries, dimension), dtype=np.float32))
    queries = _unit(NEAR * documents[positives] + (1 - NEAR**2) ** 0.5 * noise)
    texts = [f"document {position}" for position in range(num_documents)]
    return Inputs(queries, documents, positives, [f"query {number}" for number in range(num_queries)], texts)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def ours(inputs: Inputs) -> Callable[[], Rows]:
    """This library's miner."""
    documents = [Document(str(n), Modality.TEXT, text) for n, text in enumerate(inputs.document_texts)]
    questions = [
        Question(str(n), text, (), "TextQ", "train", support_ids=(str(inputs.positives[n]),))
        for n, text in enumerate(inputs.query_texts)
    ]

    def mine() -> Rows:
        rows = mine_negatives(questions, documents, inputs.queries, inputs.documents, RULE)
        return [[int(doc_id) for doc_id in row.neg_ids] for row in rows]

    return mine


class GivenVectors:
    """Stands in for a SentenceTransformer: its texts have been encoded."""

    device = "cpu"

    def __init__(self, inputs: Inputs) -> None:
        from sentence_transformers import util

        self._inputs = inputs
        self.similarity = util.dot_score  # cheaper than its cosine, and the same for unit vectors
        self.similarity_pairwise = util.pairwise_dot_score

    def get_embedding_dimension(self) -> int:
        """Length of a vector."""
        return int(self._inputs.documents.shape[1])

    def encode_document(self, texts: Sequence[str], **_: Any) -> NDArray[np.float32]:
        """Vectors of the whole corpus."""
        assert texts == self._inputs.document_texts
        return self._inputs.documents

    def encode_query(self, texts: Sequence[str], **_: Any) -> NDArray[np.float32]:
        """Vectors of all queries."""
        assert texts == self._inputs.query_texts
        return self._inputs.queries


def sentence_transformers(inputs: Inputs, use_faiss: bool = False) -> Callable[[], Rows]:
    """sentence-transformers' miner, by the same rule."""
    from datasets import Dataset, disable_progress_bars
    from sentence_transformers.util import mine_hard_negatives

    disable_progress_bars()
    positives = [inputs.document_texts[position] for position in inputs.positives]
    pairs = Dataset.from_dict({"query": inputs.query_texts, "positive": positives})
    model, place = GivenVectors(inputs), {text: n for n, text in enumerate(inputs.document_texts)}

    def mine() -> Rows:
        random.seed(0)
        with contextlib.redirect_stderr(io.StringIO()):
            mined = mine_hard_negatives(
                pairs,
                model,  # type: ignore[arg-type]
                corpus=inputs.document_texts,
                num_negatives=RULE.num_negatives,
                range_max=RULE.top,
                relative_margin=RULE.relative_margin,
                sampling_strategy="random",
                output_format="n-tuple",
                output_scores=True,
                use_faiss=use_faiss,
                verbose=False,
            )
        columns = [mined[f"negative_{n + 1}"][:] for n in range(RULE.num_negatives)]
        return [[place[text] for text in texts] for texts in zip(*columns, strict=True)]

    return mine


def flag_embedding(inputs: Inputs) -> Callable[[], Rows]:
    """FlagEmbedding's hn_mine after its encoding."""
    import faiss

    first, last = FLAG_RANKS

    def mine() -> Rows:
        rng = random.Random(0)
        index = faiss.IndexFlatIP(inputs.documents.shape[1])
        index.add(inputs.documents)
        found: list[Any] = []
        for start in range(0, len(inputs.queries), FLAG_BATCH):
            _, positions = index.search(inputs.queries[start : start + FLAG_BATCH], last)
            found.extend(positions.tolist())
        rows = []
        for query, positive, ranked in zip(inputs.query_texts, inputs.positives, found, strict=True):
            known = [inputs.document_texts[positive]]
            kept = [n for n in ranked[first:last] if inputs.document_texts[n] not in known]
            kept = [n for n in kept if inputs.document_texts[n] != query]
            rows.append(rng.sample(kept, FLAG_NEGATIVES) if len(kept) > FLAG_NEGATIVES else kept)
        return rows

    return mine


MINERS: dict[str, Callable[[Inputs], Callable[[], Rows]]] = {
    "ours": ours,
    "st": sentence_transformers,
    "st_faiss": lambda inputs: sentence_transformers(inputs, use_faiss=True),
    "flag": flag_embedding,
}


def measure(name: str, sizes: tuple[int, int, int, int], threads: int) -> dict[str, Any]:
    """Run one miner here; its seconds, peak memory, a hash of its rows, and how many of them break the rule."""
    import faiss
    import torch

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    inputs = draw(*sizes)
    mine = MINERS[name](inputs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu_start = time.perf_counter(), time.process_time()
    rows = mine()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "name": name,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "beyond_mib": (peak - before) * 1024 / MIB,
        "peak_mib": peak * 1024 / MIB,
        "rows": len(rows),
        "hash": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12],
        "outside": outside(inputs, rows, *((0, RULE.top + 1) if name != "flag" else FLAG_RANKS)),
    }


def outside(inputs: Inputs, rows: Rows, first: int, last: int, num_checked: int = 500) -> int:
    """Of some queries' negatives, those that are not among the exact ranks `first` to `last`, or are positives."""
    if len(rows) != len(inputs.queries):
        return -1
    scores = inputs.queries[:num_checked].astype(np.float64) @ inputs.documents.T.astype(np.float64)
    ranks = (-scores).argsort(axis=1, kind="stable")[:, first:last]
    checked = zip(rows[:num_checked], ranks, inputs.positives[:num_checked], strict=True)
    return sum(int(n not in allowed or n == positive) for row, allowed, positive in checked for n in row)


def main() -> None:
    """Measure the miners in turn, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_queries", type=int, default=20_000)
    parser.add_argument("--num_documents", type=int, default=60_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    peers = [name for name in MINERS if name != "ours"]
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers)
    options = parser.parse_args()

    sizes = (options.num_queries, options.num_documents, options.dimension, options.seed)
    context = multiprocessing.get_context("spawn")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in ["ours", *options.peers]}
    for round_number in range(options.rounds):
        for name in results:
            with context.Pool(1) as pool:
                result = pool.apply(measure, (name, sizes, options.threads))
            results[name].append(result)
            print(round_number, json.dumps(result), flush=True)

    print(f"{options.num_queries} queries, {options.num_documents} documents, {options.threads} thread(s)")
    print(
        f"{'miner':<10}{'seconds':>9}{'x ours':>8}{'least':>8}{'CPU s':>8}{'x ours':>8}{'MiB beyond':>12}"
        f"{'same rows':>11}{'outside':>9}"
    )
    for name, runs in results.items():
        walls, cpus = (
            [run[key] / base[key] for run, base in zip(runs, results["ours"], strict=True)]
            for key in ("seconds", "cpu_seconds")
        )
        print(
            f"{name:<10}{statistics.median(run['seconds'] for run in runs):>9.2f}{statistics.median(walls):>8.2f}"
            f"{min(walls):>8.2f}{statistics.median(run['cpu_seconds'] for run in runs):>8.2f}"
            f"{statistics.median(cpus):>8.2f}{max(run['beyond_mib'] for run in runs):>12.0f}"
            f"{len({run['hash'] for run in runs}) == 1!s:>11}{max(run['outside'] for run in runs):>9}"
        )


if __name__ == "__main__":
    main()
