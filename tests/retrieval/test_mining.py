from __future__ import annotations

import numpy as np
import pytest

from samrag.errors import UserError
from samrag.retrieval import mining
from samrag.retrieval.mining import MiningRule, mine_negatives, source_counts, with_negatives
from samrag.schema import Question, RetrieverRow

from .conftest import text_document

DOCUMENTS = [text_document(f"d{i}", f"Title {i}", f"text {i}") for i in range(80)]
SCORES = 1 - np.arange(80) / 100
"""Of the documents, for every question."""


def question(number: int, *supports: str) -> Question:
    return Question(f"q{number}", f"question {number}?", (), "TextQ", "train", support_ids=supports)


QUESTIONS = [question(i, f"d{i}", f"d{i + 1}") for i in range(20)]


def mined(questions=QUESTIONS, documents=DOCUMENTS, scores=SCORES, missing="error", **rule):
    """Mine where the n-th document has the n-th score."""
    documents = documents[: len(scores)]
    vectors = np.stack([scores, np.zeros(len(scores))], axis=1).astype(np.float32)
    queries = np.tile(np.array([[1, 0]], dtype=np.float32), (len(questions), 1))
    return mine_negatives(questions, documents, queries, vectors, MiningRule(**rule), missing)


def test_positives_never_become_negatives():
    for row, asked in zip(mined(), QUESTIONS, strict=True):
        assert row.pos_ids == asked.support_ids
        assert len(set(row.neg_ids)) == 10
        assert not set(row.neg_ids) & set(row.pos_ids)
        assert not set(row.neg) & set(row.pos)


def test_a_document_with_the_text_of_a_positive_is_no_negative():
    twin = text_document("twin", "title  0", "TEXT 0")
    rows = mined([question(0, "d0")], [twin, *DOCUMENTS], [1.0, 0.9, 0.5])
    assert rows[0].neg_ids == ("d1",)


