"""Complementary pools: of the candidates of a question, the few that are relevant and not alike.

Two greedy strategies: MMR (Carbonell and Goldstein 1998), which CLIMB builds its pool by, and VRSD (2407.04573), which
needs no lambda. All questions of a batch are worked on at once; a pool is in the order of its selection, so its first k
documents are the pool of size k. Of equal candidates the first wins: products are taken pair by pair (`numpy.vecdot`),
because a blocked product may give equal vectors scores that differ in the last bit.

Left out: the exact VRSD problem, which is NP-complete, and candidate lists of different lengths in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from samrag.retrieval.index import Hit, Index

VALUES_AT_ONCE = 2**26
"""Numbers in the candidates' vectors that are worked on at once: 1,000 questions of 50 candidates, 256 MB."""
Floats = NDArray[np.floating]


class PoolStrategy(StrEnum):
    """How a pool is chosen from the candidates."""

    MMR = "mmr"
    VRSD = "vrsd"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How pools are chosen. CLIMB's paper names K and lambda and gives no value: the defaults are inferred."""

    size: int = 10
    """K, documents in a pool (inferred)."""
    num_candidates: int = 50
    """Best documents of the index that a pool is chosen from (inferred)."""
    strategy: PoolStrategy = PoolStrategy.MMR
    """MMR (the paper: an objective in its style), or VRSD, which has no lambda."""
    trade_off: float = 0.7
    """MMR's lambda: 1 is relevance alone (inferred: leaning to relevance)."""
    stretched: bool = False
    """MMR: stretch each question's relevance to 0..1 first (inferred: no, since one encoder gives both terms)."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size}; it must be at least 1")
        if self.num_candidates < self.size:
            raise ValueError(f"num_candidates is {self.num_candidates}; it must be at least the pool's {self.size}")
        if not 0 <= self.trade_off <= 1:
            raise ValueError(f"trade_off is {self.trade_off}; it must be between 0 and 1")


def pools_of(index: Index, queries: Floats, options: PoolOptions) -> list[list[Hit]]:
    """The pool of each query[Q, D]: documents in the order of their selection, with their relevance as score."""
    pools = []
    num_at_once = max(1, VALUES_AT_ONCE // (min(options.num_candidates, len(index)) * queries.shape[1]))
    for start in range(0, len(queries), num_at_once):
        block = queries[start : start + num_at_once]
        hits = index.search(block, options.num_candidates)
        vectors = np.stack([index.vectors_of([hit.doc_id for hit in ranking]) for ranking in hits])
        if options.strategy is PoolStrategy.VRSD:
            positions = vrsd(block, vectors, options.size)
        else:
            relevance = np.array([[hit.score for hit in ranking] for ranking in hits])
            relevance = min_max(relevance) if options.stretched else relevance
            positions = mmr(relevance, vectors, options.size, options.trade_off)
        pools += [[ranking[i] for i in chosen] for ranking, chosen in zip(hits, positions, strict=True)]
    return pools


def mmr(relevance: Floats, vectors: Floats, k: int, trade_off: float) -> NDArray[np.int64]:
    """Maximal marginal relevance.

    The most relevant candidate comes first; then, each time, the one with the greatest
    `trade_off * relevance - (1 - trade_off) * (greatest similarity to a chosen one)`. Relevance need not come from the
    vectors' encoder (it may be the similarity of a caption or of an image), but should lie in their range: see
    `min_max`.

    Args:
        relevance: relevance[Q, N] of each candidate to its question.
        vectors: vectors[Q, N, D] of the candidates, of length 1.
        k: Size of a pool; of fewer candidates all are taken.
        trade_off: lambda, from 0 to 1; 1 gives the k most relevant.

    Returns:
        Positions[Q, min(k, N)] in the candidate lists, in the order of their selection.

    Raises:
        ValueError: shapes that do not fit, or a `k` or `trade_off` out of range.
    """
    _check(vectors, k)
    if relevance.shape != vectors.shape[:2]:
        raise ValueError(f"relevance has shape {relevance.shape}; the vectors ask for {vectors.shape[:2]}")
    if not 0 <= trade_off <= 1:
        raise ValueError(f"trade_off is {trade_off}; it must be between 0 and 1")
    rows = np.arange(len(vectors))
    size = min(k, vectors.shape[1])
    positions = np.empty((len(vectors), size), np.int64)
    redundancy = np.full(relevance.shape, -np.inf)
    gains = np.array(relevance, np.float64)
    taken = np.zeros(relevance.shape, bool)
    for place in range(size):
        positions[:, place] = best = np.argmax(np.where(taken, -np.inf, gains), axis=1)
        taken[rows, best] = True
        np.maximum(redundancy, np.vecdot(vectors, vectors[rows, best, None]), out=redundancy)
        gains = trade_off * relevance - (1 - trade_off) * redundancy
    return positions


def vrsd(queries: Floats, vectors: Floats, k: int) -> NDArray[np.int64]:
    """Vector retrieval by similarity and diversity: the set whose sum points where the query points.

    The most similar candidate comes first; then, each time, the one that brings the cosine of the sum of all chosen
    vectors with the query highest. Two alike add nothing to each other, so diversity needs no weight of its own.

    Args:
        queries: queries[Q, D] of length 1.
        vectors: vectors[Q, N, D] of the candidates, of length 1.
        k: Size of a pool; of fewer candidates all are taken.

    Returns:
        Positions[Q, min(k, N)] in the candidate lists, in the order of their selection.

    Raises:
        ValueError: shapes that do not fit, or a `k` out of range.
    """
    _check(vectors, k)
    if queries.shape != (len(vectors), vectors.shape[2]):
        raise ValueError(f"queries have shape {queries.shape}; the vectors ask for {(len(vectors), vectors.shape[2])}")
    rows = np.arange(len(vectors))
    size = min(k, vectors.shape[1])
    positions = np.empty((len(vectors), size), np.int64)
    relevance = np.vecdot(vectors, queries[:, None]).astype(np.float64)
    squares = np.vecdot(vectors, vectors).astype(np.float64)
    with_sum = np.zeros(relevance.shape)  # products of each candidate with the sum of the chosen ones
    sum_relevance, sum_square = np.zeros((2, len(vectors), 1))
    taken = np.zeros(relevance.shape, bool)
    for place in range(size):
        lengths = np.sqrt(np.maximum(sum_square + 2 * with_sum + squares, np.finfo(np.float32).eps))
        cosines = (sum_relevance + relevance) / lengths
        positions[:, place] = best = np.argmax(np.where(taken, -np.inf, cosines), axis=1)
        taken[rows, best] = True
        sum_square += (2 * with_sum + squares)[rows, best, None]
        sum_relevance += relevance[rows, best, None]
        with_sum += np.vecdot(vectors, vectors[rows, best, None])
    return positions


def min_max(relevance: Floats) -> Floats:
    """Relevance[Q, N] stretched to 0..1 for each question; a question whose candidates are all equal has 0."""
    low = relevance.min(axis=1, keepdims=True)
    span = relevance.max(axis=1, keepdims=True) - low
    stretched: Floats = np.divide(relevance - low, span, out=np.zeros_like(relevance), where=span > 0)
    return stretched


def _check(vectors: Floats, k: int) -> None:
    if vectors.ndim != 3:
        raise ValueError(f"vectors have shape {vectors.shape}; [questions, candidates, dimension] is wanted")
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
