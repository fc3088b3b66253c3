"""Your own data: a folder of questions, texts and images, as records.

    mydata/
      questions.jsonl    id, question, answers, supports; if you like: answer_in, split, type
      texts.jsonl        id, text; if you like: title, url
      images/            any files and subfolders; each file is one image document
      images.jsonl       path; if you like: id, title, url; only for images whose defaults do not fit

Each file may be JSONL (plain or `.gz`) or CSV with a header line (`questions.csv`); texts or images may be missing, not
both. In JSONL a list is a list, or one string. In a CSV cell the items of a list are separated by `|`, or the cell is a
JSON list.

- `id`: not empty, no two alike; texts and images share one space of ids. An image's id is its path inside `images/`
  unless `images.jsonl` gives another. Without a title, an image has its file's name in words, a text its first words.
- `answers`: all of them are right together, as in MultiModalQA's list answers.
- `supports`: ids of the documents that are needed to answer. `answer_in`: those of them in which the answer stands; the
  others are bridges. Without it, the answer stands in each of them.
- `split`: for all questions or for none. Without it, the questions are dealt to the splits by a seeded draw; questions
  of the same words stay together.

Every item that cannot be used is refused, or set aside with its reason (see `samrag.benchmarks.corpus.Quarantine`).
Files whose name begins with a dot are no images. Left out: tables, videos, documents of several pages.
"""

from __future__ import annotations

import csv
import json
import logging
import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from samrag.benchmarks.corpus import (
    BadItemError,
    Quarantine,
    answer_bearing,
    distinct,
    image_problem,
    parse_line,
    raw_file,
)
from samrag.errors import UserError
from samrag.files import read_json_lines, within
from samrag.schema import Document, Modality, Question

log = logging.getLogger(__name__)

IMAGES_FOLDER = "images"
_LISTS = ("answers", "supports", "answer_in")


def _plain_text(value: object) -> object:
    """A string without blanks around it; numbers as they are written."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value.strip() if isinstance(value, str) else value


def _as_list(value: object) -> object:
    """One item is a list of one; nothing is an empty list."""
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


_Text = Annotated[str, BeforeValidator(_plain_text), Field(min_length=1)]
_Optional = Annotated[str, BeforeValidator(lambda value: "" if value is None else _plain_text(value))]
_List = Annotated[list[_Text], BeforeValidator(_as_list)]


class _QuestionLine(BaseModel):
    id: _Text
    question: _Text
    answers: Annotated[_List, Field(min_length=1)]
    supports: Annotated[_List, Field(min_length=1)]
    answer_in: _List = []
    split: _Optional = ""
    type: _Optional = ""


class _TextLine(BaseModel):
    id: _Text
    text: _Text
    title: _Optional = ""
    url: _Optional = ""


class _ImageLine(BaseModel):
    path: _Text
    id: _Optional = ""
    title: _Optional = ""
    url: _Optional = ""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How questions without a split are dealt."""

    names: Sequence[str]
    """The splits to fill."""
    shares: Sequence[float]
    """The share of each."""
    seed: int = 0


