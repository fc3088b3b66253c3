"""MultiModalQA: the original question, image and text files, plain or gzipped, as records.

Files: `MMQA_{train,dev,test}.jsonl.gz`, `MMQA_images.jsonl.gz`, `MMQA_texts.jsonl.gz` of allenai/multimodalqa.

Tables are left out by design: a document here is a paragraph or an image. A question over tables can be read, its
gold answers and question type are kept, but supports that are tables are dropped from its `support_ids`.
Pixels are not opened here; an image document only names its file.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from samrag.benchmarks.corpus import BadItemError, Quarantine, answer_bearing, distinct, leaves_folder, parse_line
from samrag.errors import UserError
from samrag.files import read_json_lines
from samrag.schema import Document, Modality, Question

SINGLE_HOP_TYPES = ("TextQ", "TableQ", "ImageQ", "ImageListQ")
"""Question types that one document or one table answers, by the official split into hops."""

MULTI_HOP_TYPES = (
    "Compare(Compose(TableQ,ImageQ),Compose(TableQ,TextQ))",
    "Compare(Compose(TableQ,ImageQ),TableQ)",
    "Compare(TableQ,Compose(TableQ,TextQ))",
    "Compose(ImageQ,TableQ)",
    "Compose(ImageQ,TextQ)",
    "Compose(TableQ,ImageListQ)",
    "Compose(TableQ,TextQ)",
    "Compose(TextQ,ImageListQ)",
    "Compose(TextQ,TableQ)",
    "Intersect(ImageListQ,TableQ)",
    "Intersect(ImageListQ,TextQ)",
    "Intersect(TableQ,TextQ)",
)

_ANSWERED_BY_SUPPORTS = ("TextQ", "ImageQ", "ImageListQ")


def _answer_text(value: object) -> str:
    """A gold answer as the official scorer takes it: `str()` of a string or a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"a string or a number is wanted, found {type(value).__name__}")
    return str(value)


_Id = Annotated[str, Field(min_length=1)]


class _Instance(BaseModel):
    """Where an answer stands."""

    doc_id: _Id


class _Answer(BaseModel):
    """One gold answer; the other fields of the file are not used."""

    answer: Annotated[str, BeforeValidator(_answer_text)]
    text_instances: list[_Instance] = []
    image_instances: list[_Instance] = []


class _Support(BaseModel):
    """One entry of `supporting_context`."""

    doc_id: _Id
    doc_part: Literal["text", "image", "table"]


class _Metadata(BaseModel):
    """A question's own list of documents, and its type where the split tells it."""

    image_doc_ids: list[_Id]
    text_doc_ids: list[_Id]
    type: str = ""


class _UnlabelledLine(BaseModel):
    """A line of the test split."""

    qid: _Id
    question: str
    metadata: _Metadata


class _LabelledLine(_UnlabelledLine):
    """A line of the train or dev split."""

    answers: list[_Answer] = Field(min_length=1)
    supporting_context: list[_Support]


class _ImageLine(BaseModel):
    """A line of the image file."""

    id: _Id
    title: str
    path: str
    url: str = ""


class _TextLine(BaseModel):
    """A line of the text file."""

    id: _Id
    title: str
    text: str
    url: str = ""


def read_questions(
    path: Path,
    split: str,
    types: Collection[str] | None = None,
    labelled: bool = True,
    quarantine: Quarantine | None = None,
) -> list[Question]:
    """Read a question file, in file order.

    `support_ids` holds the distinct text and image supports in file order (the files repeat some; tables are no
    documents here). `answer_bearing_ids` are the supports that an answer's instances name; where an answer of a TextQ,
    ImageQ or ImageListQ names none, all supports. An answer that stands in a table has no answer-bearing document.
    `candidate_ids` is the question's own list, images first, plus any support missing from it. `hops` is 1 for the
    single-hop types and where the split tells no type, else 2.

    Args:
        path: question file, plain or `.gz`.
        split: name written to the records, such as `dev`.
        types: question types to keep, such as `TextQ`; None keeps all.
        labelled: read answers, supports and their modalities. False reads none of them, present or not: the test
            split has none.
        quarantine: takes in bad lines; None refuses them.

    Raises:
        UserError: the file is missing or broken, a line has the wrong schema (the message names file, line and field),
            an id occurs twice, a type is unknown, or labels are wanted where there are none.
    """
    wanted = None if types is None else {types} if isinstance(types, str) else set(types)
    model = _LabelledLine if labelled else _UnlabelledLine
    quarantine = quarantine or Quarantine()
    questions = []
    seen_ids: set[str] = set()
    seen_types: set[str] = set()
    for number, value in read_json_lines(path):
        if labelled and "answers" not in value:
            raise UserError(
                f"{path}, line {number}, answers: missing, so the split {split!r} has no labels; use the dev split, "
                "or read it without labels (labelled=False)."
            )
        try:
            line = parse_line(model, path, number, value)
            if line.qid in seen_ids:
                raise BadItemError(f"{path}, line {number}, qid", f"{line.qid!r} occurs twice")
        except BadItemError as error:
            quarantine.add(error)
            continue
        kind = line.metadata.type
        if not kind and (labelled or wanted is not None):
            raise UserError(f"{path}, line {number}, metadata.type: missing, so questions cannot be chosen by type.")
        seen_ids.add(line.qid)
        seen_types.add(kind)
        if wanted is None or kind in wanted:
            questions.append(_question(line, split))
    unknown = (wanted or set()) - seen_types - {*SINGLE_HOP_TYPES, *MULTI_HOP_TYPES}
    if unknown:
        raise UserError(f"{sorted(unknown)[0]!r} is no question type; {path} has {', '.join(sorted(seen_types))}.")
    return questions


