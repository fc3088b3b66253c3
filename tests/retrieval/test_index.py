from __future__ import annotations

import numpy as np
import pytest

from samrag.errors import UserError
from samrag.retrieval import index as index_module
from samrag.retrieval.index import Hit, Index, build_index

from .conftest import BagEmbedder, text_document


def test_a_loaded_index_ranks_like_brute_force(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path)
    vectors = bag.encode_documents([d.retrieval_text for d in corpus])
    queries = bag.encode_queries(["Cald Rowing", "pier 1904", "Holt"])
    hits = Index.load(tmp_path, bag).search(queries, 5)
    for query, found in zip(queries, hits, strict=True):
        scores = vectors @ query
        best = np.argsort(-scores, kind="stable")[:5]
        assert [hit.doc_id for hit in found] == [corpus[i].doc_id for i in best]
        assert np.allclose([hit.score for hit in found], scores[best], atol=1e-6)


def test_equal_texts_are_encoded_once_and_rank_in_corpus_order(tmp_path, bag):
    same = [text_document(f"s{i}", "Same Title", "same words") for i in range(9)]
    found = build_index([text_document("a", "Other"), *same], bag, tmp_path).index
    assert bag.num_encoded == 2
    hits = found.search(bag.encode_queries(["Same Title. same words"]), 4)[0]
    assert [hit.doc_id for hit in hits] == ["s0", "s1", "s2", "s3"]
    assert len({hit.score for hit in hits}) == 1


def test_k_beyond_the_corpus_gives_the_whole_corpus(tmp_path, bag, corpus):
    hits = build_index(corpus, bag, tmp_path).index.search(bag.encode_queries(["pier"]), 100)[0]
    assert len(hits) == len(corpus) and all(isinstance(hit, Hit) for hit in hits)


def test_building_the_same_index_again_is_skipped(tmp_path, bag, corpus):
    assert not build_index(corpus, bag, tmp_path).skipped
    bag.num_encoded = 0
    assert build_index(corpus, bag, tmp_path).skipped
    assert bag.num_encoded == 0


def test_another_embedder_is_refused(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path)
    with pytest.raises(UserError, match="another embedder"):
        Index.load(tmp_path, BagEmbedder("other"))
    with pytest.raises(UserError, match="another embedder"):
        build_index(corpus, BagEmbedder("other"), tmp_path)
    assert not build_index(corpus, BagEmbedder("other"), tmp_path, overwrite=True).skipped


def test_other_documents_are_refused(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path)
    with pytest.raises(UserError, match="other documents"):
        build_index(corpus[::-1], bag, tmp_path)


def test_a_half_written_index_is_refused_and_built_again(tmp_path, bag, corpus, monkeypatch):
    def fail(path, value):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_json", fail)
        with pytest.raises(KeyboardInterrupt):
            build_index(corpus, bag, tmp_path)
    assert (tmp_path / "vectors.faiss").exists()
    with pytest.raises(UserError, match="cut short"):
        Index.load(tmp_path)
    assert not build_index(corpus, bag, tmp_path).skipped


def test_files_of_two_indexes_are_not_mixed(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path / "a")
    build_index(corpus[:3], bag, tmp_path / "b")
    (tmp_path / "b" / "vectors.faiss").replace(tmp_path / "a" / "vectors.faiss")
    with pytest.raises(UserError, match="do not belong together"):
        Index.load(tmp_path / "a")


def test_bad_input_is_refused(tmp_path, bag, corpus):
    with pytest.raises(UserError, match="empty"):
        build_index([], bag, tmp_path)
    with pytest.raises(UserError, match="twice"):
        build_index([*corpus, corpus[0]], bag, tmp_path)
    found = build_index(corpus, bag, tmp_path).index
    with pytest.raises(UserError, match="k is 0"):
        found.search(bag.encode_queries(["pier"]), 0)
    with pytest.raises(UserError, match="shape"):
        found.search(np.zeros((1, 3), dtype=np.float32), 1)
