"""Retrieval scores: strictness, duplicates, and what counts for ARN."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.metrics.retrieval import (
    mean_arn,
    mean_arn_answered,
    mean_documents_examined,
    ndcg_at_k,
    recall_at_k,
    recall_at_n,
    reciprocal_rank,
)
from samrag.schema import ExaminedDocument, ExitReason, Trace

RANKINGS = st.permutations([f"d{i}" for i in range(8)])
POSITIVES = st.sets(st.sampled_from([f"d{i}" for i in range(8)]), min_size=1)


def trace(answers: tuple[str, ...], context: tuple[str, ...], examined: tuple[str, ...] = ()) -> Trace:
    documents = tuple(ExaminedDocument(doc_id, batch=0, kept=doc_id in context) for doc_id in examined)
    reason = ExitReason.VERIFIED if answers else ExitReason.NO_EVIDENCE
    return Trace("q", "sam_rag", answers, reason, context, documents)


@given(RANKINGS, POSITIVES, st.integers(1, 10))
def test_recall_is_one_exactly_when_the_worst_placed_positive_is_within_n(
    ranking: list[str], positives: set[str], n: int
) -> None:
    worst = max(ranking.index(positive) for positive in positives) + 1
    assert recall_at_n(ranking, positives, n) == float(worst <= n)


def test_a_part_of_the_positives_is_no_recall() -> None:
    assert recall_at_n(["p1", "x", "p2"], ["p1", "p2"], 2) == 0.0
    assert recall_at_n(["p1", "x", "p2"], ["p1", "p2"], 3) == 1.0


def test_a_positive_named_twice_is_one_positive() -> None:
    assert recall_at_n(["p", "x"], ["p", "p"], 1) == 1.0


def test_a_positive_missing_from_the_ranking_is_no_recall_at_any_n() -> None:
    assert recall_at_n(["x"], ["p"], 1000) == 0.0
    assert recall_at_n([], ["p"], 1) == 0.0


def test_recall_without_positives_or_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one positive"):
        recall_at_n(["x"], [], 1)
    with pytest.raises(ValueError, match="n is 0"):
        recall_at_n(["x"], ["x"], 0)


def test_arn_counts_distinct_documents_of_the_final_context() -> None:
    traces = [trace(("yes",), ("d1", "d2", "d1")), trace(("no",), ("d3",))]
    assert mean_arn(traces) == 1.5


def test_a_cleared_context_lowers_arn_but_not_arn_over_answered_questions() -> None:
    traces = [trace(("yes",), ("d1", "d2")), trace((), ())]
    assert mean_arn(traces) == 1.0
    assert mean_arn_answered(traces) == 2.0


def test_arn_over_answered_questions_is_none_when_all_abstained() -> None:
    assert mean_arn_answered([trace((), ("d1",))]) is None
    assert mean_arn_answered([]) is None


def test_documents_examined_counts_dropped_documents_and_each_document_once() -> None:
    traces = [trace(("yes",), ("d1",), ("d1", "d2", "d3", "d1")), trace((), (), ("d4",))]
    assert mean_documents_examined(traces) == 2.0


def test_means_over_no_traces_are_refused() -> None:
    for mean in (mean_arn, mean_documents_examined):
        with pytest.raises(ValueError, match="no traces"):
            mean([])


def test_graded_scores_have_their_closed_forms() -> None:
    ranking = ["a", "b", "c", "d"]
    assert recall_at_k(ranking, {"b", "d", "x"}, 4) == 2 / 3
    assert recall_at_k(ranking, {"b"}, 1) == 0
    assert reciprocal_rank(ranking, {"c", "d"}, 4) == 1 / 3
    assert reciprocal_rank(ranking, {"c"}, 2) == 0
    assert ndcg_at_k(ranking, {"a", "b"}, 4) == 1
    assert ndcg_at_k(ranking, {"b"}, 4) == pytest.approx(1 / math.log2(3))
    assert ndcg_at_k(["b", "b", "a"], {"b"}, 2) == 1
    both = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert ndcg_at_k(ranking, {"a", "c", "x"}, 2) == pytest.approx(1 / (1 + 1 / math.log2(3)))
    assert ndcg_at_k(ranking, {"a", "c"}, 3) == pytest.approx(both)
    for score in (recall_at_k, ndcg_at_k):
        with pytest.raises(ValueError, match="at least one positive"):
            score(ranking, set(), 3)
