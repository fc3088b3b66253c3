"""Which documents a run searches, and whether their images are whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from samrag.errors import UserError
from samrag.files import within
from samrag.images import IMAGE_ERRORS
from samrag.progress import progress
from samrag.schema import Document, Question


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


def check_images(documents: Sequence[Document], root: Path) -> None:
    """Open every image once, by content.

    Raises:
        UserError: images are missing or corrupt; names how many and the first.
    """
    images = [document for document in documents if document.image]
    bad: list[str] = []
    with progress("checking images", len(images)) as advance:
        for document in images:
            path = within(root, document.image or "")
            try:
                with Image.open(path) as image:
                    image.verify()
            except IMAGE_ERRORS as error:
                bad.append(f"{path} ({'missing' if not path.exists() else f'corrupt: {error}'})")
            advance()
    if bad:
        raise UserError(
            f"{len(bad)} of {len(images)} images cannot be read, first {bad[0]}; "
            "restore them, or leave image_root out to prepare without checking."
        )
