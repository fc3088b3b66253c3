from __future__ import annotations

import json

import pytest

from samrag import ranking
from samrag.errors import UserError
from samrag.ranking import RankerPlan, rank_all, recall_rows
from samrag.retrieval.fusion import Reranker, fuse
from samrag.retrieval.index import Hit
from samrag.schema import Question

from .conftest import text_document


def ranked(*names: str) -> list[Hit]:
    return [Hit(name, 1.0 / rank) for rank, name in enumerate(names, start=1)]


def ids(hits: list[Hit]) -> list[str]:
    return [hit.doc_id for hit in hits]


def test_a_document_scores_the_sum_of_its_reciprocal_ranks():
    (fused,) = fuse([[ranked("a", "b", "c")], [ranked("c", "a")]], 5)
    assert ids(fused) == ["a", "c", "b"]
    assert [hit.score for hit in fused] == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62])


def test_scores_do_not_count_and_one_ranker_keeps_its_order():
    hits = [Hit("x", 1e9), Hit("y", -3.0), Hit("z", -3.0)]
    assert ids(fuse([[hits]], 2)[0]) == ["x", "y"]


def test_weights_decide_between_rankers_that_disagree():
    rankings = [[ranked("a", "b")], [ranked("b", "a")]]
    assert ids(fuse(rankings, 2)[0]) == ["a", "b"], "equal sums: the first ranker's first"
    assert ids(fuse(rankings, 2, weights=[1, 2])[0]) == ["b", "a"]


def test_an_empty_ranking_leaves_the_others():
    assert [ids(hits) for hits in fuse([[[], []], [ranked("a"), []]], 3)] == [["a"], []]


def test_fusions_that_make_no_sense_are_refused():
    for rankings, k, weights in (([], 1, None), ([[[]], [[], []]], 1, None), ([[[]]], 0, None), ([[[]]], 1, [0.0])):
        with pytest.raises(UserError):
            fuse(rankings, k, weights)


DOCUMENTS = [text_document(f"d{i}", title, text) for i, (title, text) in enumerate(
    [("Blue Lake", "deep water"), ("Red Hill", "steep stones"), ("Lake", "a blue boat on deep blue water")]
)]  # fmt: skip
QUESTIONS = [
    Question("q0", "Is Blue Lake deep?", ("yes",), "TextQ", "dev", support_ids=("d0",)),
    Question("q1", "Which hill has steep stones?", ("Red",), "TextQ", "dev", support_ids=("d1",)),
]


def test_a_fusion_stands_beside_the_rankers_it_is_made_of():
    plan = RankerPlan(rankers=["title", "bm25"], fusions=["both=title+BM25", "mostly words=title+BM25*3"])
    rankings = rank_all(QUESTIONS, DOCUMENTS, plan, 2)
    assert list(rankings) == ["title", "BM25", "both", "mostly words"]
    assert rankings["title"] == [["d0", "d2"], []]
    assert rankings["both"] == [["d0", "d2"], ["d1"]]
    rows = recall_rows(QUESTIONS, rankings, [1])
    assert {row["ranker"]: row["recall"] for row in rows}["both"] == 100


def test_labels_that_end_in_a_star_can_be_fused_and_weighed(monkeypatch):
    monkeypatch.setattr(ranking, "rank_documents", lambda *_: [ranked("d2", "d0"), ranked("d2", "d1")])
    plan = RankerPlan(rankers=["bm25"], indexes=["R*=folder=model"], fusions=["a=BM25+R*", "b=BM25+R**99"])
    rankings = rank_all(QUESTIONS, DOCUMENTS, plan, 1)
    assert rankings["b"] == [["d2"], ["d2"]]
    assert list(rankings) == ["BM25", "R*", "a", "b"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (RankerPlan(rankers=["bm52"]), "'bm52' is unknown"),
        (RankerPlan(rankers=["bm25"], fusions=["BM25+title"]), "write it as label=ranker"),
        (RankerPlan(rankers=["bm25"], fusions=["f=BM25+R"]), "no ranker 'R'"),
        (RankerPlan(rankers=["bm25"], fusions=["BM25=BM25"]), "two rankers are called 'BM25'"),
        (RankerPlan(rankers=["bm25"], reranks=["x=BM25"]), "write it as label=ranker=cross-encoder"),
        (RankerPlan(rankers=["bm25"], reranks=["x=BM25=no such model"]), "no folder"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(plan, message):
    with pytest.raises(UserError, match=message):
        rank_all(QUESTIONS, DOCUMENTS, plan, 1)


class LongestFirst:
    """A cross-encoder that likes long documents."""

    def predict(self, pairs, batch_size, show_progress_bar):
        return [float(len(document)) for _, document in pairs]


def test_a_reranker_orders_the_same_documents_by_its_own_scores():
    reranker = Reranker.__new__(Reranker)
    reranker._model, reranker._batch_size = LongestFirst(), 8
    by_id = {document.doc_id: document for document in DOCUMENTS}
    found = reranker.rerank(["q", "r", "s"], [ranked("d0", "d1", "d2"), [], ranked("d1")], by_id)
    assert [ids(hits) for hits in found] == [["d2", "d1", "d0"], [], ["d1"]]


def test_a_reranker_reads_a_folder_of_safetensors(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "lake", "blue"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=7, num_labels=1, **shape)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"
    plan = RankerPlan(rankers=["bm25"], reranks=[f"again=BM25={tmp_path}"], rerank_depth=2)
    rankings = rank_all(QUESTIONS, DOCUMENTS, plan, 5)
    assert [sorted(found) for found in rankings["again"]] == [sorted(found[:2]) for found in rankings["BM25"]]
