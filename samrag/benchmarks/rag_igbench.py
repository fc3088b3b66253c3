"""RAG-IGBench: questions with documents, candidate images and interleaved gold answers, as records.

Files of Muyi13/RAG-IGBench: `RAG_IG_CH.jsonl` and `RAG_IG_EN.json`, both with one JSON object a line, plain or `.gz`:

    id, query
    documents          list of texts
    images             for each document, a list of URLs, or of paths below the image folder
    gt_clean_answer    gold Markdown; files from before May 2025 call it gt_answer
    category           [topic, type]
    split              train or dev; missing in older files

An output file for scoring has `id` and `model_answer` on each line, the other fields or not.

An image that is a URL gets the path of `image_path`, where `samrag.benchmarks.downloading` puts it. Left out:
`gt_raw_answer`, what a model had said before a person refined it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from samrag.benchmarks.corpus import BadItemError, Quarantine, leaves_folder, parse_line
from samrag.errors import UserError
from samrag.files import read_json_lines
from samrag.interleaved import ImageReference, structure
from samrag.metrics.rag_igbench import Sample
from samrag.schema import Document, InterleavedQuestion, Language, Modality

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif")


def _id_text(value: object) -> object:
    """Ids are numbers in one release and digits in another."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_Id = Annotated[str, BeforeValidator(_id_text), Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]


class _QuestionLine(BaseModel):
    """A line of the data set."""

    id: _Id
    query: _Text
    documents: Annotated[list[str], Field(min_length=1)]
    images: list[list[_Text]]
    gt_clean_answer: str = ""
    gt_answer: str = ""
    category: Annotated[list[str], Field(min_length=2, max_length=2)]
    split: str = ""

    @property
    def reference(self) -> str:
        """The gold answer, under either name."""
        return (self.gt_clean_answer or self.gt_answer).strip()

    @model_validator(mode="after")
    def _check(self) -> _QuestionLine:
        if len(self.images) != len(self.documents):
            raise ValueError(
                f"there are {len(self.documents)} documents and {len(self.images)} lists of images; each document has"
                " its own list, empty where it has no image"
            )
        if not self.reference:
            raise ValueError("there is no gold answer: neither gt_clean_answer nor gt_answer is filled in")
        return self


class _OutputLine(BaseModel):
    """A line of an output file."""

    id: _Id
    model_answer: str


def read_questions(
    path: Path, language: Language, split: str | None = None, quarantine: Quarantine | None = None
) -> list[InterleavedQuestion]:
    """Read a file of the data set, in file order.

    Args:
        path: one line a question, whatever the file is called.
        language: the file's; it decides how answers are cut into words, and the prompt.
        split: keep this split alone; None keeps all.
        quarantine: takes in bad lines; None refuses them.

    Raises:
        UserError: the file is missing or broken, a line has the wrong schema, an id that another line has, a gold
            answer that shows an image that does not exist, or an image path that leaves its folder (the message names
            file, line and field); or no question is left.
    """
    quarantine = quarantine or Quarantine()
    questions: dict[str, InterleavedQuestion] = {}
    splits: dict[str, None] = {}
    for number, value in read_json_lines(path):
        where = f"{path}, line {number}"
        try:
            question = _question(parse_line(_QuestionLine, path, number, value), language, where)
            if question.question_id in questions:
                raise BadItemError(f"{where}, id", f"{question.question_id!r} occurs twice")
        except BadItemError as error:
            quarantine.add(error)
            continue
        questions[question.question_id] = question
        splits[question.split or "(none)"] = None
    kept = [question for question in questions.values() if split is None or question.split == split]
    if not kept:
        found = f"its splits are {', '.join(splits)}" if questions else "it has none at all"
        raise UserError(f"{path} has no usable question{f' of split {split!r}' if split else ''}; {found}.")
    return kept


def _question(line: _QuestionLine, language: Language, where: str) -> InterleavedQuestion:
    """The record of one line."""
    documents: list[Document] = []
    num_images = 0
    for n, (text, images) in enumerate(zip(line.documents, line.images, strict=True), 1):
        documents.append(Document(f"{line.id}/doc-{n}", Modality.TEXT, "", text=text))
        for place in images:
            num_images += 1
            name, url = _named(place, where)
            documents.append(Document(f"{line.id}/img-{num_images}", Modality.IMAGE, "", image=name, url=url))
    for segment in structure(line.reference, num_images).segments:
        if isinstance(segment, ImageReference) and not 1 <= segment.index <= num_images:
            raise BadItemError(f"{where}, gold answer", f"{segment.source} shows none of its {num_images} images")
    topic, question_type = line.category
    return InterleavedQuestion(
        line.id, line.query.strip(), tuple(documents), language, line.reference, topic, question_type, line.split
    )


def _named(place: str, where: str) -> tuple[str, str]:
    """The path and the URL of an image, one of which the file tells."""
    if place.startswith(("https://", "http://")):
        return image_path(place), place
    if "://" in place or leaves_folder(place) or not PurePosixPath(place).name:
        raise BadItemError(f"{where}, images", f"{place!r} is no URL, and names no file inside the image folder")
    return place, ""


def image_path(url: str) -> str:
    """Where a downloaded image lies below the image folder: a name that depends on the URL alone."""
    suffix = PurePosixPath(re.split("[?#]", url, maxsplit=1)[0]).suffix.lower()
    return f"{hashlib.sha256(url.encode()).hexdigest()[:32]}{suffix if suffix in _SUFFIXES else '.jpg'}"


def read_outputs(path: Path) -> dict[str, str]:
    """What a model wrote, by question id, from the `model_answer` of each line.

    Raises:
        UserError: the file is missing or broken, a line has the wrong schema, or an id occurs twice (the message names
            file and line).
    """
    outputs: dict[str, str] = {}
    for number, value in read_json_lines(path):
        line = parse_line(_OutputLine, path, number, value)
        if line.id in outputs:
            raise BadItemError(f"{path}, line {number}, id", f"{line.id!r} occurs twice")
        outputs[line.id] = line.model_answer
    return outputs


def samples_of(questions: Sequence[InterleavedQuestion], outputs: Mapping[str, str]) -> list[Sample]:
    """Outputs beside their gold answers, for `samrag.metrics.rag_igbench`; a question without an output is an error.

    Raises:
        UserError: an output belongs to no question.
    """
    ids = {question.question_id for question in questions}
    strange = next((i for i in outputs if i not in ids), None)
    if strange is not None:
        raise UserError(f"the output {strange!r} belongs to no question; check that both files are of one split.")
    return [
        Sample(
            question.question_id,
            outputs.get(question.question_id, ""),
            question.reference,
            len(question.images),
            question.language,
            (question.topic, question.question_type),
            tuple(document.image or "" for document in question.images),
            "" if question.question_id in outputs else "no output",
        )
        for question in questions
    ]
