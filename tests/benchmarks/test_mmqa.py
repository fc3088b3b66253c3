"""The MultiModalQA reader: what becomes of labels, duplicates and tables, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from samrag.benchmarks.mmqa import MULTI_HOP_TYPES, SINGLE_HOP_TYPES, read_documents, read_questions
from samrag.errors import UserError
from samrag.schema import Modality, Question

REAL = os.environ.get("SAMRAG_MMQA_DIR", "")


def answer(text: str | float, texts: tuple[str, ...] = (), images: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "answer": text,
        "type": "string",
        "modality": "text",
        "text_instances": [{"doc_id": i, "part": "text"} for i in texts],
        "table_indices": [],
        "image_instances": [{"doc_id": i, "doc_part": "image"} for i in images],
    }


def line(**changes: Any) -> dict[str, Any]:
    metadata = {
        "type": "TextQ",
        "modalities": ["text"],
        "image_doc_ids": ["i1"],
        "text_doc_ids": ["t1", "t2"],
        "table_id": "b",
    }
    value = {
        "qid": "q1",
        "question": "Who founded the club?",
        "answers": [answer("Ann", texts=("t1",))],
        "metadata": metadata | changes.pop("metadata", {}),
        "supporting_context": [{"doc_id": "t1", "doc_part": "text"}],
    }
    return value | changes


def supports(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"doc_id": doc_id, "doc_part": part} for doc_id, part in pairs]


def write(path: Path, *values: Any) -> Path:
    text = "".join(json.dumps(value) + "\n" for value in values)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read_one(tmp_path: Path, **changes: Any) -> Question:
    (question,) = read_questions(write(tmp_path / "q.jsonl", line(**changes)), "dev")
    return question


# --- questions ---


def test_a_gzipped_file_reads_like_the_plain_one(tmp_path: Path) -> None:
    plain = read_questions(write(tmp_path / "q.jsonl", line()), "dev")
    assert read_questions(write(tmp_path / "q.jsonl.gz", line()), "dev") == plain
    assert plain == [
        Question(
            "q1",
            "Who founded the club?",
            ("Ann",),
            "TextQ",
            "dev",
            ("t1",),
            ("t1",),
            ("i1", "t1", "t2"),
            (Modality.TEXT,),
        )
    ]


def test_repeated_supports_are_kept_once_in_file_order(tmp_path: Path) -> None:
    question = read_one(tmp_path, supporting_context=supports(("t2", "text"), ("t1", "text"), ("t2", "text")))
    assert question.support_ids == ("t2", "t1")
    assert question.answer_bearing_ids == ("t1",)
    assert question.bridge_ids == ("t2",)


def test_tables_are_no_supports_and_give_no_modality(tmp_path: Path) -> None:
    question = read_one(tmp_path, supporting_context=supports(("b", "table"), ("i1", "image"), ("t1", "text")))
    assert question.support_ids == ("i1", "t1")
    assert question.modalities == (Modality.IMAGE, Modality.TEXT)
    assert "b" not in question.candidate_ids


def test_an_answer_in_a_table_has_no_answer_bearing_document(tmp_path: Path) -> None:
    question = read_one(tmp_path, metadata={"type": "Compose(TableQ,TextQ)"}, answers=[answer("7")])
    assert question.answer_bearing_ids == ()
    assert question.bridge_ids == ("t1",)


@pytest.mark.parametrize("kind", ["TextQ", "ImageQ", "ImageListQ"])
@pytest.mark.parametrize("named", [(), ("elsewhere",)])
def test_an_answer_that_names_no_support_makes_every_support_answer_bearing(
    tmp_path: Path, kind: str, named: tuple[str, ...]
) -> None:
    question = read_one(
        tmp_path,
        metadata={"type": kind},
        answers=[answer("Ann", texts=("t1",)), answer("Bob", texts=named)],
        supporting_context=supports(("t1", "text"), ("t2", "text")),
    )
    assert question.answer_bearing_ids == question.support_ids == ("t1", "t2")


def test_a_support_missing_from_the_own_list_becomes_a_candidate(tmp_path: Path) -> None:
    question = read_one(tmp_path, supporting_context=supports(("i9", "image"), ("t1", "text")))
    assert question.candidate_ids == ("i1", "t1", "t2", "i9")


def test_number_answers_are_the_text_the_official_scorer_takes(tmp_path: Path) -> None:
    assert read_one(tmp_path, answers=[answer(7.0), answer(1990), answer("yes ")]).answers == ("7.0", "1990", "yes ")


def test_only_the_single_hop_types_have_one_hop(tmp_path: Path) -> None:
    kinds = (*SINGLE_HOP_TYPES, *MULTI_HOP_TYPES)
    assert len(set(kinds)) == 16
    path = write(tmp_path / "q.jsonl", *(line(qid=kind, metadata={"type": kind}) for kind in kinds))
    assert {q.question_type: q.hops for q in read_questions(path, "dev")} == {
        kind: 1 if kind in SINGLE_HOP_TYPES else 2 for kind in kinds
    }


def test_types_select_whole_names_and_a_misspelt_type_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "q.jsonl",
        line(),
        line(qid="q2", metadata={"type": "ImageQ"}),
        line(qid="q3", metadata={"type": "Compose(TextQ,TableQ)"}),
    )
    assert [q.question_id for q in read_questions(path, "dev", types=("TextQ", "ImageQ"))] == ["q1", "q2"]
    assert [q.question_id for q in read_questions(path, "dev", types="TextQ")] == ["q1"]
    assert read_questions(path, "dev", types=("TableQ",)) == []
    with pytest.raises(UserError, match="'TextQA' is no question type"):
        read_questions(path, "dev", types=("TextQA",))


def unlabelled() -> dict[str, Any]:
    metadata = {"image_doc_ids": ["i1"], "text_doc_ids": ["t1"], "table_id": "b"}
    return {"qid": "q1", "question": "Who?", "metadata": metadata}


def test_a_split_without_labels_is_refused_when_labels_are_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", unlabelled())
    with pytest.raises(UserError, match=r"test\.jsonl, line 1, answers: .*'test' has no labels; use the dev split"):
        read_questions(path, "test")
    with pytest.raises(UserError, match=r"metadata\.type"):
        read_questions(path, "test", types=("TextQ",), labelled=False)


def test_a_split_without_labels_can_be_read_for_answering(tmp_path: Path) -> None:
    (question,) = read_questions(write(tmp_path / "test.jsonl", unlabelled()), "test", labelled=False)
    assert question == Question("q1", "Who?", (), "", "test", candidate_ids=("i1", "t1"))


def test_labels_are_not_read_unless_wanted(tmp_path: Path) -> None:
    (question,) = read_questions(write(tmp_path / "q.jsonl", line()), "dev", labelled=False)
    assert question.question_type == "TextQ"
    assert question.answers == question.support_ids == question.answer_bearing_ids == question.modalities == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"qid": 7}, "qid"),
        ({"qid": ""}, "qid"),
        ({"question": None}, "question"),
        ({"answers": []}, "answers"),
        ({"answers": ["Ann"]}, r"answers\.0"),
        ({"answers": [answer("Ann") | {"answer": None}]}, r"answers\.0\.answer: .*found NoneType"),
        ({"answers": [answer("Ann") | {"answer": True}]}, r"answers\.0\.answer: .*found bool"),
        ({"answers": [answer("Ann") | {"text_instances": [{}]}]}, r"answers\.0\.text_instances\.0\.doc_id"),
        ({"supporting_context": None}, "supporting_context"),
        ({"supporting_context": supports(("t1", "video"))}, r"supporting_context\.0\.doc_part"),
        ({"metadata": {"text_doc_ids": "t1"}}, r"metadata\.text_doc_ids"),
        ({"metadata": {"image_doc_ids": [3]}}, r"metadata\.image_doc_ids\.0"),
        ({"metadata": {"type": ""}}, r"metadata\.type"),
    ],
)
def test_a_wrong_schema_is_refused_with_file_line_and_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    path = write(tmp_path / "q.jsonl", line(qid="first"), line(**changes))
    with pytest.raises(UserError, match=rf"q\.jsonl, line 2, {field}"):
        read_questions(path, "dev")


def test_a_question_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 2, qid: 'q1' occurs twice"):
        read_questions(write(tmp_path / "q.jsonl", line(), line()), "dev")


# --- documents ---

IMAGE = {"title": "Emblem", "url": "u", "id": "i1", "path": "i1.png"}
TEXT = {"title": "Club", "url": "u", "id": "t1", "text": "Ann founded it."}


def test_documents_are_images_then_texts_with_the_prefix_before_the_path(tmp_path: Path) -> None:
    images, texts = write(tmp_path / "i.jsonl.gz", IMAGE), write(tmp_path / "t.jsonl", TEXT)
    image, text = read_documents(images, texts, "final_dataset_images")
    assert (image.doc_id, image.modality, image.image) == ("i1", Modality.IMAGE, "final_dataset_images/i1.png")
    assert (text.doc_id, text.modality, text.text, text.image) == ("t1", Modality.TEXT, "Ann founded it.", None)
    assert read_documents(images, None, "final_dataset_images") == [image]
    assert read_documents(None, texts) == [text]
    assert read_documents(images, None, "")[0].image == "i1.png"


@pytest.mark.parametrize(
    "path", ["/etc/a.png", "../a.png", "x/../../a.png", "C:\\a.png", "..\\a.png", "", ".", "a\0.png"]
)
def test_an_image_path_that_leaves_its_folder_is_refused(tmp_path: Path, path: str) -> None:
    images = write(tmp_path / "i.jsonl", IMAGE, IMAGE | {"id": "i2", "path": path})
    with pytest.raises(UserError, match=r"i\.jsonl, line 2, path"):
        read_documents(images, None)


@pytest.mark.parametrize("folder", ["/images", "../images"])
def test_an_image_folder_outside_the_data_folder_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(UserError, match="leaves the data folder"):
        read_documents(write(tmp_path / "i.jsonl", IMAGE), None, folder)


def test_one_id_for_two_documents_is_refused_and_a_repeated_line_is_not(tmp_path: Path) -> None:
    repeated = write(tmp_path / "t.jsonl", TEXT, TEXT)
    assert len(read_documents(None, repeated)) == 1
    with pytest.raises(UserError, match=r"t\.jsonl, line 1, id: 't1'"):
        read_documents(write(tmp_path / "i.jsonl", IMAGE | {"id": "t1"}), repeated)


def test_a_wrong_document_line_is_refused_with_file_line_and_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"t\.jsonl, line 1, text: Field required"):
        read_documents(None, write(tmp_path / "t.jsonl", IMAGE))
    with pytest.raises(UserError, match="no document file"):
        read_documents(None, None)


# --- the real files, where they are at hand ---

real_files = pytest.mark.skipif(not REAL, reason="set SAMRAG_MMQA_DIR to the folder of the MultiModalQA files")


@real_files
def test_real_dev_questions_have_the_published_counts() -> None:
    questions = read_questions(Path(REAL) / "MMQA_dev.jsonl.gz", "dev")
    types = Counter(question.question_type for question in questions)
    assert len(questions) == 2441
    assert len(types) == 16
    assert set(types) == {*SINGLE_HOP_TYPES, *MULTI_HOP_TYPES}
    assert (types["TextQ"], types["TableQ"], types["ImageQ"]) == (721, 369, 230)
    text = [question for question in questions if question.question_type == "TextQ"]
    assert sum(len(question.support_ids) for question in text) == 1056
    assert sum(len(question.answer_bearing_ids) for question in text) == 838
    assert sum(bool(question.bridge_ids) for question in text) == 218
    assert all(set(question.support_ids) <= set(question.candidate_ids) for question in questions)


@real_files
def test_real_textq_supports_repeat_in_43_questions_and_not_after_reading() -> None:
    path = Path(REAL) / "MMQA_dev.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        raw = {value["qid"]: len(value["supporting_context"]) for value in map(json.loads, handle)}
    read = {
        question.question_id: len(question.support_ids) for question in read_questions(path, "dev", types=("TextQ",))
    }
    assert sum(raw[question_id] > count for question_id, count in read.items()) == 43


@real_files
def test_real_dev_images_are_all_in_the_image_file() -> None:
    questions = read_questions(Path(REAL) / "MMQA_dev.jsonl.gz", "dev")
    documents = read_documents(Path(REAL) / "MMQA_images.jsonl.gz", None)
    images = {document.doc_id for document in documents}
    assert len(images) == 57058
    with gzip.open(Path(REAL) / "MMQA_dev.jsonl.gz", "rt", encoding="utf-8") as handle:
        dev_images = {i for value in map(json.loads, handle) for i in value["metadata"]["image_doc_ids"]}
    assert len(dev_images) == 11867
    assert dev_images <= images
    assert dev_images <= {i for question in questions for i in question.candidate_ids}
