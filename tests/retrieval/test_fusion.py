"""Reciprocal rank fusion: its closed form, ties, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.retrieval.fusion import reciprocal_rank_fusion

RANKINGS = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), min_size=1, max_size=4)


def ids(rankings, k=8, **options) -> list[str]:
    return [hit.doc_id for hit in reciprocal_rank_fusion(rankings, k, **options)]


def test_the_score_is_the_sum_of_reciprocal_places() -> None:
    hits = reciprocal_rank_fusion([["a", "b"], ["b", "c"]], 3)
    assert [(hit.doc_id, hit.score) for hit in hits] == [
        ("b", pytest.approx(1 / 62 + 1 / 61)), ("a", pytest.approx(1 / 61)), ("c", pytest.approx(1 / 62)),
    ]  # fmt: skip


@given(RANKINGS, st.integers(1, 8))
def test_one_ranking_stays_as_it_is_and_every_document_comes_once(rankings: list[list[str]], k: int) -> None:
    assert ids(rankings[:1], k) == rankings[0][:k]
    fused = ids(rankings, 8)
    assert sorted(fused) == sorted({doc_id for ranking in rankings for doc_id in ranking})
    assert ids(rankings, k) == fused[:k]


@given(RANKINGS)
def test_a_document_that_is_above_another_in_every_ranking_stays_above_it(rankings: list[list[str]]) -> None:
    fused = ids(rankings)
    for above in fused:
        for below in fused:
            if all(below not in r or (above in r and r.index(above) < r.index(below)) for r in rankings):
                assert above == below or fused.index(above) < fused.index(below)


def test_ties_are_in_the_order_of_the_best_place_then_of_the_rankings() -> None:
    assert ids([["a"], ["b"]]) == ["a", "b"]
    assert ids([["b"], ["a"]]) == ["b", "a"]


def test_a_weight_of_zero_leaves_only_the_others_order() -> None:
    assert ids([["a", "b"], ["b", "a"]], weights=[0.0, 1.0]) == ["b", "a"]


@pytest.mark.parametrize("options", [{"k": 0}, {"constant": -1.0}, {"weights": [1.0]}, {"weights": [1.0, -1.0]}])
def test_what_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|wanted"):
        reciprocal_rank_fusion([["a"], ["b"]], **{"k": 2, **options})  # type: ignore[arg-type]