def test_of_documents_with_one_text_the_best_alone_is_a_negative():
    twins = [text_document(f"t{i}", "Twin") for i in range(4)]
    (row,) = mined([question(0, "d0")], [DOCUMENTS[0], *twins, DOCUMENTS[1]], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert set(row.neg_ids) == {"t0", "d1"}


def test_negatives_come_from_the_top_of_the_rest_with_their_scores():
    drawn = set()
    for seed in range(200):
        (row,) = mined(QUESTIONS[:1], seed=seed)
        drawn.update(row.neg_ids)
    assert drawn == {f"d{i}" for i in range(2, 52)}
    scores = dict(zip([document.doc_id for document in DOCUMENTS], SCORES, strict=True))
    assert row.neg_scores == pytest.approx([scores[i] for i in row.neg_ids])
    assert row.pos_scores == pytest.approx([scores[i] for i in row.pos_ids])


def test_every_candidate_is_drawn_equally_often():
    many = [question(i, "d0") for i in range(4000)]
    counts = np.zeros(80)
    for row in mined(many, num_negatives=5, top=20):
        counts[[int(i[1:]) for i in row.neg_ids]] += 1
    assert counts[1:21].sum() == 20_000
    assert np.abs(counts[1:21] - 1000).max() < 5 * 1000**0.5


def test_the_draw_depends_on_seed_and_question_alone(monkeypatch):
    asked = [*QUESTIONS, question(20, *(f"d{i}" for i in range(30)))]
    rule = {"seed": 3, "relative_margin": 0.3, "rankers": ("dense", "title")}
    rows = {row.query_id: row for row in mined(asked, **rule)}
    monkeypatch.setattr(mining, "_BLOCK", 3)
    assert all(row == rows[row.query_id] for row in mined(asked[::-1], **rule))
    other = mined(asked, **{**rule, "seed": 4})
    assert any(row.neg_ids != rows[row.query_id].neg_ids for row in other)
    assert rows["q3"].neg_ids != rows["q4"].neg_ids


def test_fewer_candidates_than_wanted_are_all_taken():
    (row,) = mined([question(0, "d0")], scores=[1.0, 0.9, 0.8])
    assert set(row.neg_ids) == {"d1", "d2"}


def test_the_relative_margin_drops_what_scores_near_the_best_positive():
    (row,) = mined([question(0, "d1", "d4")], scores=[0.97, 1.0, 0.94, 0.9, 0.2], relative_margin=0.05)
    assert set(row.neg_ids) == {"d2", "d3"}


def test_a_margin_below_a_negative_score_is_a_margin_too():
    (row,) = mined([question(0, "d1")], scores=[-0.41, -0.4, -0.5], relative_margin=0.05)
    assert set(row.neg_ids) == {"d2"}


def test_where_the_margin_leaves_too_few_the_ranking_is_followed_deeper():
    scores = np.concatenate([np.full(70, 0.9), np.linspace(0.5, 0.4, 10)])
    (row,) = mined([question(0, "d3")], scores=scores, num_negatives=5, top=10, relative_margin=0.05)
    assert len(row.neg_ids) == 5 and {int(i[1:]) for i in row.neg_ids} <= set(range(70, 80))


def test_rankers_take_turns_and_each_negative_says_whose_it_is():
    named = [text_document(f"n{i}", f"Blue {'Lake' * i}") for i in range(1, 4)]
    asked = Question("q", "Is Blue Lake or Blue LakeLake deep?", (), "TextQ", "train", support_ids=("d0",))
    documents = [*DOCUMENTS, *named]
    (row,) = mined([asked], documents, np.linspace(1, 0.1, 83), num_negatives=6, rankers=("dense", "title"))
    assert row.neg_rankers == ("dense", "title", "dense", "title", "dense", "dense")
    assert {i for i, ranker in zip(row.neg_ids, row.neg_rankers, strict=True) if ranker == "title"} == {"n1", "n2"}
    assert source_counts([row]) == {"dense": 4, "title": 2}
    assert all(score <= row.pos_scores[0] for score in row.neg_scores), "scores are the retriever's"


def test_a_document_that_two_rankers_name_is_one_negative():
    asked = [Question(f"q{i}", "Title 5 or title 6?", (), "TextQ", "train", support_ids=("d0",)) for i in range(30)]
    rows = mined(asked, num_negatives=8, top=8, rankers=("dense", "title", "bm25"))
    assert all(len(set(row.neg_ids)) == len(row.neg_ids) == 8 for row in rows)
    assert {ranker for row in rows for ranker in row.neg_rankers} == {"dense", "title", "bm25"}


def test_rows_without_a_negative_are_left_out(caplog):
    full, empty = RetrieverRow("a", ("p",), ("n",)), RetrieverRow("b", ("p",), ())
    assert with_negatives([full, empty]) == [full]
    assert "1 of 2 questions have no negative" in caplog.text
    with pytest.raises(UserError, match="no question has a negative"):
        with_negatives([empty])


def test_supports_outside_the_corpus_are_refused_or_left_out():
    asked = [question(0, "d0", "table"), question(1, "table"), question(2)]
    with pytest.raises(UserError, match="'table'"):
        mined(asked)
    with pytest.raises(UserError, match="no supporting"):
        mined(asked[2:])
    rows = mined(asked, missing="skip")
    assert [row.pos_ids for row in rows] == [("d0",)]


def test_rules_that_cannot_hold_are_refused():
    with pytest.raises(UserError, match="num_negatives is 10 and top is 5"):
        MiningRule(top=5)
    with pytest.raises(UserError, match=r"relative_margin is 1\.5"):
        MiningRule(relative_margin=1.5)
    for rankers in ((), ("dense", "dense"), ("bm52",)):
        with pytest.raises(UserError, match="name some of dense, title, bm25"):
            MiningRule(rankers=rankers)
    with pytest.raises(UserError, match="there are 1 vectors of queries, but 20 queries"):
        mine_negatives(QUESTIONS, DOCUMENTS, np.zeros((1, 2)), np.zeros((80, 2)), MiningRule())
