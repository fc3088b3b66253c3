"""From a raw data set to the splits that the stages work on, with everything that was left out on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from samrag.arguments import PrepareArguments
from samrag.benchmarks import folder, mmqa
from samrag.benchmarks.corpus import (
    BadItemError,
    Quarantine,
    SetAside,
    check_images,
    corpus_of,
    image_problems,
    lacking_supports,
    raw_file,
    required_file,
)
from samrag.errors import UserError
from samrag.schema import Document, Question

log = logging.getLogger(__name__)

PAPER_TYPES = ("TextQ", "ImageQ")
"""The question types of MultiModalQA that the paper takes."""


@dataclass(frozen=True, slots=True)
class PreparedSplit:
    """One split."""

    name: str
    questions: Sequence[Question]
    documents: Sequence[Document]
    """The corpus."""
    set_aside: Sequence[SetAside]
    """What was left out."""


def input_files(arguments: PrepareArguments) -> list[Path]:
    """The files and folders that the splits are made of.

    Raises:
        UserError: one that is needed is not there.
    """
    if arguments.benchmark == "folder":
        return folder.input_files(Path(arguments.data_dir))
    files, images, texts = _mmqa_files(arguments)
    return [path for path in (*files.values(), images, texts) if path is not None]


def prepared_splits(arguments: PrepareArguments) -> Iterator[PreparedSplit]:
    """Yield the splits in the order asked for.

    Raises:
        UserError: a file is broken, an item is bad where that is an error, or a split would be empty.
    """
    return _folder_splits(arguments) if arguments.benchmark == "folder" else _mmqa_splits(arguments)


def _folder_splits(arguments: PrepareArguments) -> Iterator[PreparedSplit]:
    """The splits of a folder of one's own; each searches all its documents."""
    data, quarantine = Path(arguments.data_dir), Quarantine(arguments.on_bad)
    if arguments.image_root is not None:
        log.warning("image_root has no effect here: the images are those in %s.", data / folder.IMAGES_FOLDER)
    documents = folder.read_documents(data, quarantine, arguments.animated == "first_frame")
    plan = folder.SplitPlan(arguments.splits, arguments.split_shares, arguments.seed)
    every = folder.read_questions(data, documents, plan, quarantine)
    for split in arguments.splits:
        types = arguments.question_types
        kept = [q for q in every if q.split == split and (types is None or q.question_type in types)]
        if not kept:
            raise UserError(
                f"{data} has no usable question for the split {split!r}; check splits, question_types and split_shares."
            )
        yield PreparedSplit(split, kept, documents, quarantine.items)


def _mmqa_files(arguments: PrepareArguments) -> tuple[dict[str, Path], Path, Path | None]:
    """MultiModalQA's question files by split, its image file, and its text file where there is one."""
    data = Path(arguments.data_dir)
    images = required_file(data, "MMQA_images")
    texts = (required_file if arguments.missing_texts == "error" else raw_file)(data, "MMQA_texts")
    return {split: required_file(data, f"MMQA_{split}") for split in arguments.splits}, images, texts


def _mmqa_splits(arguments: PrepareArguments) -> Iterator[PreparedSplit]:
    """The splits of MultiModalQA's files."""
    files, images, texts = _mmqa_files(arguments)
    shared = Quarantine(arguments.on_bad)
    documents = mmqa.read_documents(images, texts, image_folder="", quarantine=shared)
    for split, path in files.items():
        yield _mmqa_split(arguments, split, path, documents, shared.items, has_texts=texts is not None)


def _mmqa_split(
    arguments: PrepareArguments,
    split: str,
    path: Path,
    documents: Sequence[Document],
    set_aside: Sequence[SetAside],
    has_texts: bool,
) -> PreparedSplit:
    """One of them: questions of the wanted types with all their supports, over documents with whole images."""
    quarantine = Quarantine(arguments.on_bad)
    types = arguments.question_types or PAPER_TYPES
    every = mmqa.read_questions(path, split, quarantine=quarantine)
    kept = [question for question in every if question.question_type in types]
    if not kept:
        raise UserError(f"{path} has no question of type {', '.join(types)}; check the file and question_types.")
    ids = {document.doc_id for document in documents}
    lacking = lacking_supports(kept, ids, path)
    if len(lacking) == len(kept):
        raise UserError(
            f"{path}: none of {len(kept)} questions has all its supports among the documents of "
            f"{arguments.data_dir}; check that the files belong together."
        )
    textless = quarantine if has_texts else Quarantine("quarantine")  # questions without their texts: by choice
    for error in lacking.values():
        textless.add(error)
    corpus = corpus_of(every if arguments.corpus == "split" else kept, documents)
    bad = _bad_images(corpus, arguments, quarantine)
    kept = [question for question in kept if question.question_id not in lacking]
    pictureless = lacking_supports(kept, ids - bad, path)
    for error in pictureless.values():
        quarantine.add(error)
    usable = [question for question in kept if question.question_id not in pictureless]
    if not usable:
        raise UserError(f"{path}: no question has all its images; look at image_root {arguments.image_root}.")
    return PreparedSplit(
        split,
        usable,
        [document for document in corpus if document.doc_id not in bad],
        [*set_aside, *quarantine.items, *(() if has_texts else textless.items)],
    )


def _bad_images(corpus: Sequence[Document], arguments: PrepareArguments, quarantine: Quarantine) -> set[str]:
    """Decode the images of a corpus; the ids of the bad ones, which are set aside unless they are errors."""
    if not arguments.image_root:
        return set()
    root, first_frame = Path(arguments.image_root), arguments.animated == "first_frame"
    if arguments.on_bad == "error":
        check_images(corpus, root, first_frame)
        return set()
    problems = image_problems(corpus, root, first_frame)
    for doc_id, problem in problems.items():
        quarantine.add(BadItemError(f"image {doc_id!r}", problem))
    return set(problems)
