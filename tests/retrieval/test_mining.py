from __future__ import annotations

import pytest

from samrag.errors import UserError
from samrag.retrieval.index import Hit
from samrag.retrieval.mining import mine_negatives
from samrag.schema import Question

from .conftest import text_document

DOCUMENTS = [text_document(f"d{i}", f"Title {i}", f"text {i}") for i in range(80)]


def question(number: int, *supports: str) -> Question:
    return Question(f"q{number}", f"question {number}?", (), "TextQ", "train", support_ids=supports)


QUESTIONS = [question(i, f"d{i}", f"d{i + 1}") for i in range(20)]
RANKINGS = [[Hit(d.doc_id, 1 - rank / 100) for rank, d in enumerate(DOCUMENTS)] for _ in QUESTIONS]


def test_positives_never_become_negatives():
    for row, asked in zip(mine_negatives(QUESTIONS, DOCUMENTS, RANKINGS), QUESTIONS, strict=True):
        assert row.pos_ids == asked.support_ids
        assert len(set(row.neg_ids)) == 10
        assert not set(row.neg_ids) & set(row.pos_ids)
        assert not set(row.neg) & set(row.pos)


def test_a_document_with_the_text_of_a_positive_is_no_negative():
    twin = text_document("twin", "title  0", "TEXT 0")
    rows = mine_negatives([question(0, "d0")], [*DOCUMENTS, twin], [[Hit("twin", 1.0), Hit("d1", 0.5)]])
    assert rows[0].neg_ids == ("d1",)


def test_negatives_come_from_the_top_of_the_rest_with_their_scores():
    drawn = set()
    for seed in range(200):
        row = mine_negatives(QUESTIONS[:1], DOCUMENTS, RANKINGS[:1], seed=seed)[0]
        drawn.update(row.neg_ids)
    assert drawn == {f"d{i}" for i in range(2, 52)}
    scores = {hit.doc_id: hit.score for hit in RANKINGS[0]}
    assert row.neg_scores == tuple(scores[i] for i in row.neg_ids)
    assert row.pos_scores == tuple(scores[i] for i in row.pos_ids)


def test_the_draw_depends_on_seed_and_question_alone():
    rows = {row.query_id: row for row in mine_negatives(QUESTIONS, DOCUMENTS, RANKINGS, seed=3)}
    again = mine_negatives(QUESTIONS[::-1], DOCUMENTS, RANKINGS, seed=3)
    assert all(row == rows[row.query_id] for row in again)
    other = mine_negatives(QUESTIONS, DOCUMENTS, RANKINGS, seed=4)
    assert any(row.neg_ids != rows[row.query_id].neg_ids for row in other)
    assert rows["q3"].neg_ids != rows["q4"].neg_ids


def test_fewer_candidates_than_wanted_are_all_taken():
    rows = mine_negatives([question(0, "d0")], DOCUMENTS, [[Hit("d0", 1.0), Hit("d5", 0.9), Hit("d6", 0.8)]])
    assert set(rows[0].neg_ids) == {"d5", "d6"}


def test_the_relative_margin_drops_what_scores_near_the_positive():
    ranking = [Hit("d1", 0.97), Hit("d0", 1.0), Hit("d2", 0.95), Hit("d3", 0.9)]
    rows = mine_negatives([question(0, "d0")], DOCUMENTS, [ranking], relative_margin=0.05)
    assert set(rows[0].neg_ids) == {"d2", "d3"}
    rows = mine_negatives(
        [question(0, "d0")], DOCUMENTS, [ranking[:1]], relative_margin=0.05, positive_scores=[{"d0": 2.0}]
    )
    assert rows[0].neg_ids == ("d1",) and rows[0].pos_scores == (2.0,)
    with pytest.raises(UserError, match="positive_scores"):
        mine_negatives([question(0, "d0")], DOCUMENTS, [ranking[:1]], relative_margin=0.05)


def test_supports_outside_the_corpus_are_refused_or_left_out():
    asked = [question(0, "d0", "table"), question(1, "table"), question(2)]
    with pytest.raises(UserError, match="'table'"):
        mine_negatives(asked, DOCUMENTS, RANKINGS[:3])
    with pytest.raises(UserError, match="no supporting"):
        mine_negatives(asked[2:], DOCUMENTS, RANKINGS[:1])
    rows = mine_negatives(asked, DOCUMENTS, RANKINGS[:3], missing="skip")
    assert [row.pos_ids for row in rows] == [("d0",)]


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="num_negatives is 10 and top is 5"):
        mine_negatives(QUESTIONS, DOCUMENTS, RANKINGS, top=5)
    with pytest.raises(UserError, match="20 questions but 19"):
        mine_negatives(QUESTIONS, DOCUMENTS, RANKINGS[1:])
