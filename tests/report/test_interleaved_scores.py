"""The script that scores interleaved answers: its files agree with the metrics, in every mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.evaluate_interleaved import evaluate
from samrag.benchmarks.rag_igbench import read_outputs, read_questions, samples_of
from samrag.errors import UserError
from samrag.files import read_json, read_records
from samrag.metrics.interleaved import Mode
from samrag.metrics.rag_igbench import Metric, SampleScore, score_samples, summarize
from samrag.replies import write_composition
from samrag.report.arguments import InterleavedEvaluationArguments
from samrag.retrieval.clip import ClipEncoder
from samrag.retrieval.embedder import Embedder
from samrag.schema import Language

GOLD = "Open the box.\n\n![box](IMG#1)\n\nLift the bowl.\n\n![bowl](IMG#3)"


def files(folder: Path) -> dict[str, Any]:
    """Four questions; one system that is right, one that fails in each way."""
    lines = [
        {
            "id": str(n),
            "query": "How?",
            "documents": ["Open.", "Lift."],
            "images": [["a.png", "b.png"], ["c.png"]],
            "gt_clean_answer": GOLD,
            "category": [("craft", "food")[n % 2], "how-to"],
            "split": "dev",
        }
        for n in range(4)
    ]
    bad = ["", "Look ![x](IMG#9)", "Lift the bowl. ![bowl](IMG#3) ![box](IMG#1)"]  # and none for the fourth
    outputs = {"good": [write_composition("r", "how-to", GOLD)] * 4, "bad": bad}
    written = {"questions": [json.dumps(line) for line in lines]}
    for name, answers in outputs.items():
        written[name] = [json.dumps({"id": str(n), "model_answer": answer}) for n, answer in enumerate(answers)]
    for name, texts in written.items():
        (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return {
        "data_file": str(folder / "questions.jsonl"),
        "language": Language.EN,
        "outputs": [f"{name}={folder / name}.jsonl" for name in outputs],
        "output_dir": str(folder / "out"),
    }


def test_every_file_agrees_with_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = InterleavedEvaluationArguments(**files(tmp_path))
    evaluate(arguments)
    metrics = read_json(tmp_path / "out" / "metrics.json")
    questions = read_questions(tmp_path / "questions.jsonl", Language.EN)
    for system, path in arguments.paths.items():
        samples = samples_of(questions, read_outputs(path))
        for mode in Mode:
            wanted = score_samples(samples, mode)
            assert read_records(tmp_path / "out" / "samples" / f"{system}.{mode}.jsonl", SampleScore) == wanted
            figures, summary = metrics["systems"][system][mode], summarize(wanted)
            assert {name: estimate["value"] for name, estimate in figures["means"].items()} == {
                metric: estimate.value for metric, estimate in summary.means.items()
            }
            assert set(figures["categories"]) == {"craft", "food", "how-to"}
            assert not {"alignment", "clip", "mean"} & set(figures["means"])
    bad = metrics["systems"]["bad"]["strict"]
    counts = ("n_total", "n_scored", "n_invalid", "n_hallucinated", "n_error")
    assert [bad[name] for name in counts] == [4, 1, 1, 1, 1]
    assert metrics["systems"]["bad"]["paper"]["means"]["image_f1"]["value"] == 1
    assert bad["means"]["image_f1"]["value"] == 0.25
    (edit,) = [row for row in metrics["comparisons"] if row["metric"] == "edit"]
    assert (edit["first"], edit["second"], edit["n"], edit["difference"]) == ("good", "bad", 4, -1.0)
    text = (tmp_path / "out" / "tables.md").read_text(encoding="utf-8")
    assert text.count("## ") == 7
    assert "| good | 4 | 4 | 0 | 0 | 0 | 100.0 [100.0, 100.0] |" in text
    assert "tables:" in capsys.readouterr().out


class Encoder:
    """All texts and images are alike."""

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        return np.ones((len(texts), 3))

    def encode_images(self, images: list[str]) -> np.ndarray:
        return np.ones((len(images), 3))

    encode_texts = encode_images


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Embedder, "load", lambda name: Encoder())
    monkeypatch.setattr(ClipEncoder, "load", lambda folder, root, batch_size: Encoder())


@pytest.mark.usefixtures("encoders")
def test_with_both_encoders_perfect_answers_have_a_mean_of_1(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").touch()
    named = {"text_encoder": "t", "image_encoder": "i", "image_root": str(tmp_path)}
    evaluate(InterleavedEvaluationArguments(**files(tmp_path), **named))
    good = read_json(tmp_path / "out" / "metrics.json")["systems"]["good"]["paper"]
    assert {name: estimate["value"] for name, estimate in good["means"].items()} == dict.fromkeys(map(str, Metric), 1)


@pytest.mark.usefixtures("encoders")
def test_missing_images_are_refused_or_their_questions_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    named = {"image_encoder": "i", "image_root": str(tmp_path)}
    given = files(tmp_path)
    path = tmp_path / "questions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        line |= {"images": [["a.png"], []], "gt_clean_answer": "Open. ![box](IMG#1)"}
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match="1 of 4 questions lack an image"):
        evaluate(InterleavedEvaluationArguments(**given, **named))
    evaluate(InterleavedEvaluationArguments(**given, **named, missing_images="leave_out"))
    metrics = read_json(tmp_path / "out" / "metrics.json")
    assert metrics["left_out"] == {"0": "c.png"}
    assert metrics["systems"]["good"]["strict"]["n_total"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": []}, "outputs is empty"),
        ({"outputs": ["../x=a"]}, "name=file is wanted"),
        ({"outputs": ["a=x", "a=y"]}, "every name must be another"),
        ({"image_encoder": "x"}, "need each other"),
        ({"level": 1.0}, "between 0 and 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InterleavedEvaluationArguments(**(files(tmp_path) | change))
