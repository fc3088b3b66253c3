from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import samrag
from samrag.errors import UserError
from samrag.retrieval.embedder import Embedder
from samrag.training import flagembedding
from samrag.training.callbacks import early_stopping
from samrag.training.retrieval_evaluation import HeldOutEvaluator, comparison
from samrag.training.retriever_arguments import RetrieverArguments

retriever = pytest.importorskip("samrag.training.retriever")

ROOT = Path(samrag.__file__).parent.parent

WORDS = (
    "who where founded the club in town red blue arle borv cald dune eske fenn gorl holt rowing chess find :".split()
)
TOWNS = WORDS[9:17]
INSTRUCTION = "find : "


def rows_of(count: int) -> list[dict]:
    texts = [f"the {town} {kind} club" for town in TOWNS for kind in ("rowing", "chess")]
    return [
        {
            "query": f"who founded the {text.split()[1]} club {text.split()[2]}",
            "pos": [text],
            "neg": texts[:i] + texts[i + 1 :],
        }
        for i, text in enumerate(texts[:count])
    ]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module", params=["mean", "cls"])
def base(request, tmp_path_factory) -> Path:
    """A random BERT of two layers in a sentence-transformers folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=48).save_pretrained(folder)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=48, **size)).save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32, request.param)], device="cpu")
    model.save_pretrained(str(folder / "base"), create_model_card=False)
    return folder / "base"


def trainer_for(base: Path, output: Path, rows, options=None, evaluator=None, **changes):
    from sentence_transformers import SentenceTransformerTrainingArguments

    model = Embedder.load(base, query_instruction=INSTRUCTION, device="cpu").model
    settings = {"num_train_epochs": 4, "save_strategy": "no", **changes}
    args = SentenceTransformerTrainingArguments(
        output_dir=str(output), per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=True, report_to="none",
        disable_tqdm=True, seed=1, logging_strategy="no", **settings,
    )  # fmt: skip
    arguments = RetrieverArguments("x", "x", num_negatives=2, temperature=0.05, **(options or {}))
    return retriever.build_trainer(model, args, rows, arguments, evaluator=evaluator)


def test_rows_of_a_plain_file_know_the_positives_of_their_query(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [
        {"query": "q", "pos": ["a"], "neg": ["n", "a"], "prompt": "ignored"},
        {"query": "q", "pos": ["b"], "neg": ["n"]},
        {"query": "r", "pos": ["n"], "neg": []},
    ])  # fmt: skip
    rows = retriever.load_rows(path)
    keys = {
        text: key
        for row in rows
        for part in ("pos", "neg")
        for text, key in zip(row[part], row[f"{part}_keys"], strict=True)
    }
    assert len(set(keys.values())) == 3
    assert rows[0]["known"] == rows[1]["known"] == sorted([keys["a"], keys["b"]])
    pairs = retriever.load_rows(path, one_row_per_negative=True)
    assert pairs["neg"][:] == [["n"], ["a"], ["n"]]


@pytest.mark.parametrize(
    "row",
    [{"pos": ["a"]}, {"query": "q", "pos": []}, {"query": "q", "pos": "a"}, {"query": "q", "pos": ["a"], "neg": [1]}],
)
def test_a_broken_row_is_refused_with_its_line(tmp_path, row):
    with pytest.raises(UserError, match="line 2"):
        retriever.load_rows(write_rows(tmp_path / "rows.jsonl", [{"query": "q", "pos": ["a"], "neg": ["b"]}, row]))
    with pytest.raises(UserError, match="no rows"):
        retriever.load_rows(write_rows(tmp_path / "empty.jsonl", []))


def test_draws_differ_by_epoch_and_not_by_batch(tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(8)))
    rows = rows.add_column("row", list(range(len(rows))))
    columns = retriever.RowColumns(num_negatives=3, seed=5, most_known=2)
    data = rows.with_transform(columns)
    first = [data[i] for i in range(8)]
    assert list(first[0]) == ["query", "positive", "negative_1", "negative_2", "negative_3", "label"]
    together = data[[6, 2]]
    assert {name: values[1] for name, values in together.items()} == first[2]
    columns.epoch = 1
    assert any(data[i] != first[i] for i in range(8))
    columns.epoch = 0
    assert [data[i] for i in range(8)] == first
    for row in first:
        assert row["label"][4:].count(-1) == 1 and row["positive"] not in (row["negative_1"], row["negative_2"])


def test_rows_without_negatives_are_refused_where_some_are_wanted(base, tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", [*rows_of(2), {"query": "q", "pos": ["a"]}]))
    with pytest.raises(UserError, match="1 rows have no negative"):
        trainer_for(base, tmp_path / "out", rows)


@pytest.mark.training
def test_a_trained_folder_gives_the_same_vectors_everywhere(base, tmp_path):
    from sentence_transformers import SentenceTransformer

    flag = pytest.importorskip("FlagEmbedding")
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(16)))
    trainer = trainer_for(base, tmp_path / "out", rows)
    untrained = Embedder.load(base, query_instruction=INSTRUCTION, device="cpu")
    before = untrained.encode_queries(rows["query"])
    trainer.train()
    folder = tmp_path / "saved"
    retriever.save_model(trainer.model, folder, None, rows["query"][:4])

    queries, texts = rows["query"][:], [row[0] for row in rows["pos"]]
    ours = Embedder.load(folder, device="cpu")
    assert (ours.query_instruction, ours.max_length, ours.pooling) == (INSTRUCTION, 48, untrained.pooling)
    assert ours.identity != untrained.identity
    vectors = ours.encode_queries(queries), ours.encode_documents(texts)
    assert (vectors[0] * before).sum(axis=1).max() < 0.999  # it learnt something

    plain = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    theirs = plain.encode_query(queries), plain.encode_document(texts)
    model = flag.FlagModel(
        str(folder),
        pooling_method=ours.pooling,
        query_instruction_for_retrieval=INSTRUCTION,
        use_fp16=False,
        devices="cpu",
    )
    flags = model.encode_queries(queries), model.encode_corpus(texts)
    for other in (theirs, flags):
        for a, b in zip(vectors, other, strict=True):
            assert np.min((a * b).sum(axis=1)) >= 0.9999


@pytest.mark.training
def test_a_resumed_run_gives_the_weights_of_an_unbroken_one(base, tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(8)))
    whole = trainer_for(base, tmp_path / "out", rows, save_strategy="steps", save_steps=3)
    whole.train()
    checkpoint = tmp_path / "out" / "checkpoint-3"  # in the second of four epochs
    assert retriever.last_checkpoint(tmp_path / "out").name == "checkpoint-8"
    resumed = trainer_for(base, tmp_path / "again", rows)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, tensor in whole.model.state_dict().items():
        assert torch.allclose(tensor, resumed.model.state_dict()[name], atol=1e-6), name


def test_a_cut_checkpoint_is_passed_over(tmp_path):
    for step, whole in ((2, True), (10, True), (11, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert retriever.last_checkpoint(tmp_path).name == "checkpoint-10"
    assert retriever.last_checkpoint(tmp_path / "absent") is None


def test_a_folder_is_never_resumed_as_another_run(tmp_path):
    retriever.start_run(tmp_path, {"seed": 1, "base": "x"})
    retriever.start_run(tmp_path, {"seed": 1, "base": "x"})
    with pytest.raises(UserError, match="another seed;"):
        retriever.start_run(tmp_path, {"seed": 2, "base": "x"})
    (tmp_path / "other" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "other" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match="another program"):
        retriever.start_run(tmp_path / "other", {"seed": 1})


def test_the_evaluator_finds_positives_among_all_texts(base, tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(16)))
    embedder = Embedder.load(base, device="cpu")
    evaluator = HeldOutEvaluator(rows)
    metrics = evaluator(embedder.model)
    documents = [row[0] for row in rows["pos"]]
    assert sorted(evaluator.corpus) == sorted(documents)
    scores = embedder.encode_queries(rows["query"]) @ embedder.encode_documents(documents).T
    hits = scores.argmax(axis=1) == np.arange(len(rows))
    assert metrics["strict_recall@1"] == metrics["recall@1"] == pytest.approx(np.mean(hits))
    places = 1 + (scores > np.diagonal(scores)[:, None]).sum(axis=1)
    assert metrics["mrr@10"] == pytest.approx(np.mean([1 / p if p <= 10 else 0 for p in places]), abs=1e-6)
    assert evaluator.primary_metric == "strict_recall@5"


def test_before_and_after_are_compared_query_by_query():
    before = {"strict_recall@5": [0.0] * 30 + [1.0] * 10}
    text = comparison(before, {"strict_recall@5": [1.0] * 40}, num_texts=99)
    assert "40 held-out queries, 99 texts" in text
    assert "| strict_recall@5 | 0.250 | 1.000 | +0.750 [" in text
    assert comparison(before, before, 99).endswith("| +0.000 [+0.000, +0.000] | 1.0000 |\n")


@pytest.mark.training
@pytest.mark.parametrize(
    "options", [{"cache_gradients": True}, {"max_chunk_tokens": 20}, {"cache_gradients": True, "max_chunk_tokens": 9}]
)
def test_chunks_and_cached_gradients_change_no_gradient(base, tmp_path, options):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(8)))
    found = []
    for given in ({}, options):
        trainer = trainer_for(base, tmp_path / "out", rows, given)
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        batch = next(iter(trainer.get_train_dataloader()))
        features, labels = trainer.collect_features(batch)
        loss = trainer.loss(features, labels)
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]))
    (loss, gradients), (other_loss, other_gradients) = found
    torch.testing.assert_close(loss, other_loss)
    assert len(gradients) == len(other_gradients) > 20
    for one, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.training
def test_dropout_is_the_same_when_activations_are_computed_again(base, tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(8)))
    whole = trainer_for(base, tmp_path / "a", rows, {"max_chunk_tokens": 20})
    whole.train()
    cached = trainer_for(base, tmp_path / "b", rows, {"max_chunk_tokens": 20, "cache_gradients": True})
    cached.train()
    for (name, one), other in zip(whole.model.state_dict().items(), cached.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.training
def test_an_adapter_is_merged_into_the_saved_model(base, tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(8)))
    model = Embedder.load(base, query_instruction=INSTRUCTION, device="cpu").model
    names = list(model.state_dict())
    retriever.add_adapter(model, 4)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    for parameter in trained:
        parameter.data.add_(0.02)
    model.eval()
    wanted = Embedder(model, base).encode_queries(rows["query"])
    retriever.merge_adapter(model)
    assert list(model.state_dict()) == names
    np.testing.assert_allclose(Embedder(model, base).encode_queries(rows["query"]), wanted, atol=1e-5)
    retriever.save_model(model, tmp_path / "saved", None, rows["query"][:4])


@pytest.mark.training
def test_a_teachers_scores_pull_towards_its_order(base, tmp_path):
    made = [{**row, "pos_scores": [1.0], "neg_scores": [0.0] * len(row["neg"])} for row in rows_of(8)]
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", made))
    loss = trainer_for(base, tmp_path / "out", rows, {"distillation_weight": 1.0}).train().training_loss
    assert loss > trainer_for(base, tmp_path / "out", rows).train().training_loss
    without = retriever.load_rows(write_rows(tmp_path / "plain.jsonl", rows_of(8)))
    with pytest.raises(UserError, match="distillation_weight needs rows with pos_scores"):
        trainer_for(base, tmp_path / "out", without, {"distillation_weight": 1.0})


@pytest.mark.parametrize("scores", [[1.0], ["a", "b"], [True, 1.0], "x"])
def test_scores_that_do_not_match_the_texts_are_refused(tmp_path, scores):
    path = write_rows(tmp_path / "rows.jsonl", [{"query": "q", "pos": ["a"], "neg": ["b", "c"], "neg_scores": scores}])
    with pytest.raises(UserError, match="line 1: `neg_scores` must have a number for each of 2 texts"):
        retriever.load_rows(path)


@pytest.mark.training
def test_the_best_checkpoint_and_an_early_stop_follow_strict_recall(base, tmp_path):
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(16)))
    trainer = trainer_for(
        base, tmp_path / "out", rows, evaluator=HeldOutEvaluator(rows), num_train_epochs=40, eval_strategy="epoch",
        save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="eval_strict_recall@1",
    )  # fmt: skip
    trainer.add_callback(early_stopping(2, trainer.args)[0])
    trainer.train()
    history = [entry["eval_strict_recall@1"] for entry in trainer.state.log_history if "eval_strict_recall@1" in entry]
    assert len(history) < 40
    assert max(history) == history[-3] == trainer.state.best_metric
    assert HeldOutEvaluator(rows)(trainer.model)["strict_recall@1"] == max(history)


@pytest.mark.training
def test_flagembeddings_own_trainer_learns_from_the_same_file(base, tmp_path):
    from sentence_transformers import SentenceTransformerTrainingArguments

    flag = pytest.importorskip("FlagEmbedding")
    rows = retriever.load_rows(write_rows(tmp_path / "rows.jsonl", rows_of(16)))
    embedder = Embedder.load(base, query_instruction=INSTRUCTION, device="cpu")
    evaluator = HeldOutEvaluator(rows)
    before = evaluator(embedder.model)["mrr@10"]
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), num_train_epochs=40, per_device_train_batch_size=8, learning_rate=1e-3,
        use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    arguments = RetrieverArguments("x", "x", num_negatives=7, temperature=0.1, max_length=48, trainer="flagembedding")
    metrics = flagembedding.train(embedder, rows, arguments, settings)
    assert metrics["train_loss"] > 0
    retriever.save_model(embedder.model, tmp_path / "saved", None, rows["query"][:4])
    tuned = Embedder.load(tmp_path / "saved", device="cpu")
    assert (tuned.pooling, tuned.query_instruction) == (embedder.pooling, INSTRUCTION)
    assert evaluator(tuned.model)["mrr@10"] > before
    theirs = flag.FlagModel(
        str(tmp_path / "out" / "flagembedding"), pooling_method=embedder.pooling,
        query_instruction_for_retrieval=INSTRUCTION, use_fp16=False, devices="cpu",
    )  # fmt: skip
    same = (theirs.encode_queries(rows["query"][:]) * tuned.encode_queries(rows["query"][:])).sum(axis=1)
    assert same.min() >= 0.9999
    with pytest.raises(UserError, match="lora_r is an option of trainer: samrag"):
        flagembedding.train(embedder, rows, RetrieverArguments("x", "x", lora_r=4), settings)


def test_mixing_back_the_base_is_linear(base):
    tuned, original = (Embedder.load(base, device="cpu").model for _ in range(2))
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(1)
    retriever.mix_weights(tuned, original, 0.25)
    for mixed, start in zip(tuned.parameters(), original.parameters(), strict=True):
        assert torch.allclose(mixed, start + 0.75, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0},
        {"max_length": 1},
        {"base_weight": 1.0},
        {"num_negatives": -1},
        {"one_row_per_negative": True},
        {"max_chunk_tokens": 0},
        {"distillation_weight": -1.0},
        {"early_stopping_patience": 0},
    ],
)
def test_impossible_arguments_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)) if "one_row" not in str(wrong) else "num_negatives is 7"):
        RetrieverArguments(base_model="quickstart", train_file="rows.jsonl", **wrong)


@pytest.mark.entry
@pytest.mark.training
@pytest.mark.parametrize("base", ["cls"], indirect=True)
def test_two_processes_learn_as_one_with_all_passages_as_negatives(base, tmp_path):
    certain = shutil.copytree(base, tmp_path / "base")  # without dropout, which draws differently on two processes
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = json.loads((certain / "config.json").read_text())
    (certain / "config.json").write_text(json.dumps({**config, **settings}))
    rows = write_rows(tmp_path / "rows.jsonl", rows_of(16))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def trained(folder, launcher, batch):
        config = {
            "base_model": str(certain), "train_file": str(rows), "output_dir": str(folder), "num_negatives": 2,
            "cache_gradients": True, "across_processes": True, "max_chunk_tokens": 40, "learning_rate": 1e-3,
            "per_device_train_batch_size": batch, "num_train_epochs": 2, "use_cpu": True, "report_to": "none",
            "save_strategy": "no", "logging_steps": 1, "temperature": 0.05,
        }  # fmt: skip
        path = tmp_path / f"{folder.name}.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, *launcher, str(ROOT / "train" / "retriever.py"), "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return Embedder.load(folder, device="cpu").encode_queries([row["query"] for row in rows_of(16)])

    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    one_process, two_processes = trained(tmp_path / "one", [], 8), trained(tmp_path / "two", two, 4)
    untrained = Embedder.load(base, device="cpu").encode_queries([row["query"] for row in rows_of(16)])
    moved = 1 - (one_process * untrained).sum(axis=1).mean()
    assert moved > 1e-3
    assert 1 - (one_process * two_processes).sum(axis=1).mean() < 1e-3 * moved
