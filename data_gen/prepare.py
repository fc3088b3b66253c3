"""Raw data set to records: python data_gen/prepare.py --config configs/quickstart/prepare.yaml.

Reads MultiModalQA's files (the mini world writes the same) or a folder of your own; writes `<split>/questions.jsonl`,
`<split>/documents.jsonl` and `<split>/quarantine.jsonl`, which holds every item that was left out, with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from samrag.config import parse, run
from samrag.errors import UserError
from samrag.files import write_records
from samrag.provenance import is_finished, write_run_record
from samrag.schema import Document, Question

log = logging.getLogger(__name__)

Split = tuple[str, list[Question], list[Document], list[SetAside]]
"""Name, questions, corpus, and what was left out."""


def mmqa_files(arguments: PrepareArguments) -> tuple[dict[str, Path], Path, Path | None]:
    """MultiModalQA's question files by split, its image file, and its text file where there is one."""
    data = Path(arguments.data_dir)
    images = required_file(data, "MMQA_images")
    texts = (required_file if arguments.missing_texts == "error" else raw_file)(data, "MMQA_texts")
    return {split: required_file(data, f"MMQA_{split}") for split in arguments.splits}, images, texts


def mmqa_splits(arguments: PrepareArguments) -> Iterator[Split]:
    """The splits of MultiModalQA's files."""
    files, images, texts = mmqa_files(arguments)
    shared = Quarantine(arguments.on_bad)
    documents = mmqa.read_documents(images, texts, image_folder="", quarantine=shared)
    ids = {document.doc_id for document in documents}
    types = arguments.question_types or ["TextQ", "ImageQ"]
    for split, path in files.items():
        quarantine = Quarantine(arguments.on_bad)
        every = mmqa.read_questions(path, split, quarantine=quarantine)
        kept = [question for question in every if question.question_type in types]
        if not kept:
            raise UserError(f"{path} has no question of type {', '.join(types)}; check the file and question_types.")
        lacking = lacking_supports(kept, ids, path)
        if len(lacking) == len(kept):
            raise UserError(
                f"{path}: none of {len(kept)} questions has all its supports among the documents of "
                f"{arguments.data_dir}; check that the files belong together."
            )
        by_choice = Quarantine("quarantine") if texts is None else quarantine
        for error in lacking.values():
            by_choice.add(error)
        corpus = corpus_of(every if arguments.corpus == "split" else kept, documents)
        bad = checked(corpus, Path(arguments.image_root), arguments, quarantine) if arguments.image_root else set()
        kept = [question for question in kept if question.question_id not in lacking]
        pictureless = lacking_supports(kept, ids - bad, path)
        for error in pictureless.values():
            quarantine.add(error)
        usable = [question for question in kept if question.question_id not in pictureless]
        set_aside = [*shared.items, *(by_choice.items if texts is None else ()), *quarantine.items]
        yield split, usable, [document for document in corpus if document.doc_id not in bad], set_aside


def checked(corpus: list[Document], root: Path, arguments: PrepareArguments, quarantine: Quarantine) -> set[str]:
    """Decode the images of a corpus; the ids of the bad ones, which are set aside unless they are errors."""
    first_frame = arguments.animated == "first_frame"
    if arguments.on_bad == "error":
        check_images(corpus, root, first_frame)
        return set()
    problems = image_problems(corpus, root, first_frame)
    for doc_id, problem in problems.items():
        quarantine.add(BadItemError(f"image {doc_id!r}", problem))
    return set(problems)


def folder_splits(arguments: PrepareArguments) -> Iterator[Split]:
    """The splits of a folder; each searches all its documents."""
    data, quarantine = Path(arguments.data_dir), Quarantine(arguments.on_bad)
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
        yield split, kept, documents, quarantine.items


def main() -> None:
    """Parse, read, select, check, write."""
    (arguments,) = parse(PrepareArguments)
    output = Path(arguments.output_dir)
    if arguments.benchmark == "mmqa":
        files, images, texts = mmqa_files(arguments)
        inputs = [path for path in (*files.values(), images, texts) if path is not None]
    else:
        inputs = folder.input_files(Path(arguments.data_dir))
    if is_finished(output, [arguments], inputs):
        return

    splits = mmqa_splits if arguments.benchmark == "mmqa" else folder_splits
    for split, questions, corpus, set_aside in splits(arguments):
        write_records(output / split / "questions.jsonl", questions)
        write_records(output / split / "documents.jsonl", corpus)
        write_records(output / split / "quarantine.jsonl", set_aside)
        log.info(
            "%s: %d questions, %d documents, %d items left out%s",
            split, len(questions), len(corpus), len(set_aside),
            f" (see {output / split / 'quarantine.jsonl'})" if set_aside else "",
        )  # fmt: skip
    write_run_record(output, [arguments], inputs)


if __name__ == "__main__":
    run(main)
