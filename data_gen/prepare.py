"""Raw data set to records: python data_gen/prepare.py --config configs/quickstart/prepare.yaml.

Reads MultiModalQA's files (the mini world writes the same); writes `<split>/questions.jsonl` and
`<split>/documents.jsonl`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.arguments import PrepareArguments
from samrag.benchmarks import mmqa
from samrag.benchmarks.corpus import check_images, corpus_of, raw_file, required_file
from samrag.config import parse, run
from samrag.errors import UserError
from samrag.files import write_records
from samrag.provenance import is_finished, write_run_record

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, read, select, check, write."""
    (arguments,) = parse(PrepareArguments)
    data, output = Path(arguments.data_dir), Path(arguments.output_dir)
    images = required_file(data, "MMQA_images")
    find = required_file if arguments.missing_texts == "error" else raw_file
    texts = find(data, "MMQA_texts")
    files = {split: required_file(data, f"MMQA_{split}") for split in arguments.splits}
    inputs = [path for path in (*files.values(), images, texts) if path is not None]
    if is_finished(output, [arguments], inputs):
        return

    documents = mmqa.read_documents(images, texts, image_folder="")
    ids = {document.doc_id for document in documents}
    for split, path in files.items():
        every = mmqa.read_questions(path, split)
        kept = [question for question in every if question.question_type in arguments.question_types]
        if not kept:
            wanted = ", ".join(arguments.question_types)
            raise UserError(f"{path} has no question of type {wanted}; check the file and question_types.")
        usable = [question for question in kept if question.support_ids and ids.issuperset(question.support_ids)]
        if not usable:
            raise UserError(
                f"{path}: none of {len(kept)} questions has all its supports among the documents of {data}; "
                "check that the files belong together."
            )
        corpus = corpus_of(every if arguments.corpus == "split" else kept, documents)
        if arguments.image_root:
            check_images(corpus, Path(arguments.image_root))
        write_records(output / split / "questions.jsonl", usable)
        write_records(output / split / "documents.jsonl", corpus)
        log.info(
            "%s: %d questions (%d of %d of these types have all supports), %d documents",
            split, len(usable), len(usable), len(kept), len(corpus),
        )  # fmt: skip
    write_run_record(output, [arguments], inputs)


if __name__ == "__main__":
    run(main)
