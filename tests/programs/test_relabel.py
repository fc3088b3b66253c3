"""A second look at mined negatives: what is promoted, what is dropped, and what a failure may never do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from samrag.calls import CallKind
from samrag.programs.relabel import Finding, RelabelOptions, relabel
from samrag.relabelling import relabel_rows, relabelled
from samrag.schema import RetrieverRow, Verdict
from tests.programs.scripted import BROKEN, ScriptedEngine, by_rules, hashed, mixed, play, relevant, texts

OPTIONS = RelabelOptions()
YES, NO = Verdict.TRUE, Verdict.FALSE


def look(documents, rule, wanted=None, **options):
    program = relabel("who?", documents, wanted or len(documents), RelabelOptions(**options))
    return play(program, by_rules(rel=rule))


def row(count: int) -> RetrieverRow:
    documents = texts(count)
    return RetrieverRow(
        query="who?",
        pos=("gold",),
        neg=tuple(document.retrieval_text for document in documents),
        query_id="q",
        pos_ids=("gold",),
        neg_ids=tuple(document.doc_id for document in documents),
        pos_scores=(0.9,),
        neg_scores=tuple(0.5 - number / 10 for number in range(count)),
        neg_rankers=tuple(("dense", "bm25")[number % 2] for number in range(count)),
    )


def test_most_negatives_cost_one_call():
    played = look(mixed(6), NO)
    assert played.value == [Finding.NEGATIVE] * 6
    assert [call.kind for call in played.calls] == [CallKind.IS_REL_TEXT, CallKind.IS_REL_IMAGE] * 3


def test_a_positive_needs_every_vote():
    documents = texts(3)
    assert look(documents, relevant("t1")).value == [Finding.NEGATIVE, Finding.POSITIVE, Finding.NEGATIVE]
    played = look(texts(1), [YES, YES, NO])
    assert played.value == [Finding.DOUBTFUL]
    assert [call.sample_index for call in played.calls] == [0, 1, 2]
    assert look(texts(1), YES, num_votes=1).value == [Finding.POSITIVE]


@pytest.mark.parametrize("further", [[BROKEN, YES], [YES, BROKEN], [BROKEN, BROKEN]])
def test_a_failure_never_promotes(further):
    assert look(texts(1), [YES, *further]).value == [Finding.DOUBTFUL]


def test_a_failure_of_the_first_vote_leaves_the_label_as_it_was():
    assert look(texts(2), [BROKEN, NO]).value == [Finding.UNKNOWN, Finding.NEGATIVE]


def test_spare_negatives_are_asked_about_only_when_they_are_needed():
    assert len(look(texts(8), NO, wanted=5).value) == 5
    played = look(texts(8), relevant("t0", "t5"), wanted=5)
    assert len(played.value) == 7 and played.value.count(Finding.NEGATIVE) == 5
    assert look(texts(3), YES, wanted=2).value == [Finding.POSITIVE] * 3


def test_no_votes_is_refused():
    with pytest.raises(ValueError, match="num_votes is 0"):
        RelabelOptions(num_votes=0)


def test_a_row_keeps_text_id_score_and_ranker_together():
    found = [Finding.NEGATIVE, Finding.POSITIVE, Finding.DOUBTFUL, Finding.UNKNOWN]
    changed = relabelled(row(6), found, 2)
    assert changed.neg_ids == ("t0", "t3") and changed.neg == ("t0. text 0", "t3. text 3")
    assert changed.neg_scores == pytest.approx((0.5, 0.2)) and changed.neg_rankers == ("dense", "bm25")
    assert changed.pos_ids == ("gold", "t1") and changed.promoted_ids == ("t1",)
    assert changed.pos == ("gold", "t1. text 1") and changed.pos_scores == pytest.approx((0.9, 0.4))


def test_rows_are_relabelled_in_their_order_whatever_the_concurrency():
    rows = [replace(row(4), query=f"question {number}?") for number in range(20)]
    documents, engine = {document.doc_id: document for document in texts(4)}, ScriptedEngine(hashed(1))
    first, counts, usage = asyncio.run(relabel_rows(rows, documents, engine, 3, OPTIONS, 1))
    again, _, _ = asyncio.run(relabel_rows(rows, documents, engine, 3, OPTIONS, 16))
    assert first == again
    assert [changed.query for changed in first] == [item.query for item in rows]
    assert counts[Finding.NEGATIVE] and counts[Finding.POSITIVE] and usage.calls >= 60
