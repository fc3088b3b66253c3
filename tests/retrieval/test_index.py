"""Building and searching an index: what it finds, and that no way of building it makes a difference."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference import build_index as script
from samrag.arguments import IndexArguments
from samrag.errors import UserError
from samrag.files import write_records
from samrag.retrieval import index as index_module
from samrag.retrieval.embedder import Embedder
from samrag.retrieval.index import Hit, Index, IndexOptions, build_index
from samrag.retrieval.store import SearchOptions

from .conftest import BagEmbedder, text_document

SMALL = IndexOptions(shard_size=3)
SEARCHES = {
    "ivf": SearchOptions("ivf", num_lists=8, num_probes=4),
    "hnsw": SearchOptions("hnsw", num_links=8),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def many(count: int):
    words = "pier boat oar race town club river bridge".split()
    return [text_document(f"m{i}", f"{words[i % 8]} {words[i // 8 % 8]} {i}") for i in range(count)]


def test_a_loaded_index_ranks_like_brute_force(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path, SMALL)
    vectors = bag.encode_documents([d.retrieval_text for d in corpus])
    queries = bag.encode_queries(["Cald Rowing", "pier 1904", "Holt"])
    index = Index.load(tmp_path, bag)
    for query, found in zip(queries, index.search(queries, 5), strict=True):
        scores = vectors @ query
        best = np.argsort(-scores, kind="stable")[:5]
        assert [hit.doc_id for hit in found] == [corpus[i].doc_id for i in best]
        assert np.allclose([hit.score for hit in found], scores[best], atol=1e-6)
    np.testing.assert_array_equal(index.vectors, vectors)
    np.testing.assert_array_equal(index.vectors_of(["d7", "d0", "d3"]), vectors[[7, 0, 3]])


def test_exact_search_finds_what_faiss_finds(tmp_path, bag):
    import faiss

    documents = many(300)
    index = build_index(documents, bag, tmp_path, IndexOptions(shard_size=70)).index
    queries = bag.encode_queries([f"{d.title} boat" for d in documents[::9]])
    flat = faiss.IndexFlatIP(bag.dimension)
    flat.add(index.vectors)
    scores, _ = flat.search(queries, 10)
    found = [[hit.score for hit in hits] for hits in index.search(queries, 10)]
    np.testing.assert_allclose(found, scores, atol=1e-6)


def test_equal_texts_are_encoded_once_and_rank_in_corpus_order(tmp_path, bag):
    same = [text_document(f"s{i}", "Same Title", "same words") for i in range(9)]
    built = build_index([text_document("a", "Other"), *same], bag, tmp_path, SMALL)
    assert bag.num_encoded == built.num_encoded == 2
    hits = built.index.search(bag.encode_queries(["Same Title. same words"]), 4)[0]
    assert [hit.doc_id for hit in hits] == ["s0", "s1", "s2", "s3"]
    assert len({hit.score for hit in hits}) == 1


def test_k_beyond_the_corpus_gives_the_whole_corpus(tmp_path, bag, corpus):
    hits = build_index(corpus, bag, tmp_path).index.search(bag.encode_queries(["pier"]), 100)[0]
    assert len(hits) == len(corpus) and all(isinstance(hit, Hit) for hit in hits)


def test_building_the_same_index_again_is_skipped(tmp_path, bag, corpus):
    assert not build_index(corpus, bag, tmp_path).skipped
    before = contents(tmp_path)
    bag.num_encoded = 0
    assert build_index(corpus, bag, tmp_path).skipped
    assert bag.num_encoded == 0 and contents(tmp_path) == before


def test_an_index_carries_what_it_was_built_from(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path, IndexOptions("float16"))
    space = json.loads((tmp_path / "manifest.json").read_text())["space"]
    assert space == {
        "embedder": "bag", "dimension": 32, "pooling": "sum", "query_instruction": "", "dtype": "float16"
    }  # fmt: skip


def test_another_embedder_or_element_type_is_refused_unless_it_may_be_replaced(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path)
    with pytest.raises(UserError, match="another embedder"):
        Index.load(tmp_path, BagEmbedder("other"))
    with pytest.raises(UserError, match=r"another embedder.*overwrite"):
        build_index(corpus, BagEmbedder("other"), tmp_path)
    with pytest.raises(UserError, match=r"float32.*overwrite"):
        build_index(corpus, bag, tmp_path, IndexOptions("float16"))
    assert build_index(corpus, BagEmbedder("other"), tmp_path, overwrite=True).num_encoded == len(corpus)
    Index.load(tmp_path, BagEmbedder("other"))


# --- other documents ---


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(st.integers(0, 11), min_size=1, unique=True), after=st.permutations(range(12)))
def test_an_index_brought_up_to_date_is_the_one_built_from_scratch(tmp_path_factory, before, after):
    """Added, deleted and reordered documents, of which some share a text."""
    pool = [text_document(f"p{i}", f"title {i // 2}") for i in range(12)]
    old, new = [pool[i] for i in before], [pool[i] for i in after[: 1 + after[0]]]
    folder, scratch = tmp_path_factory.mktemp("updated"), tmp_path_factory.mktemp("scratch")
    build_index(old, BagEmbedder(), folder, SMALL)
    updating = build_index(new, BagEmbedder(), folder, SMALL)
    build_index(new, BagEmbedder(), scratch, SMALL)
    assert contents(folder) == contents(scratch)
    assert updating.num_encoded == len({d.title for d in new} - {d.title for d in old})


def test_the_order_of_the_documents_decides_ties_alone(tmp_path, bag, corpus):
    queries = bag.encode_queries(["Cald Rowing", "pier 1904", "Founded at Holt"])
    forward = build_index(corpus, bag, tmp_path / "a", SMALL).index.search(queries, 8)
    backward = build_index(corpus[::-1], bag, tmp_path / "b", IndexOptions(shard_size=5)).index.search(queries, 8)
    for one, other in zip(forward, backward, strict=True):
        assert {hit.doc_id: hit.score for hit in one} == {hit.doc_id: hit.score for hit in other}
        assert [hit.score for hit in one] == [hit.score for hit in other]


def test_a_reader_of_the_old_index_is_not_disturbed_by_an_update(tmp_path, bag, corpus):
    old = build_index(corpus, bag, tmp_path, SMALL).index
    queries = bag.encode_queries(["Holt pier"])
    wanted = old.search(queries, 8)
    build_index(corpus[2:], bag, tmp_path, SMALL)
    assert old.search(queries, 8) == wanted


# --- killed builds ---

BUILDER = """
import os, signal, sys
from pathlib import Path
from tests.retrieval.conftest import BagEmbedder, text_document
from samrag.retrieval.index import IndexOptions, build_index

