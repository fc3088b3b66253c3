"""How fast complementary pools are chosen: MMR over 1,000 candidates x 768, K = 10.

    python scripts/bench/pool.py

Prints the median of one question at a time, and of a batch of questions one after another; vectors are random and
normalised. The time does not depend on what they say. Exits with status 1 when the goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from samrag.progress import progress
from samrag.retrieval.pool import mmr

MAX_MS = 5.0
"""Goal: one question."""


def main(num_questions: int, num_candidates: int, dimension: int, k: int, trade_off: float) -> int:
    """Measure and print."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((num_candidates, dimension), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = random.standard_normal((num_questions, dimension), dtype=np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    relevance = queries @ vectors.T
    times = []
    with progress("questions", num_questions) as advance:
        for own in relevance:
            begun = time.perf_counter()
            chosen = mmr(own[None], vectors[None], k, trade_off)
            times.append(1000 * (time.perf_counter() - begun))
            assert chosen.shape == (1, k)
            advance(1)
    median = statistics.median(times)
    print(f"{num_candidates} x {dimension}, K = {k}: median {median:.2f} ms (goal {MAX_MS:g} ms)")
    print(f"{num_questions} questions: {sum(times) / 1000:.2f} s")
    return int(median >= MAX_MS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num_questions", type=int, default=1000)
    parser.add_argument("--num_candidates", type=int, default=1000)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--trade_off", type=float, default=0.7)
    sys.exit(main(**vars(parser.parse_args())))
