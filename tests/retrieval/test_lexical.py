from __future__ import annotations

import pytest

from samrag.calls import Passage
from samrag.errors import UserError
from samrag.retrieval.lexical import Bm25Ranker, TitleRanker, word_overlap

from .conftest import text_document


def ids(hits):
    return [hit.doc_id for hit in hits]


def test_bm25_finds_the_document_with_the_word(corpus):
    hits = Bm25Ranker(corpus).search(["When was the club at ESKE founded?", "zzz"], 3)
    assert ids(hits[0])[0] == "d4"
    assert hits[1] == []


def test_bm25_breaks_ties_by_corpus_order():
    same = [text_document(f"s{i}", "lamp") for i in range(30)]
    ranker = Bm25Ranker([text_document("x", "other thing"), *same])
    assert ids(ranker.search(["the lamp"], 4)[0]) == ["s0", "s1", "s2", "s3"]


def test_the_longest_title_in_the_question_comes_first():
    ranker = TitleRanker(
        [text_document("short", "Grand"), text_document("long", "Grand Hotel"), text_document("no", "Hotels")]
    )
    assert ids(ranker.search(["What stands before the grand  hotel?"], 5)[0]) == ["long", "short"]


def test_titles_match_whole_words_without_case_accents_and_punctuation():
    ranker = TitleRanker([text_document("a", "St. Jos\u00e9's Hall"), text_document("b", "Art")])
    assert ids(ranker.search(["who built ST JOSE'S HALL", "a start", "modern art?"], 5)[0]) == ["a"]
    assert ids(ranker.search(["a start"], 5)[0]) == []
    assert ids(ranker.search(["modern art?"], 5)[0]) == ["b"]


def test_documents_of_one_title_keep_the_order_of_the_corpus():
    twins = [text_document("z", "Blue Lake"), text_document("m", "Lake"), text_document("a", "blue lake")]
    assert ids(TitleRanker(twins).search(["Is Blue Lake deep?"], 5)[0]) == ["z", "a", "m"]
    assert ids(TitleRanker(twins[::-1]).search(["Is Blue Lake deep?"], 2)[0]) == ["a", "z"]


def test_titles_without_words_never_match():
    assert TitleRanker([text_document("a", "!!!")]).search(["!!! what"], 5) == [[]]


def test_an_empty_corpus_is_refused():
    for ranker in (Bm25Ranker, TitleRanker):
        with pytest.raises(UserError, match="empty"):
            ranker([])


def test_overlap_counts_rare_words_more_and_lies_between_nothing_and_the_whole_phrase():
    passages = [
        Passage("Old mill", "The mill of Sorne."),
        Passage("Sorne", "The town of SORN\u00c9."),
        Passage("x", "y"),
    ]
    mill, town, other = word_overlap("mill of Sorne", passages)
    assert mill == 1.0 > town > other == 0.0
    assert word_overlap("mill", passages)[0] > word_overlap("mill bridge", passages)[0] > 0
    rare, common = word_overlap("mill sorne", passages)[:2]
    assert rare - common > common  # only the first has the rarer word
    assert word_overlap("!!", passages) == [0.0] * 3
    assert word_overlap("mill", []) == []