class Killed(BagEmbedder):
    def encode_documents(self, texts, max_batch_tokens=None, advance=None):
        if self.num_encoded >= int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_documents(texts, max_batch_tokens, advance)

documents = [text_document(f"d{i}", f"title {i}") for i in range(int(sys.argv[2]))]
build_index(documents, Killed(), Path(sys.argv[1]), IndexOptions(shard_size=4))
"""


@pytest.mark.parametrize("num_before", [0, 6])
def test_a_killed_build_goes_on_at_the_last_whole_shard_and_ends_with_the_same_bytes(tmp_path, num_before):
    documents = [text_document(f"d{i}", f"title {i}") for i in range(20)]
    options = IndexOptions(shard_size=4)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        if num_before:
            build_index(documents[:num_before], BagEmbedder(), folder, options)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", BUILDER, str(killed), "20", "10"], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (killed / ".vectors-00003-0.npy.0.part").write_bytes(b"half")
    if num_before:
        assert len(Index.load(killed)) == num_before
    else:
        with pytest.raises(UserError, match="cut short"):
            Index.load(killed)
    resumed, undisturbed = (build_index(documents, BagEmbedder(), folder, options) for folder in (killed, whole))
    assert resumed.num_encoded < undisturbed.num_encoded - 7
    assert contents(killed) == contents(whole)


def test_a_shard_that_is_cut_off_is_refused_and_written_again(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path, SMALL)
    before = contents(tmp_path)
    shard = next(tmp_path.glob("vectors-00001-*.npy"))
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(UserError, match=f"{shard.name} is missing or not the file"):
        Index.load(tmp_path)
    with pytest.raises(UserError, match="overwrite: true"):
        build_index(corpus, bag, tmp_path, SMALL)
    (tmp_path / "manifest.json").unlink()  # as if killed: whole shards are kept, this one is not
    bag.num_encoded = 0
    build_index(corpus, bag, tmp_path, SMALL)
    assert bag.num_encoded == 3 and contents(tmp_path) == before


# --- broken folders and vectors ---


@pytest.mark.parametrize("pattern", ["vectors-00000-*.npy", "documents-*.json"])
def test_a_missing_file_is_named(tmp_path, bag, corpus, pattern):
    build_index(corpus, bag, tmp_path, SMALL)
    (path,) = tmp_path.glob(pattern)
    path.unlink()
    with pytest.raises(UserError, match=path.name):
        Index.load(tmp_path)
    assert build_index(corpus, bag, tmp_path, SMALL, overwrite=True).num_encoded == len(corpus)


def test_a_shard_in_the_place_of_another_is_noticed(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path, SMALL)
    first, second, _ = sorted(tmp_path.glob("vectors-*.npy"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=second.name):
        Index.load(tmp_path)


def test_a_manifest_of_another_kind_is_refused(tmp_path, bag, corpus):
    build_index(corpus, bag, tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "space": {**manifest["space"], "dimension": 31}}))
    with pytest.raises(UserError, match="vectors of another kind"):
        Index.load(tmp_path)
    path.write_text(json.dumps({**manifest, "num_documents": 7}))
    with pytest.raises(UserError, match="do not belong together"):
        Index.load(tmp_path)
    path.write_text(json.dumps({**manifest, "shards": [{"name": "../x.npy", "sha256": ""}]}))
    with pytest.raises(UserError, match="leaves"):
        Index.load(tmp_path)
    path.write_text('{"version": 1}')
    with pytest.raises(UserError, match="no manifest of this version"):
        Index.load(tmp_path)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda v: np.where(np.arange(len(v))[:, None] == 1, np.nan, v), r"document 'd1' is not finite"),
        (lambda v: v[:, :31], r"shape \(8, 31\) for 8 texts; \(8, 32\)"),
        (lambda v: v[1:], r"shape \(7, 32\) for 8 texts"),
        (lambda v: v * 1e6, "not finite as float16"),
    ],
)
def test_bad_vectors_are_refused_and_leave_no_index(tmp_path, bag, corpus, broken, message, monkeypatch):
    encode = bag.encode_documents
    monkeypatch.setattr(bag, "encode_documents", lambda *given: broken(encode(*given)))
    with pytest.raises(UserError, match=message):
        build_index(corpus, bag, tmp_path, IndexOptions("float16"))
    assert not list(tmp_path.iterdir())


def test_bad_input_is_refused(tmp_path, bag, corpus):
    with pytest.raises(UserError, match="empty"):
        build_index([], bag, tmp_path)
    with pytest.raises(UserError, match="'d0' occurs twice"):
        build_index([*corpus, replace(corpus[0], title="other")], bag, tmp_path)
    found = build_index(corpus, bag, tmp_path).index
    with pytest.raises(UserError, match="k is 0"):
        found.search(bag.encode_queries(["pier"]), 0)
    with pytest.raises(UserError, match="shape"):
        found.search(np.zeros((1, 3), dtype=np.float32), 1)


# --- half precision, approximate search, Milvus ---


def test_half_precision_takes_half_the_place_and_finds_the_same(tmp_path, bag):
    documents = many(400)
    indexes = [build_index(documents, bag, tmp_path / d, IndexOptions(d)).index for d in ("float32", "float16")]
    sizes = [sum(p.stat().st_size for p in (tmp_path / d).glob("vectors-*")) for d in ("float32", "float16")]
    assert sizes[1] < 0.51 * sizes[0]
    queries = bag.encode_queries([f"{d.title} boat" for d in documents[::4]])
    exact, half = ([{hit.doc_id for hit in hits} for hits in index.search(queries, 10)] for index in indexes)
    assert sum(len(a & b) for a, b in zip(exact, half, strict=True)) / (10 * len(queries)) >= 0.99


@pytest.mark.parametrize("method", SEARCHES)
def test_an_approximate_index_says_how_much_it_finds(tmp_path, bag, method):
    documents, options = many(600), IndexOptions(shard_size=250, search=SEARCHES[method])
    built = build_index(documents, bag, tmp_path / "a", options).index
    recall = built.manifest.search.recall_at_10
    assert recall is not None and 0.5 < recall <= 1
    index = Index.load(tmp_path / "a", bag)
    assert index.manifest.search.recall_at_10 == recall == index.recall()
    queries = bag.encode_queries([f"{d.title} boat" for d in documents[::7]])
    exact = build_index(documents, bag, tmp_path / "b").index.search(queries, 10)
    scores = [{hit.doc_id: hit.score for hit in hits} for hits in exact]
    found = index.search(queries, 10)
    for hits, true in zip(found, scores, strict=True):
        assert len(hits) == 10 and sorted(hits, key=lambda hit: -hit.score) == hits
        assert all(true.get(hit.doc_id, hit.score) == hit.score for hit in hits)
    build_index(documents, bag, tmp_path / "c", options)
    assert contents(tmp_path / "a") == contents(tmp_path / "c")


def test_another_search_over_the_same_documents_encodes_nothing(tmp_path, bag):
    documents = many(100)
    build_index(documents, bag, tmp_path)
    built = build_index(documents, bag, tmp_path, IndexOptions(search=SEARCHES["hnsw"]))
    assert built.num_encoded == 0 and not built.skipped
    assert list(tmp_path.glob("search-*.faiss"))
    build_index(documents, bag, tmp_path)
    assert not list(tmp_path.glob("search-*.faiss"))


def test_queries_for_which_too_few_are_found_are_searched_exactly(tmp_path, bag, corpus):
    class Nothing:
        def candidates(self, queries, depth):
            return np.full((len(queries), depth), -1)

    built = build_index(corpus, bag, tmp_path).index
    queries = bag.encode_queries(["pier", "Holt"])
    wanted = built.search(queries, 3)
    built._finder = Nothing()
    assert built.search(queries, 3) == wanted


@pytest.mark.skipif(
    importlib.util.find_spec("pymilvus") is None or importlib.util.find_spec("milvus_lite") is None,
    reason="pymilvus and milvus-lite are not installed (pip install samrag[milvus])",
)
def test_milvus_finds_what_exact_search_finds(tmp_path, bag):
    documents = many(300)
    search = SearchOptions("milvus", milvus_uri=str(tmp_path / "vectors.db"))
    options = IndexOptions(shard_size=128, search=search)
    build_index(documents[:200], bag, tmp_path / "milvus", options)
    built = build_index(documents, bag, tmp_path / "milvus", options)
    assert built.num_encoded == 100 and built.index.manifest.search.recall_at_10 == 1
    exact = build_index(documents, bag, tmp_path / "exact").index
    queries = bag.encode_queries([f"{d.title} boat" for d in documents[::3]])
    assert Index.load(tmp_path / "milvus", bag).search(queries, 10) == exact.search(queries, 10)
    index_module._milvus(built.index.manifest, search).drop()
    with pytest.raises(UserError, match="does not hold the 300 vectors"):
        Index.load(tmp_path / "milvus", bag)
    assert build_index(documents, bag, tmp_path / "milvus", options).num_encoded == 0


def test_milvus_without_its_package_names_the_way_out(tmp_path, bag, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    search = SearchOptions("milvus", milvus_uri="http://localhost:1")
    with pytest.raises(UserError, match=r"pip install samrag\[milvus\]"):
        build_index(corpus, bag, tmp_path, IndexOptions(search=search))


# --- the script ---


def test_the_script_takes_changed_documents_and_says_what_a_search_finds(tmp_path, bag, corpus, monkeypatch, caplog):
    monkeypatch.setattr(Embedder, "load", lambda name: bag)
    caplog.set_level("INFO")

    def run(*more: str) -> str:
        flags = [
            "--documents_file",
            str(tmp_path / "d.jsonl"),
            "--embedder",
            "bag",
            "--output_dir",
            str(tmp_path / "i"),
        ]
        monkeypatch.setattr(sys, "argv", ["build_index.py", *flags, *more])
        caplog.clear()
        script.main()
        return caplog.text

    write_records(tmp_path / "d.jsonl", corpus[:6])
    assert "6 documents, 32 dimensions, 6 texts encoded" in run()
    assert "nothing to do" in run()
    write_records(tmp_path / "d.jsonl", corpus[1:])
    said = run("--search", "hnsw", "--num_links", "4", "--shard_size", "5")
    assert "7 documents, 32 dimensions, 2 texts encoded" in said
    assert "hnsw finds 100.0 % of the 10 nearest" in said
    assert Index.load(tmp_path / "i", bag).manifest.search.options.num_links == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"search": "milvus"}, "milvus needs it"),
        ({"milvus_uri": "x.db"}, "others do not"),
        ({"search": "milvus", "milvus_uri": "http://root:secret@host"}, "MILVUS_TOKEN"),
        ({"max_batch_tokens": 0}, "at least 1"),
        ({"shard_size": 0}, "at least 1"),
        ({"dtype": "int8"}, "float16"),
    ],
)
def test_options_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        IndexArguments("documents.jsonl", "quickstart", "index", **given)
