"""RAG-IGBench's files: both releases, both languages, and every bad line named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from samrag.benchmarks.corpus import Quarantine
from samrag.benchmarks.rag_igbench import image_path, read_outputs, read_questions, samples_of
from samrag.errors import UserError
from samrag.files import read_records, write_records
from samrag.metrics.rag_igbench import Metric, Outcome, score_samples
from samrag.schema import InterleavedQuestion, Language, Modality

URL = "https://images.example.org/a/b.PNG?width=720"
POTTERY: dict[str, Any] = {
    "id": "17",
    "query": " How is a bowl thrown? ",
    "documents": ["Centre the clay.", "Open it, then lift the wall.", "Dry it slowly."],
    "images": [["clay.jpg"], [URL, "steps/wall.png"], []],
    "gt_raw_answer": "not read",
    "gt_clean_answer": "Centre it.<sup>[1](DOC#1)</sup>\n\n![clay](IMG#1)\n\nLift the wall.\n\n![wall](IMG#3)",
    "category": ["craft", "how-to"],
    "split": "train",
}
CHINESE = {
    **POTTERY,
    "id": 18,
    "query": "\u600e\u4e48\u62c9\u576f\uff1f",
    "gt_clean_answer": "\u5148\u627e\u4e2d\u5fc3\u3002![\u6ce5](IMG#1)",
    "split": "dev",
}


def without(line: dict[str, Any], *fields: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in fields} | more


def written(folder: Path, *lines: dict[str, Any], name: str = "RAG_IG_EN.json") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def read_one(folder: Path, line: dict[str, Any]) -> InterleavedQuestion:
    (question,) = read_questions(written(folder, line), Language.EN)
    return question


def test_a_line_becomes_a_question_with_numbered_texts_and_images(tmp_path: Path) -> None:
    question = read_one(tmp_path, POTTERY)
    assert (question.question_id, question.question) == ("17", "How is a bowl thrown?")
    assert (question.topic, question.question_type, question.split) == ("craft", "how-to", "train")
    assert [d.doc_id for d in question.documents] == [
        *("17/doc-1", "17/img-1", "17/doc-2", "17/img-2", "17/img-3", "17/doc-3"),
    ]
    assert [d.text for d in question.texts] == POTTERY["documents"]
    assert [d.image for d in question.images] == ["clay.jpg", image_path(URL), "steps/wall.png"]
    assert [d.url for d in question.images] == ["", URL, ""]
    assert all(d.modality is Modality.IMAGE for d in question.images)
    assert question.reference == POTTERY["gt_clean_answer"]


@pytest.mark.parametrize("name", ["RAG_IG_CH.jsonl", "RAG_IG_EN.json", "anything"])
def test_the_files_hold_one_object_a_line_whatever_they_are_called(tmp_path: Path, name: str) -> None:
    questions = read_questions(written(tmp_path, POTTERY, CHINESE, name=name), Language.ZH)
    assert [(q.question_id, q.language) for q in questions] == [("17", Language.ZH), ("18", Language.ZH)]
    assert questions[1].question == CHINESE["query"]
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert read_questions(packed, Language.ZH) == questions


def test_the_older_field_name_is_read_and_the_newer_one_wins(tmp_path: Path) -> None:
    old = without(POTTERY, "gt_clean_answer", "split", gt_answer="Old.")
    question = read_one(tmp_path, old)
    assert (question.reference, question.split) == ("Old.", "")
    assert read_one(tmp_path, without(POTTERY, gt_answer="Old.")).reference == POTTERY["gt_clean_answer"]


def test_a_split_can_be_chosen(tmp_path: Path) -> None:
    path = written(tmp_path, POTTERY, CHINESE)
    assert [q.question_id for q in read_questions(path, Language.EN, "dev")] == ["18"]
    with pytest.raises(UserError, match="no usable question of split 'test'; its splits are train, dev"):
        read_questions(path, Language.EN, "test")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (without(POTTERY, "query"), "line 2, query: Field required"),
        (without(POTTERY, query=""), "line 2, query: "),
        (without(POTTERY, id=""), "line 2, id: "),
        (without(POTTERY, id=True), "line 2, id: "),
        (without(POTTERY, documents=[]), "line 2, documents: "),
        (without(POTTERY, images=[["a.jpg"]]), "3 documents and 1 lists of images"),
        (without(POTTERY, images="a.jpg"), "line 2, images: "),
        (without(POTTERY, images=[[""], [], []]), "line 2, images.0.0: "),
        (without(POTTERY, "gt_clean_answer"), "neither gt_clean_answer nor gt_answer"),
        (without(POTTERY, gt_clean_answer="![x](IMG#4)"), r"line 2, gold answer: !\[x\]\(IMG#4\) shows none of its 3"),
        (without(POTTERY, gt_clean_answer="![x](IMG#0)"), "line 2, gold answer: "),
        (without(POTTERY, gt_clean_answer="![x](a.png)"), "line 2, gold answer: "),
        (without(POTTERY, category=["craft"]), "line 2, category: "),
        (without(POTTERY, query="half \ud83d of a character"), "line 2: a lone surrogate"),
        (without(POTTERY, id="1"), "line 2, id: '1' occurs twice"),
        (without(POTTERY, images=[["../a.jpg"], [], []]), r"line 2, images: '\.\./a\.jpg' is no URL"),
        (without(POTTERY, images=[["/etc/a.jpg"], [], []]), "line 2, images: "),
        (without(POTTERY, images=[["C:\\a.jpg"], [], []]), "line 2, images: "),
        (without(POTTERY, images=[["file:///etc/passwd"], [], []]), "line 2, images: "),
        (without(POTTERY, images=[["a\0.jpg"], [], []]), "line 2, images: "),
        (without(POTTERY, images=[["."], [], []]), "line 2, images: "),
    ],
)
def test_a_bad_line_is_named_or_set_aside(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    path = tmp_path / "RAG_IG_EN.json"
    path.write_text("\n".join(json.dumps(item) for item in (without(POTTERY, id="1"), line)), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_questions(path, Language.EN)
    quarantine = Quarantine("quarantine")
    assert [q.question_id for q in read_questions(path, Language.EN, quarantine=quarantine)] == ["1"]
    assert len(quarantine.items) == 1


def test_a_file_that_is_no_data_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1: a JSON object is wanted, found list"):
        read_questions(written(tmp_path, [POTTERY]), Language.EN)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no usable question; it has none at all"):
        read_questions(written(tmp_path), Language.EN)
    with pytest.raises(UserError, match="does not exist"):
        read_questions(tmp_path / "none.json", Language.EN)


def test_an_image_gets_a_safe_name_that_depends_on_its_url_alone() -> None:
    assert image_path(URL) == image_path(URL) != image_path(URL + "0")
    assert image_path(URL).endswith(".png")
    for url in (
        "https://a.org/x",
        "https://a.org/x.exe",
        "https://a.org/../../x.jpg",
        "http://a.org/%2e%2e/x",
        "http://[x",
    ):
        assert image_path(url).endswith(".jpg")
        assert set(image_path(url)) <= set("0123456789abcdef.jpg")


def test_records_survive_a_file(tmp_path: Path) -> None:
    questions = read_questions(written(tmp_path, POTTERY, CHINESE), Language.EN)
    write_records(tmp_path / "questions.jsonl", questions)
    assert read_records(tmp_path / "questions.jsonl", InterleavedQuestion) == questions


# --- outputs ---


def test_outputs_are_put_beside_gold_and_a_missing_one_is_counted(tmp_path: Path) -> None:
    questions = read_questions(written(tmp_path, POTTERY, CHINESE), Language.EN)
    outputs = written(tmp_path, {"id": 17, "model_answer": POTTERY["gt_clean_answer"], "query": "q"}, name="out.jsonl")
    scored, missing = score_samples(samples_of(questions, read_outputs(outputs)))
    assert scored.values[Metric.KENDALL] == scored.values[Metric.ROUGE1] == 1
    assert scored.categories == ("craft", "how-to")
    assert (missing.outcome, missing.detail) == (Outcome.ERROR, "no output")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"id": "1", "model_answer": "a"}, {"id": 1, "model_answer": "b"}], "line 2, id: '1' occurs twice"),
        ([{"id": "1", "model_answer": None}], "line 1, model_answer: "),
        ([{"model_answer": "a"}], "line 1, id: "),
    ],
)
def test_a_bad_output_file_is_named(tmp_path: Path, lines: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_outputs(written(tmp_path, *lines))


def test_an_output_of_another_split_is_an_error(tmp_path: Path) -> None:
    questions = read_questions(written(tmp_path, POTTERY), Language.EN)
    with pytest.raises(UserError, match="'99' belongs to no question"):
        samples_of(questions, {"17": "a", "99": "b"})