def read_documents(folder: Path, quarantine: Quarantine, first_frame: bool = False) -> list[Document]:
    """Read texts and images as one list, images first, each in file order; every image is decoded once.

    Args:
        folder: laid out as the module says.
        quarantine: takes in what cannot be used.
        first_frame: take the first frame of animations, instead of refusing them.

    Raises:
        UserError: there are neither texts nor images, or a file is broken as a whole.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; check data_dir.")
    documents: dict[str, Document] = {}
    texts = _table(folder, "texts")
    found = (*_images(folder, quarantine, first_frame), *(_texts(texts, quarantine) if texts else ()))
    for where, document in found:
        if document.doc_id in documents:
            quarantine.add(BadItemError(where, f"the id {document.doc_id!r} belongs to another document too"))
        else:
            documents[document.doc_id] = document
    if not documents:
        raise UserError(
            f"{folder} has no usable document; put texts in texts.jsonl or texts.csv, and images in {IMAGES_FOLDER}/."
        )
    return list(documents.values())


def read_questions(
    folder: Path, documents: Sequence[Document], plan: SplitPlan, quarantine: Quarantine
) -> list[Question]:
    """Read the questions, each with its split, in file order.

    Raises:
        UserError: there is no file of questions, it is broken as a whole, or the shares of the plan do not fit.
    """
    path = _table(folder, "questions")
    if path is None:
        raise UserError(f"{folder} has no questions.jsonl or questions.csv; check data_dir.")
    known = {document.doc_id: document for document in documents}
    questions: dict[str, Question] = {}
    for number, line in _lines(path, _QuestionLine, quarantine):
        where = f"{path}, line {number}, question {line.id!r}"
        try:
            question = _question(where, line, known)
            if question.question_id in questions:
                raise BadItemError(where, "the id belongs to another question too")
            questions[question.question_id] = question
        except BadItemError as error:
            quarantine.add(error)
    if not questions:
        raise UserError(f"{path} has no usable question; look at the layout in samrag/benchmarks/folder.py.")
    return _with_splits(path, list(questions.values()), plan, quarantine)


def _question(where: str, line: _QuestionLine, documents: dict[str, Document]) -> Question:
    """The record of one line; its supports must be there."""
    supports, named = distinct(line.supports), distinct(line.answer_in)
    missing = [i for i in supports if i not in documents]
    if missing:
        raise BadItemError(where, f"its support {missing[0]!r} is not among the usable documents")
    strange = [i for i in named if i not in supports]
    if strange:
        raise BadItemError(where, f"answer_in names {strange[0]!r}, which is not among its supports")
    modalities = tuple(dict.fromkeys(documents[i].modality for i in supports))
    bearing = answer_bearing(supports, [named], answered_by_supports=True)
    own_type = "MixedQ" if len(modalities) > 1 else f"{modalities[0].capitalize()}Q"
    return Question(
        question_id=line.id,
        question=line.question,
        answers=tuple(line.answers),
        question_type=line.type or own_type,
        split=line.split,
        support_ids=supports,
        answer_bearing_ids=bearing,
        candidate_ids=supports,
        modalities=modalities,
        hops=1 if len(bearing) == len(supports) else 2,
    )


def _with_splits(path: Path, questions: list[Question], plan: SplitPlan, quarantine: Quarantine) -> list[Question]:
    """The questions with the splits of the file, or dealt by the plan."""
    if not any(question.split for question in questions):
        return _dealt(questions, plan)
    kept = []
    for question in questions:
        if question.split:
            kept.append(question)
        else:
            quarantine.add(
                BadItemError(f"{path}, question {question.question_id!r}", "no split, although others have one")
            )
    others = Counter(question.split for question in kept if question.split not in plan.names)
    if others:
        counts = ", ".join(f"{count} of {name!r}" for name, count in sorted(others.items()))
        log.info("%s: questions of other splits than %s are not taken: %s", path, ", ".join(plan.names), counts)
    return kept


def _dealt(questions: list[Question], plan: SplitPlan) -> list[Question]:
    """Deal questions to splits by a seeded draw; the same words always go to the same split.

    Raises:
        UserError: not one positive share for each split.
    """
    shares = list(plan.shares)
    if len(shares) != len(plan.names) or min(shares) <= 0:
        raise UserError(
            f"split_shares are {shares} for the splits {list(plan.names)}; give one positive share for each split, "
            "or a split column to the questions."
        )
    wordings = sorted({_wording(question) for question in questions})
    random.Random(f"split:{plan.seed}").shuffle(wordings)
    bounds = [round(len(wordings) * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    split_of = {
        wording: next(name for name, bound in zip(plan.names, bounds, strict=True) if position < bound)
        for position, wording in enumerate(wordings)
    }
    return [replace(question, split=split_of[_wording(question)]) for question in questions]


def _wording(question: Question) -> str:
    return " ".join(question.question.casefold().split())


# --- documents ---


def _texts(path: Path, quarantine: Quarantine) -> Iterator[tuple[str, Document]]:
    """Yield (where, document) of the file of texts."""
    for number, line in _lines(path, _TextLine, quarantine):
        title = line.title or textwrap.shorten(line.text, 60, placeholder="")
        yield f"{path}, line {number}", Document(line.id, Modality.TEXT, title, text=line.text, url=line.url)


def _images(folder: Path, quarantine: Quarantine, first_frame: bool) -> Iterator[tuple[str, Document]]:
    """Yield (where, document) of every image file, in the order of their paths."""
    root = folder / IMAGES_FOLDER
    named = _titles(folder, root, quarantine)
    for path in sorted(path for path in root.rglob("*") if not path.name.startswith(".")):
        if path.is_dir():
            if path.is_symlink():
                quarantine.add(BadItemError(str(path), "it is a link to a folder, which is not followed"))
            continue
        relative = path.relative_to(root).as_posix()
        where, line = named.get(relative, ("", _ImageLine(path=relative)))
        try:
            document = Document(
                line.id or relative,
                Modality.IMAGE,
                line.title or " ".join(path.stem.replace("_", " ").replace("-", " ").split()),
                image=relative,
                url=line.url,
            )
            relative.encode()
            within(root, relative)
        except UnicodeEncodeError:
            quarantine.add(BadItemError(f"{root}, {relative!r}", "its name is not UTF-8"))
        except UserError:
            quarantine.add(BadItemError(str(path), "it is a link that leaves the folder"))
        else:
            problem = image_problem(path, first_frame)
            if problem:
                quarantine.add(BadItemError(str(path), problem))
            else:
                yield where or str(path), document


def _titles(folder: Path, root: Path, quarantine: Quarantine) -> dict[str, tuple[str, _ImageLine]]:
    """What the file of titles says: (where, line) by the path of the image."""
    path = _table(folder, "images")
    lines: dict[str, tuple[str, _ImageLine]] = {}
    for number, line in _lines(path, _ImageLine, quarantine) if path else ():
        where = f"{path}, line {number}"
        try:
            file = within(root, line.path)
            relative = file.relative_to(root.resolve()).as_posix()
            if relative in lines:
                raise BadItemError(where, f"{line.path!r} has a line already")
            if not file.is_file():
                raise BadItemError(where, f"there is no file {line.path!r} in {root}")
            lines[relative] = (where, line)
        except BadItemError as error:
            quarantine.add(error)
        except (UserError, ValueError):
            quarantine.add(BadItemError(where, f"the path {line.path!r} leaves {root}"))
    return lines


# --- files ---


def input_files(folder: Path) -> list[Path]:
    """What a folder's records are made of, for the run record: its files, and the folder of images."""
    files = [path for stem in ("questions", "texts", "images") if (path := _table(folder, stem)) is not None]
    images = folder / IMAGES_FOLDER
    return [*files, images] if images.is_dir() else files


