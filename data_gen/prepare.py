"""Raw data set to records: python data_gen/prepare.py --config configs/quickstart/prepare.yaml.

Reads MultiModalQA's files (the mini world writes the same) or a folder of your own; writes `<split>/questions.jsonl`,
`<split>/documents.jsonl` and `<split>/quarantine.jsonl`, which holds every item that was left out, with its reason.
"""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.arguments import PrepareArguments
from samrag.benchmarks.preparing import input_files, prepared_splits
from samrag.config import parse, run
from samrag.files import write_records
from samrag.provenance import forget_run_record, is_finished, write_run_record

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, read, select, check, write."""
    (arguments,) = parse(PrepareArguments)
    output, inputs = Path(arguments.output_dir), input_files(arguments)
    if is_finished(output, [arguments], inputs):
        return

    splits = list(prepared_splits(arguments))  # all are checked before the first is written
    forget_run_record(output)
    for split in splits:
        folder = output / split.name
        write_records(folder / "questions.jsonl", split.questions)
        write_records(folder / "documents.jsonl", split.documents)
        write_records(folder / "quarantine.jsonl", split.set_aside)
        log.info(
            "%s: %d questions, %d documents; left out: %d items%s",
            split.name, len(split.questions), len(split.documents), len(split.set_aside),
            f", see {folder / 'quarantine.jsonl'}" if split.set_aside else "",
        )  # fmt: skip
    write_run_record(output, [arguments], inputs)


if __name__ == "__main__":
    run(main)
