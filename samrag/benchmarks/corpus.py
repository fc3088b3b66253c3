"""What the readers of raw data sets share: labels, checks of lines and images, and what becomes of bad items."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from samrag.errors import UserError
from samrag.files import within
from samrag.images import IMAGE_ERRORS, num_frames, read_image
from samrag.progress import progress
from samrag.schema import Document, Question

Line = TypeVar("Line", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SetAside:
    """One line of `quarantine.jsonl`."""

    item: str
    """Which item: its file and line, or its id."""
    reason: str
    """Why it cannot be used."""


class BadItemError(UserError):
    """One item of a raw data set that cannot be used."""

    def __init__(self, item: str, reason: str) -> None:
        """Name the item, such as by file and line, and what is wrong with it."""
        super().__init__(f"{item}: {reason}; mend it, or leave such items out with on_bad: quarantine.")
        self.set_aside = SetAside(item, reason)


class Quarantine:
    """Bad items: each is refused at once, or set aside with its reason. None is passed over in silence."""

    def __init__(self, on_bad: str = "error") -> None:
        """Refuse with `error`; set aside with `quarantine`."""
        self._refuses = on_bad == "error"
        self.items: list[SetAside] = []

    def add(self, error: BadItemError) -> None:
        """Take in a bad item.

        Raises:
            BadItemError: bad items are errors.
        """
        if self._refuses:
            raise error
        self.items.append(error.set_aside)


def raw_file(folder: Path, stem: str) -> Path | None:
    """`<stem>.jsonl` or `<stem>.jsonl.gz` in a folder; None when there is neither."""
    names = (folder / f"{stem}.jsonl", folder / f"{stem}.jsonl.gz")
    return next((path for path in names if path.is_file()), None)


def required_file(folder: Path, stem: str) -> Path:
    """`raw_file`, or a `UserError` when there is none."""
    path = raw_file(folder, stem)
    if path is None:
        raise UserError(f"{folder} has no {stem}.jsonl or {stem}.jsonl.gz; check data_dir and splits.")
    return path


def parse_line(model: type[Line], path: Path, number: int, value: dict[str, Any]) -> Line:
    """Check one line against its schema.

    Raises:
        BadItemError: the line does not fit, or holds what is no text; the message names file, line and field.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadItemError(
            f"{path}, line {number}", "a lone surrogate in its text, which is half a character"
        ) from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        reason = "must not be empty" if first["type"] == "too_short" else first["msg"].removeprefix("Value error, ")
        raise BadItemError(f"{path}, line {number}, {field or model.__name__}", reason) from error


def leaves_folder(path: str) -> bool:
    """Whether a path could lead out of the folder it is put in, on any system."""
    pure = PurePosixPath(path)
    windows = PureWindowsPath(path)
    return pure.is_absolute() or bool(windows.anchor) or ".." in windows.parts or "\0" in path


def distinct(ids: Iterable[str]) -> tuple[str, ...]:
    """Ids without repetition, in their first order."""
    return tuple(dict.fromkeys(ids))


def answer_bearing(
    support_ids: tuple[str, ...], named: Sequence[Collection[str]], answered_by_supports: bool
) -> tuple[str, ...]:
    """The supports that contain the answer; the others are bridges.

    Args:
        support_ids: all supports of a question.
        named: for each of its answers, the documents in which that answer is said to stand.
        answered_by_supports: the answer is known to stand in the supports; where one of the answers names none of
            them, it may be any, so all of them count.
    """
    if answered_by_supports and not all(set(ids) & set(support_ids) for ids in named):
        return support_ids
    return tuple(i for i in support_ids if any(i in ids for ids in named))


def lacking_supports(questions: Iterable[Question], doc_ids: Collection[str], path: Path) -> dict[str, BadItemError]:
    """What is wrong with questions whose supports are not all among the documents, by question id."""
    found = {}
    for question in questions:
        missing = [i for i in question.support_ids if i not in doc_ids]
        if missing or not question.support_ids:
            what = f"its support {missing[0]!r} is not among the usable documents" if missing else "it has no support"
            found[question.question_id] = BadItemError(f"{path}, question {question.question_id!r}", what)
    return found


def corpus_of(questions: Sequence[Question], documents: Sequence[Document]) -> list[Document]:
    """The documents that the questions list, in the order of `documents`.

    Raises:
        UserError: there are none.
    """
    wanted = {doc_id for question in questions for doc_id in question.candidate_ids}
    corpus = [document for document in documents if document.doc_id in wanted]
    if not corpus:
        raise UserError("the corpus is empty: no document that the questions list is in the data set's files.")
    return corpus


def image_problem(path: Path, first_frame: bool = True) -> str:
    """Why an image file cannot be used; empty when it can.

    Args:
        path: the file; it is decoded in full, because a header says nothing of what follows.
        first_frame: of animations the first frame is wanted, so they are no problem.
    """
    try:
        frames = num_frames(path)
        if frames > 1 and not first_frame:
            return f"animated: {frames} frames, of which a model sees the first; set animated: first_frame to take it"
        read_image(path)
    except IMAGE_ERRORS as error:
        return "missing" if not path.exists() else f"corrupt: {error}"
    return ""


def image_problems(documents: Sequence[Document], root: Path, first_frame: bool = True) -> dict[str, str]:
    """Decode every image once, by content: what is wrong with an image document, by its id."""
    images = [document for document in documents if document.image]
    paths = [within(root, document.image or "") for document in images]
    found: dict[str, str] = {}
    with (
        progress("checking images", len(images)) as advance,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
    ):
        problems = pool.map(lambda path: image_problem(path, first_frame), paths)
        for document, path, problem in zip(images, paths, problems, strict=True):
            if problem:
                found[document.doc_id] = f"{path} ({problem})"
            advance()
    return found


def check_images(documents: Sequence[Document], root: Path, first_frame: bool = True) -> None:
    """Refuse bad images.

    Raises:
        UserError: images are missing, corrupt, or animated where that is not wanted; names how many and the first.
    """
    bad = image_problems(documents, root, first_frame)
    if bad:
        total = sum(document.image is not None for document in documents)
        raise UserError(
            f"{len(bad)} of {total} images cannot be used, first {next(iter(bad.values()))}; "
            "restore them, leave them out with on_bad: quarantine, or leave image_root out to prepare without checking."
        )
