"""Your own data: what becomes of files, defaults and splits; every bad item is refused or set aside by name."""

from __future__ import annotations

import csv
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from samrag.benchmarks.corpus import Quarantine, SetAside
from samrag.benchmarks.folder import SplitPlan, read_documents, read_questions
from samrag.errors import UserError
from samrag.files import read_json, read_records
from samrag.schema import Document, Modality, Question

PLAN = SplitPlan(["train", "dev"], [0.8, 0.2])


def write_lines(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def question(**changes: Any) -> dict[str, Any]:
    return {"id": "q1", "question": "What colour is the kite?", "answers": ["red"], "supports": ["kite.png"]} | changes


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Two texts, two images, one question."""
    folder = tmp_path / "own"
    (folder / "images" / "trips").mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(folder / "images" / "kite.png")
    Image.new("RGB", (8, 8), "blue").save(folder / "images" / "trips" / "the_old-boat.png")
    (folder / "images" / ".hidden").write_text("no image")
    write_lines(folder / "texts.jsonl", {"id": "t1", "text": "Ann flew a kite."}, {"id": 2, "text": "B", "title": "Bo"})
    write_lines(folder / "questions.jsonl", question())
    return folder


def read(folder: Path, on_bad: str = "error", plan: SplitPlan = PLAN) -> tuple[list[Document], list[Question], list]:
    quarantine = Quarantine(on_bad)
    documents = read_documents(folder, quarantine)
    return documents, read_questions(folder, documents, plan, quarantine), quarantine.items


def test_ids_titles_and_types_have_sensible_defaults(own: Path) -> None:
    documents, (only,), _ = read(own)
    assert [(d.doc_id, d.title, d.image) for d in documents] == [
        ("kite.png", "kite", "kite.png"),
        ("trips/the_old-boat.png", "the old boat", "trips/the_old-boat.png"),
        ("t1", "Ann flew a kite.", None),
        ("2", "Bo", None),
    ]
    assert only.question_type == "ImageQ" and only.modalities == (Modality.IMAGE,) and only.hops == 1
    assert only.support_ids == only.answer_bearing_ids == ("kite.png",)


def test_a_file_of_titles_renames_images(own: Path) -> None:
    write_csv(own / "images.csv", {"path": "trips/the_old-boat.png", "id": "boat", "title": "Boat", "url": "http://x"})
    documents, _, _ = read(own)
    assert documents[1] == Document("boat", Modality.IMAGE, "Boat", image="trips/the_old-boat.png", url="http://x")


@pytest.mark.parametrize("answers", ["red|blue", '["red", "blue"]', " red | blue "])
def test_csv_and_jsonl_give_the_same_records(own: Path, answers: str) -> None:
    write_lines(own / "questions.jsonl", question(answers=["red", "blue"], supports=["kite.png", "t1"]))
    write_lines(own / "texts.jsonl", {"id": "t1", "text": 'Two\nlines, "quoted"'})
    expected = read(own)
    for stem in ("questions", "texts"):
        (own / f"{stem}.jsonl").unlink()
    write_csv(own / "questions.csv", question(answers=answers, supports="kite.png|t1"))
    write_csv(own / "texts.csv", {"id": "t1", "text": 'Two\nlines, "quoted"'})
    assert read(own) == expected
    assert expected[1][0].question_type == "MixedQ"


def test_answer_in_divides_the_supports_into_answer_bearing_ones_and_bridges(own: Path) -> None:
    write_lines(own / "questions.jsonl", question(supports=["t1", "kite.png"], answer_in="kite.png"))
    _, (only,), _ = read(own)
    assert only.answer_bearing_ids == ("kite.png",) and only.bridge_ids == ("t1",) and only.hops == 2


class TestSplits:
    def many(self, own: Path, **extra: Any) -> None:
        rows = [question(id=f"q{i}", question=f"What colour is kite {i // 2}?", **extra) for i in range(40)]
        write_lines(own / "questions.jsonl", *rows)

    def test_a_draw_keeps_the_shares_and_equal_words_together(self, own: Path) -> None:
        self.many(own)
        _, questions, _ = read(own)
        train, dev = ({q.question for q in questions if q.split == split} for split in ("train", "dev"))
        assert (len(train), len(dev)) == (16, 4) and not train & dev

    def test_a_draw_depends_on_the_seed_and_not_on_the_order(self, own: Path) -> None:
        def splits(seed: int) -> dict[str, str]:
            return {q.question_id: q.split for q in read(own, plan=SplitPlan(["train", "dev"], [1, 1], seed))[1]}

        self.many(own)
        first, other = splits(0), splits(1)
        lines = (own / "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (own / "questions.jsonl").write_text("".join(reversed(lines)), encoding="utf-8")
        assert splits(0) == first != other

    def test_the_file_s_own_splits_are_kept_and_others_named(self, own: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="samrag")
        rows = [question(id=str(i), split=split) for i, split in enumerate(["dev", "train", "test"])]
        write_lines(own / "questions.jsonl", *rows)
        assert [q.split for q in read(own)[1]] == ["dev", "train", "test"]
        assert "not taken: 1 of 'test'" in caplog.text

    def test_a_question_without_a_split_among_others_with_one(self, own: Path) -> None:
        write_lines(own / "questions.jsonl", question(split="train"), question(id="q2"))
        with pytest.raises(UserError, match=r"question 'q2': no split, although others have one"):
            read(own)

    @pytest.mark.parametrize("shares", [[1.0], [0.5, 0.0], [1, 1, 1]])
    def test_shares_that_do_not_fit(self, own: Path, shares: list[float]) -> None:
        with pytest.raises(UserError, match="split_shares"):
            read(own, plan=SplitPlan(["train", "dev"], shares))


BAD_QUESTIONS = {
    "an empty id": (question(id=" "), r"line 2, id: "),
    "no id": ({k: v for k, v in question().items() if k != "id"}, "line 2, id: Field required"),
    "a duplicate id": (question(), "line 2, question 'q1': the id belongs to another question"),
    "an unknown support": (question(id="q2", supports=["no"]), "line 2, question 'q2': its support 'no' is not among"),
    "no support": (question(id="q2", supports=[]), "line 2, supports: "),
    "no answer": (question(id="q2", answers=""), "line 2, answers: "),
    "an empty answer": (question(id="q2", answers=["red", " "]), r"line 2, answers.1: "),
    "an answer of another type": (question(id="q2", answers=[True]), r"line 2, answers.0: "),
    "an answer elsewhere": (question(id="q2", answer_in=["t1"]), "line 2, question 'q2': answer_in names 't1'"),
    "half a character": (question(id="q2", question="\ud83d?"), "line 2: a lone surrogate"),
}


@pytest.mark.parametrize(("row", "message"), BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
def test_a_bad_question_is_refused_or_set_aside_by_file_and_line(own: Path, row: dict[str, Any], message: str) -> None:
    write_lines(own / "questions.jsonl", question(), row)
    with pytest.raises(UserError, match=f"questions.jsonl, {message}") as refused:
        read(own)
    assert "on_bad: quarantine" in str(refused.value)
    _, questions, (item,) = read(own, "quarantine")
    assert [q.question_id for q in questions] == ["q1"]
    assert str(refused.value).startswith(f"{item.item}: {item.reason}")


def gif(path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(path, save_all=True, append_images=[Image.new("RGB", (4, 4), "blue")])


BAD_IMAGES = {
    "no image": (lambda path: path.write_bytes(b"<html>404</html>"), "corrupt"),
    "cut off": (lambda path: path.write_bytes((path.parent / "kite.png").read_bytes()[:-30]), "corrupt"),
    "animated": (gif, "animated: 2 frames.*animated: first_frame"),
    "32 bits": (lambda path: Image.fromarray(np.zeros((2, 2), np.float32)).save(path, "TIFF"), "no fixed brightness"),
    "a dead link": (lambda path: path.symlink_to(path.parent / "nowhere"), "missing"),
    "a linked folder": (lambda path: path.symlink_to(path.parent / "trips"), "link to a folder"),
    "a link out": (lambda path: path.symlink_to(path.parents[1] / "texts.jsonl"), "leaves the folder"),
}


@pytest.mark.parametrize(("make", "message"), BAD_IMAGES.values(), ids=BAD_IMAGES)
def test_a_bad_image_is_refused_or_set_aside_with_the_questions_that_need_it(
    own: Path, make: Any, message: str
) -> None:
    make(own / "images" / "z.gif")
    write_lines(own / "questions.jsonl", question(), question(id="q2", supports=["t1", "z.gif"]))
    with pytest.raises(UserError, match=rf"z\.gif: .*{message}"):
        read(own)
    documents, questions, items = read(own, "quarantine")
    assert "z.gif" not in {d.doc_id for d in documents} and [q.question_id for q in questions] == ["q1"]
    assert [item.item.rpartition("/")[2] for item in items] == ["z.gif", "questions.jsonl, line 2, question 'q2'"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"path": "../texts.jsonl"}, r"line 1: the path '\.\./texts\.jsonl' leaves"),
        ({"path": "/etc/hostname"}, "line 1: the path '/etc/hostname' leaves"),
        ({"path": "no.png"}, "line 1: there is no file 'no.png'"),
        ({"path": "kite.png", "id": "t1"}, None),
    ],
)
def test_a_bad_line_of_the_file_of_titles(own: Path, row: dict[str, Any], message: str | None) -> None:
    write_lines(own / "images.jsonl", row)
    with pytest.raises(UserError, match=message or r"texts\.jsonl, line 1: the id 't1' belongs to another"):
        read(own)


class TestFiles:
    def test_text_that_is_not_utf8(self, own: Path) -> None:
        for name, content in (
            ("texts.jsonl", b'{"id": "x", "text": "caf\xe9"}\n'),
            ("texts.csv", b"id,text\nx,caf\xe9\n"),
        ):
            (own / "texts.jsonl").unlink(missing_ok=True)
            (own / name).write_bytes(content)
            with pytest.raises(UserError, match=rf"{name}.*not UTF-8"):
                read(own)

    def test_a_line_that_is_no_json(self, own: Path) -> None:
        (own / "questions.jsonl").write_text('{"id": "q1"\n', encoding="utf-8")
        with pytest.raises(UserError, match=r"questions\.jsonl, line 1: not valid JSON"):
            read(own)

    def test_two_files_of_the_same_records(self, own: Path) -> None:
        write_csv(own / "texts.csv", {"id": "a", "text": "b"})
        with pytest.raises(UserError, match=r"both texts\.jsonl and texts\.csv"):
            read(own)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("id,text\na,b,c\n", "line 2: 3 cells under 2 columns"),
            ("id,text\na\n", "line 2: 1 cells under 2 columns"),
            ("id,id\na,b\n", "line 1: every column"),
            ("id,,text\na,b,c\n", "line 1: every column"),
            ('id,text\na,"b\n', "not valid CSV"),
            ("id\na\n", "line 1: the header has no column 'text', but 'id'"),
            ("id;text\na;b\n", "columns are separated by commas"),
        ],
    )
    def test_a_csv_file_that_is_none(self, own: Path, text: str, message: str) -> None:
        (own / "texts.jsonl").unlink()
        (own / "texts.csv").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=rf"texts\.csv.*{message}"):
            read(own)

    def test_columns_that_are_not_used_are_named(self, own: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_lines(own / "questions.jsonl", question(suports=["t1"], notes="x"))
        read(own)
        assert "not used: notes, suports" in caplog.text

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no usable document; put texts in texts\.jsonl"):
            read(tmp_path)

    def test_no_questions(self, own: Path) -> None:
        (own / "questions.jsonl").unlink()
        with pytest.raises(UserError, match=r"no questions\.jsonl or questions\.csv"):
            read(own)


class TestPrepare:
    """The stage, as a user runs it."""

    def prepare(self, own: Path, run_script: Any, *more: object) -> Any:
        flags = ["--benchmark", "folder", "--data_dir", own, "--output_dir", own.parent / "data", *more]
        return run_script("data_gen/prepare.py", *flags)

    def test_records_and_quarantine_lie_beside_one_another(self, own: Path, run_script: Any) -> None:
        (own / "images" / "broken.png").write_bytes(b"")
        write_lines(own / "questions.jsonl", question(split="train"), question(id="q2", split="dev"))
        outcome = self.prepare(own, run_script)
        assert outcome.code == 2 and "broken.png: corrupt" in outcome.err and "Traceback" not in outcome.err
        outcome = self.prepare(own, run_script, "--on_bad", "quarantine")
        assert outcome.code == 0 and "left out: 1 items" in outcome.log
        for split, question_id in (("train", "q1"), ("dev", "q2")):
            folder = own.parent / "data" / split
            assert [q.question_id for q in read_records(folder / "questions.jsonl", Question)] == [question_id]
            assert len(read_records(folder / "documents.jsonl", Document)) == 4
            (item,) = read_records(folder / "quarantine.jsonl", SetAside)
            assert item.item.endswith("broken.png") and item.reason.startswith("corrupt")
        again = self.prepare(own, run_script, "--on_bad", "quarantine")
        assert "up to date" in again.log
        assert len(read_json(own.parent / "data" / "run.json")["inputs"]) == 3

    def test_a_changed_image_is_a_changed_input(self, own: Path, run_script: Any) -> None:
        write_lines(own / "questions.jsonl", question(split="train"), question(id="q2", split="dev"))
        self.prepare(own, run_script)
        shutil.copy(own / "images" / "kite.png", own / "images" / "other.png")
        assert "up to date" not in self.prepare(own, run_script).log

    def test_a_split_without_questions(self, own: Path, run_script: Any) -> None:
        outcome = self.prepare(own, run_script)
        assert outcome.code == 2 and "no usable question for the split" in outcome.err