def read_documents(
    images_path: Path | None,
    texts_path: Path | None,
    image_folder: str = "images",
    quarantine: Quarantine | None = None,
) -> list[Document]:
    """Read the image and the text file as one list of documents, images first, each in file order.

    A line repeated word for word is read once.

    Args:
        images_path: image file (metadata), plain or `.gz`; None leaves images out.
        texts_path: text file, plain or `.gz`; None leaves texts out.
        image_folder: put before each image's own path, so that the result is relative to the folder of the documents
            file to be written; empty: the images lie in that folder itself.
        quarantine: takes in bad lines; None refuses them.

    Raises:
        UserError: neither file is given, one is missing or broken, a line has the wrong schema (the message names
            file, line and field), two different documents share an id, or an image path leaves its folder.
    """
    if images_path is None and texts_path is None:
        raise UserError("no document file is given; name the image file, the text file, or both.")
    folder = PurePosixPath(image_folder)
    if image_folder and leaves_folder(image_folder):
        raise UserError(f"the image folder {image_folder!r} leaves the data folder; name a folder inside it.")
    quarantine = quarantine or Quarantine()
    documents: dict[str, Document] = {}
    for source, read in ((images_path, functools.partial(_image, folder)), (texts_path, _text)):
        for number, value in () if source is None else read_json_lines(source):
            assert source is not None
            try:
                document = read(source, number, value)
                if documents.setdefault(document.doc_id, document) != document:
                    where = f"{source}, line {number}, id"
                    raise BadItemError(where, f"{document.doc_id!r} is another document's id too; ids must differ")
            except BadItemError as error:
                quarantine.add(error)
    return list(documents.values())


def _image(folder: PurePosixPath, path: Path, number: int, value: dict[str, Any]) -> Document:
    """The document of a line of the image file."""
    line = parse_line(_ImageLine, path, number, value)
    if not PurePosixPath(line.path).name or leaves_folder(line.path):
        raise BadItemError(f"{path}, line {number}, path", f"{line.path!r} names no file inside the image folder")
    return Document(line.id, Modality.IMAGE, line.title, image=str(folder / line.path), url=line.url)


def _text(path: Path, number: int, value: dict[str, Any]) -> Document:
    """The document of a line of the text file."""
    line = parse_line(_TextLine, path, number, value)
    return Document(line.id, Modality.TEXT, line.title, text=line.text, url=line.url)


def _question(line: _UnlabelledLine, split: str) -> Question:
    """The record of one line."""
    lists = line.metadata
    own = (*lists.image_doc_ids, *lists.text_doc_ids)
    question = Question(
        question_id=line.qid,
        question=line.question.strip(),
        answers=(),
        question_type=lists.type,
        split=split,
        candidate_ids=distinct(own),
        hops=1 if not lists.type or lists.type in SINGLE_HOP_TYPES else 2,
    )
    if not isinstance(line, _LabelledLine):
        return question
    supports = [support for support in line.supporting_context if support.doc_part != "table"]
    support_ids = distinct(support.doc_id for support in supports)
    return replace(
        question,
        answers=tuple(answer.answer for answer in line.answers),
        support_ids=support_ids,
        answer_bearing_ids=answer_bearing(support_ids, _named(line), lists.type in _ANSWERED_BY_SUPPORTS),
        candidate_ids=distinct((*own, *support_ids)),
        modalities=tuple(dict.fromkeys(Modality(support.doc_part) for support in supports)),
    )


def _named(line: _LabelledLine) -> list[set[str]]:
    """The documents in which each answer stands."""
    return [{place.doc_id for place in (*a.text_instances, *a.image_instances)} for a in line.answers]
