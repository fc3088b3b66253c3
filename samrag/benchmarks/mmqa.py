"""MultiModalQA: the original question, image and text files, plain or gzipped, as records.

Files: `MMQA_{train,dev,test}.jsonl.gz`, `MMQA_images.jsonl.gz`, `MMQA_texts.jsonl.gz` of allenai/multimodalqa.

Tables are left out by design: a document here is a paragraph or an image. A question over tables can be read, its
gold answers and question type are kept, but supports that are tables are dropped from its `support_ids`.
Pixels are not opened here; an image document only names its file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

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


Line = TypeVar("Line", bound=BaseModel)


def read_questions(
    path: Path, split: str, types: Collection[str] | None = None, labelled: bool = True
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

    Raises:
        UserError: the file is missing or broken, a line has the wrong schema (the message names file, line and field),
            an id occurs twice, a type is unknown, or labels are wanted where there are none.
    """
    wanted = None if types is None else {types} if isinstance(types, str) else set(types)
    model = _LabelledLine if labelled else _UnlabelledLine
    questions = []
    seen_ids: set[str] = set()
    seen_types: set[str] = set()
    for number, value in read_json_lines(path):
        if labelled and "answers" not in value:
            raise UserError(
                f"{path}, line {number}, answers: missing, so the split {split!r} has no labels; use the dev split, "
                "or read it without labels (labelled=False)."
            )
        line = _parse(model, path, number, value)
        kind = line.metadata.type
        if not kind and (labelled or wanted is not None):
            raise UserError(f"{path}, line {number}, metadata.type: missing, so questions cannot be chosen by type.")
        if line.qid in seen_ids:
            raise UserError(f"{path}, line {number}, qid: {line.qid!r} occurs twice; remove one of its lines.")
        seen_ids.add(line.qid)
        seen_types.add(kind)
        if wanted is None or kind in wanted:
            questions.append(_question(line, split))
    unknown = (wanted or set()) - seen_types - {*SINGLE_HOP_TYPES, *MULTI_HOP_TYPES}
    if unknown:
        raise UserError(f"{sorted(unknown)[0]!r} is no question type; {path} has {', '.join(sorted(seen_types))}.")
    return questions


def read_documents(images_path: Path | None, texts_path: Path | None, image_folder: str = "images") -> list[Document]:
    """Read the image and the text file as one list of documents, images first, each in file order.

    A line repeated word for word is read once.

    Args:
        images_path: image file (metadata), plain or `.gz`; None leaves images out.
        texts_path: text file, plain or `.gz`; None leaves texts out.
        image_folder: put before each image's own path, so that the result is relative to the folder of the documents
            file to be written; empty: the images lie in that folder itself.

    Raises:
        UserError: neither file is given, one is missing or broken, a line has the wrong schema (the message names
            file, line and field), two different documents share an id, or an image path leaves its folder.
    """
    if images_path is None and texts_path is None:
        raise UserError("no document file is given; name the image file, the text file, or both.")
    folder = PurePosixPath(image_folder)
    if image_folder and _leaves_folder(image_folder):
        raise UserError(f"the image folder {image_folder!r} leaves the data folder; name a folder inside it.")
    documents: dict[str, Document] = {}
    for source, number, document in (*_images(images_path, folder), *_texts(texts_path)):
        if documents.setdefault(document.doc_id, document) != document:
            raise UserError(
                f"{source}, line {number}, id: {document.doc_id!r} is another document's id too; ids must differ."
            )
    return list(documents.values())


def _images(path: Path | None, folder: PurePosixPath) -> Iterator[tuple[Path, int, Document]]:
    """Yield (file, line number, document) of an image file."""
    if path is None:
        return
    for number, value in read_json_lines(path):
        line = _parse(_ImageLine, path, number, value)
        if not PurePosixPath(line.path).name or _leaves_folder(line.path):
            raise UserError(f"{path}, line {number}, path: {line.path!r} names no file inside the image folder.")
        image = str(folder / line.path)
        yield path, number, Document(line.id, Modality.IMAGE, line.title, image=image, url=line.url)


def _texts(path: Path | None) -> Iterator[tuple[Path, int, Document]]:
    """Yield (file, line number, document) of a text file."""
    if path is None:
        return
    for number, value in read_json_lines(path):
        line = _parse(_TextLine, path, number, value)
        yield path, number, Document(line.id, Modality.TEXT, line.title, text=line.text, url=line.url)


def _leaves_folder(path: str) -> bool:
    """Whether a path could lead out of the folder it is put in, on any system."""
    pure = PurePosixPath(path)
    windows = PureWindowsPath(path)
    return pure.is_absolute() or bool(windows.anchor) or ".." in windows.parts or "\0" in path


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
        candidate_ids=_distinct(own),
        hops=1 if not lists.type or lists.type in SINGLE_HOP_TYPES else 2,
    )
    if not isinstance(line, _LabelledLine):
        return question
    supports = [support for support in line.supporting_context if support.doc_part != "table"]
    support_ids = _distinct(support.doc_id for support in supports)
    return replace(
        question,
        answers=tuple(answer.answer for answer in line.answers),
        support_ids=support_ids,
        answer_bearing_ids=_answer_bearing(line, support_ids),
        candidate_ids=_distinct((*own, *support_ids)),
        modalities=tuple(dict.fromkeys(Modality(support.doc_part) for support in supports)),
    )


def _answer_bearing(line: _LabelledLine, support_ids: tuple[str, ...]) -> tuple[str, ...]:
    """The supports that the answers' instances name; all of them where one answer of a support question names none."""
    named = [{place.doc_id for place in (*a.text_instances, *a.image_instances)} for a in line.answers]
    if line.metadata.type in _ANSWERED_BY_SUPPORTS and not all(ids & set(support_ids) for ids in named):
        return support_ids
    return tuple(i for i in support_ids if any(i in ids for ids in named))


def _distinct(ids: Iterable[str]) -> tuple[str, ...]:
    """Ids without repetition, in their first order."""
    return tuple(dict.fromkeys(ids))


def _parse(model: type[Line], path: Path, number: int, value: dict[str, Any]) -> Line:
    """Check one line against its schema.

    Raises:
        UserError: the line does not fit; the message names file, line and field.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}, line {number}, {field}: {first['msg']}.") from error
