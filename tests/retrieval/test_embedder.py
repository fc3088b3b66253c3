from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from samrag.errors import UserError
from samrag.retrieval import embedder as embedder_module
from samrag.retrieval.embedder import QUICKSTART_PACKAGE, Embedder, resolve_model

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(QUICKSTART_PACKAGE) is None, reason="the quickstart embedder is not installed"
)
TEXTS = ["A drawn emblem: a red circle on blue. " * 5, "Short.", "The club was founded in 1902.", "Short."]


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder.load("quickstart", max_length=64, device="cpu", num_threads=1)


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    """The packaged model's folder, its weights as a link."""
    source = resolve_model("minilm")
    folder = tmp_path / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return folder


@needs_minilm
def test_vectors_are_unit_length_deterministic_and_in_the_order_given(minilm):
    vectors = minilm.encode_documents(TEXTS, max_batch_tokens=128)
    assert vectors.dtype == np.float32 and vectors.shape == (4, minilm.dimension)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(vectors, minilm.encode_documents(TEXTS, max_batch_tokens=128))
    one_by_one = np.concatenate([minilm.encode_documents([text]) for text in TEXTS])
    assert np.allclose(vectors, one_by_one, atol=1e-5)
    assert minilm.encode_queries([]).shape == (0, minilm.dimension)


@needs_minilm
def test_the_instruction_goes_before_queries_only_and_is_read_back(minilm, model_copy):
    path = model_copy / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": {"query": "Find: "}}))
    stored = Embedder.load(model_copy, max_length=64, device="cpu")
    assert stored.query_instruction == "Find: "
    assert np.allclose(stored.encode_queries(["a lamp"]), minilm.encode_documents(["Find: a lamp"]), atol=1e-5)
    assert np.allclose(stored.encode_documents(["a lamp"]), minilm.encode_documents(["a lamp"]), atol=1e-5)
    overridden = Embedder.load(model_copy, query_instruction="", max_length=64, device="cpu")
    assert overridden.identity == minilm.identity != stored.identity


@needs_minilm
@pytest.mark.parametrize("max_batch_tokens", [1, 100, 100_000])
def test_vectors_are_those_of_sentence_transformers_however_texts_are_batched(minilm, max_batch_tokens, monkeypatch):
    monkeypatch.setattr(embedder_module, "TEXTS_SORTED_AT_ONCE", 3)
    texts = ["word " * length for length in (3, 90, 1, 40, 0, 12, 7, 7)]
    wanted = minilm.model.encode(texts, normalize_embeddings=True)
    found = minilm.encode_documents(texts, max_batch_tokens)
    assert (found * wanted).sum(axis=1).min() > 0.9999


@needs_minilm
def test_batches_keep_the_budget_and_hold_every_text_once(minilm, monkeypatch):
    shapes = []
    forward = minilm.model.forward
    monkeypatch.setattr(minilm.model, "forward", lambda x, **_: shapes.append(x["input_ids"].shape) or forward(x))
    done = []
    minilm.encode_documents(["word " * n for n in range(60)], 200, lambda steps=1, note="": done.append(steps))
    assert all(rows == 1 or rows * width <= 200 for rows, width in shapes)
    assert done == [rows for rows, _ in shapes] and sum(done) == 60
    assert sum(rows * width for rows, width in shapes) < 1.1 * sum(min(n + 2, 64) for n in range(60))


@needs_minilm
def test_a_model_in_training_encodes_without_dropout(minilm):
    wanted = minilm.encode_documents(TEXTS)
    minilm.model.train()
    assert np.array_equal(minilm.encode_documents(TEXTS), wanted)
    assert not minilm.model.training


@needs_minilm
def test_empty_and_endless_texts_have_vectors_of_their_own(minilm):
    endless = "word " * 20_000
    empty, long, cut = minilm.encode_documents(["", endless, "word " * 62])
    assert np.isfinite(empty).all() and np.allclose(np.linalg.norm(empty), 1, atol=1e-5)
    assert np.allclose(long, cut, atol=1e-5)


@needs_minilm
def test_vectors_that_are_not_finite_are_refused(minilm, monkeypatch):
    forward = minilm.model.forward
    monkeypatch.setattr(
        minilm.model, "forward", lambda x, **_: {"sentence_embedding": forward(x)["sentence_embedding"] * np.nan}
    )
    with pytest.raises(UserError, match="4 of 4 vectors are not finite"):
        minilm.encode_documents(TEXTS)
    with pytest.raises(UserError, match="max_batch_tokens is 0"):
        minilm.encode_documents(TEXTS, 0)


@needs_minilm
@pytest.mark.parametrize("missing", ["modules.json", "model.safetensors"])
def test_a_folder_without_an_essential_file_is_refused(model_copy, missing):
    (model_copy / missing).unlink()
    with pytest.raises(UserError, match=missing.removeprefix("model.")):
        Embedder.load(model_copy)


@needs_minilm
def test_a_folder_without_tokenizer_or_pooling_is_refused(model_copy):
    modules = json.loads((model_copy / "modules.json").read_text())
    (model_copy / "modules.json").write_text(json.dumps(modules[:1]))
    with pytest.raises(UserError, match="Pooling"):
        Embedder.load(model_copy)
    (model_copy / "tokenizer.json").unlink()
    (model_copy / "vocab.txt").unlink()
    with pytest.raises(UserError, match="tokenizer"):
        Embedder.load(model_copy)


@needs_minilm
def test_a_length_beyond_the_positions_is_refused():
    with pytest.raises(UserError, match="512 positions"):
        Embedder.load("minilm", max_length=513, device="cpu")


@needs_minilm
def test_packaged_weights_that_are_not_the_known_ones_are_refused(monkeypatch):
    monkeypatch.setattr(embedder_module, "QUICKSTART_SHA256", "0" * 64)
    with pytest.raises(UserError, match="SHA-256"):
        resolve_model("quickstart")


def test_a_missing_package_names_the_way_out(monkeypatch):
    monkeypatch.setattr(embedder_module, "QUICKSTART_PACKAGE", "no_such_package_here")
    with pytest.raises(UserError, match=r"pip install samrag\[quickstart\]"):
        resolve_model("quickstart")


def test_a_name_that_is_no_model_is_refused_without_the_network(tmp_path):
    for name in ("nothing", str(tmp_path / "absent"), "./a/b", "a/b/c"):
        with pytest.raises(UserError, match="is no folder"):
            resolve_model(name)
