"""Pools by MMR and VRSD: closed forms, the same as by definition, ties, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.retrieval.index import build_index
from samrag.retrieval.pool import Floats, PoolOptions, PoolStrategy, min_max, mmr, pools_of, vrsd
from samrag.schema import Document

Draw = tuple[Floats, Floats]


def draw(seed: int, num_questions: int, num_candidates: int, dimension: int) -> Draw:
    """Random unit vectors: queries[Q, D] and candidates[Q, N, D]."""
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((num_questions, dimension))
    vectors = rng.standard_normal((num_questions, num_candidates, dimension))
    return unit(queries), unit(vectors)


def unit(vectors: Floats) -> Floats:
    scaled: Floats = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return scaled


def relevance_of(queries: Floats, vectors: Floats) -> Floats:
    return np.vecdot(vectors, queries[:, None])


def mmr_by_definition(query: Floats, vectors: Floats, k: int, trade_off: float) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < min(k, len(vectors)):
        gains = {
            i: float(
                trade_off * np.dot(query, vector)
                - (1 - trade_off) * max((np.dot(vector, vectors[j]) for j in chosen), default=0.0)
            )
            for i, vector in enumerate(vectors)
            if i not in chosen
        }
        chosen.append(max(gains, key=lambda i: gains[i] if chosen else float(np.dot(query, vectors[i]))))
    return chosen


def vrsd_by_definition(query: Floats, vectors: Floats, k: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < min(k, len(vectors)):
        total = vectors[chosen].sum(axis=0)
        cosines = {
            i: float(np.dot(query, total + vector) / np.linalg.norm(total + vector))
            for i, vector in enumerate(vectors)
            if i not in chosen
        }
        chosen.append(max(cosines, key=lambda i: cosines[i]))
    return chosen


SHAPES = (st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9), st.integers(2, 8))


@given(*SHAPES, st.integers(1, 12), st.floats(0, 1))
def test_mmr_is_what_its_definition_says(seed: int, q: int, n: int, d: int, k: int, trade_off: float) -> None:
    queries, vectors = draw(seed, q, n, d)
    found = mmr(relevance_of(queries, vectors), vectors, k, trade_off)
    assert found.tolist() == [mmr_by_definition(*pair, k, trade_off) for pair in zip(queries, vectors, strict=True)]


@given(*SHAPES, st.integers(1, 12))
def test_vrsd_is_what_its_definition_says(seed: int, q: int, n: int, d: int, k: int) -> None:
    queries, vectors = draw(seed, q, n, d)
    assert vrsd(queries, vectors, k).tolist() == [
        vrsd_by_definition(*pair, k) for pair in zip(queries, vectors, strict=True)
    ]


@given(*SHAPES, st.integers(1, 12))
def test_at_lambda_one_mmr_is_the_most_relevant_in_order(seed: int, q: int, n: int, d: int, k: int) -> None:
    queries, vectors = draw(seed, q, n, d)
    relevance = np.round(relevance_of(queries, vectors), 1)  # many ties
    expected = np.argsort(-relevance, axis=1, kind="stable")[:, :k]
    assert np.array_equal(mmr(relevance, vectors, k, 1.0), expected)


def by_mmr(queries: Floats, vectors: Floats, k: int) -> Any:
    return mmr(relevance_of(queries, vectors), vectors, k, 0.6)


STRATEGIES = pytest.mark.parametrize("choose", [by_mmr, vrsd])
Choose = Callable[[Floats, Floats, int], Any]


@STRATEGIES
@given(*SHAPES, st.integers(1, 8))
def test_a_pool_begins_with_the_smaller_pool_and_repeats_nothing(
    choose: Choose, seed: int, q: int, n: int, d: int, k: int
) -> None:
    queries, vectors = draw(seed, q, n, d)
    larger = choose(queries, vectors, k + 1)
    assert np.array_equal(choose(queries, vectors, k), larger[:, :k])
    assert larger.shape == (q, min(k + 1, n))
    assert all(len(set(row)) == len(row) for row in larger.tolist())
    assert np.array_equal(larger[:, 0], np.argmax(relevance_of(queries, vectors), axis=1))


@STRATEGIES
def test_a_question_has_the_same_pool_alone_and_among_a_thousand(choose: Choose) -> None:
    queries, vectors = draw(3, 1000, 20, 48)
    together = choose(queries, vectors, 10)
    for i in range(0, 1000, 37):
        assert np.array_equal(choose(queries[i : i + 1], vectors[i : i + 1], 10)[0], together[i])


@STRATEGIES
@pytest.mark.parametrize("dimension", [7, 384])
def test_of_equal_candidates_the_first_is_chosen_first(choose: Choose, dimension: int) -> None:
    queries, vectors = draw(5, 4, 9, dimension)
    twins = np.repeat(vectors, 3, axis=1).astype(np.float32)
    for row in choose(queries.astype(np.float32), twins, 27).tolist():
        for first in range(0, 27, 3):
            assert sorted([first, first + 1, first + 2], key=row.index) == [first, first + 1, first + 2]


def test_mmr_passes_over_a_repetition_and_top_k_does_not() -> None:
    query = np.array([[1.0, 0.0, 0.0]])
    vectors = unit(np.array([[[0.9, 0.4, 0.0], [0.9, 0.4, 0.0], [0.7, -0.7, 0.0]]]))
    relevance = relevance_of(query, vectors)
    assert mmr(relevance, vectors, 2, 1.0).tolist() == [[0, 1]]
    assert mmr(relevance, vectors, 2, 0.5).tolist() == [[0, 2]]
    assert vrsd(query, vectors, 2).tolist() == [[0, 2]]


def test_lambda_at_which_two_candidates_change_places() -> None:
    """Second pick: twin of the first (1 and 1) against a stranger (relevance r): equal at lambda = 1 / (2 - r)."""
    vectors = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    relevance = np.array([[1.0, 1.0, 0.5]])
    border = 1 / (2 - 0.5)
    assert mmr(relevance, vectors, 2, border + 1e-6).tolist() == [[0, 1]]
    assert mmr(relevance, vectors, 2, border - 1e-6).tolist() == [[0, 2]]


def test_min_max_keeps_the_order_and_a_flat_question_has_zeros() -> None:
    stretched = min_max(np.array([[0.2, 0.6, 0.4], [0.3, 0.3, 0.3]]))
    assert np.allclose(stretched, [[0, 1, 0.5], [0, 0, 0]])


def test_vectors_that_cancel_out_are_no_error() -> None:
    vectors = np.array([[[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]])
    assert vrsd(np.array([[1.0, 0.0]]), vectors, 3).tolist() == [[0, 2, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, v: mmr(relevance_of(q, v), v, 0, 0.5), "k is 0"),
        (lambda q, v: vrsd(q, v, -1), "k is -1"),
        (lambda q, v: mmr(relevance_of(q, v), v, 2, 1.1), "trade_off is 1.1"),
        (lambda q, v: mmr(relevance_of(q, v), v, 2, float("nan")), "trade_off is nan"),
        (lambda q, v: mmr(relevance_of(q, v)[:, :2], v, 2, 0.5), r"relevance has shape \(2, 2\)"),
        (lambda q, v: mmr(relevance_of(q, v), v[0], 2, 0.5), r"vectors have shape \(3, 4\)"),
        (lambda q, v: vrsd(q[:, :2], v, 2), r"queries have shape \(2, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Callable[[Floats, Floats], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*draw(0, 2, 3, 4))


@pytest.mark.parametrize("strategy", PoolStrategy)
def test_pools_of_an_index_do_not_depend_on_how_many_questions_are_worked_on_at_once(
    strategy: PoolStrategy, tmp_path: Path, bag: Any, corpus: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = build_index(corpus, bag, tmp_path).index
    queries = bag.encode_queries([document.title for document in corpus] + ["Rowing at the pier"])
    options = PoolOptions(4, 6, strategy, 0.5)
    together = pools_of(index, queries, options)
    assert [pool[0].doc_id for pool in together[:-1]] == [document.doc_id for document in corpus]
    ranked = index.search(queries, 6)
    assert all(set(pool) <= set(ranking) and len(pool) == 4 for pool, ranking in zip(together, ranked, strict=True))
    monkeypatch.setattr("samrag.retrieval.pool.VALUES_AT_ONCE", 1)
    assert pools_of(index, queries, options) == together
    assert len(pools_of(index, queries, replace(options, size=50, num_candidates=50))[0]) == len(corpus)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"num_candidates": 9}, "num_candidates is 9; it must be at least the pool's 10"),
        ({"trade_off": -0.1}, "trade_off is -0.1"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolOptions(**wrong)