def _table(folder: Path, stem: str) -> Path | None:
    """The JSONL or CSV file of a stem; None when there is none.

    Raises:
        UserError: there are two.
    """
    lines, cells = raw_file(folder, stem), folder / f"{stem}.csv"
    if lines is not None and cells.is_file():
        raise UserError(
            f"{folder} has both {lines.name} and {cells.name}; remove one, so that it is clear which counts."
        )
    return cells if cells.is_file() else lines


def _lines(path: Path, model: type[Any], quarantine: Quarantine) -> Iterator[tuple[int, Any]]:
    """Yield (line number, checked line) of a JSONL or CSV file; says once which columns are not used."""
    unused: set[str] = set()
    needed = [name for name, column in model.model_fields.items() if column.is_required()]
    for number, value in _cells(path, needed, quarantine) if path.suffix == ".csv" else read_json_lines(path):
        unused |= set(value) - set(model.model_fields)
        try:
            yield number, parse_line(model, path, number, value)
        except BadItemError as error:
            quarantine.add(error)
    if unused:
        log.warning("%s: not used: %s", path, ", ".join(sorted(unused)))


def _cells(path: Path, needed: Sequence[str], quarantine: Quarantine) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a CSV file with a header; a row of several lines is named by its last.

    Raises:
        UserError: it is no UTF-8 CSV file, or its header lacks a column that is needed, or has one twice or unnamed.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            if len(set(names)) < len(names) or not all(names):
                raise UserError(f"{path}, line 1: every column of the header needs a name of its own.")
            if missing := [name for name in needed if name not in names]:
                raise UserError(
                    f"{path}, line 1: the header has no column {missing[0]!r}, but {', '.join(map(repr, names))}; names"
                    " are as written in lower case, and columns are separated by commas."
                )
            reader.fieldnames = names
            for row in reader:
                number = reader.line_num
                if None in row or None in row.values():
                    cells = len(names) + len(row.get(None) or ()) - sum(value is None for value in row.values())
                    quarantine.add(BadItemError(f"{path}, line {number}", f"{cells} cells under {len(names)} columns"))
                    continue
                yield number, {name: _items(value) if name in _LISTS else value for name, value in row.items()}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason}); save the file as CSV UTF-8.") from error
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error}); mend it, or use JSONL.") from error


def _items(cell: str) -> list[Any] | str:
    """The items of a list's cell."""
    if cell.lstrip().startswith("["):
        try:
            items = json.loads(cell)
        except ValueError:
            items = None
        if isinstance(items, list):
            return items
    return [item.strip() for item in cell.split("|") if item.strip()]
