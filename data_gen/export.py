"""Training rows for other trainers: python data_gen/export.py --config configs/export.yaml.

Reads sft.jsonl; writes README.md (a data set card) and `trl/`, `llama_factory/`, `dataset/`, with `images/` on request.
Nothing leaves the machine unless `push_to` names a repository.
"""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.arguments import ExportArguments
from samrag.config import parse, run
from samrag.exporting import (
    FOLDERS,
    IMAGES_FOLDER,
    card,
    claim_folder,
    copy_images,
    image_files,
    push,
    split_rows,
    write_datasets,
    write_llama_factory,
    write_trl,
)
from samrag.files import read_records, write_text
from samrag.provenance import is_finished, write_run_record
from samrag.schema import SftRow

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, split, write, push."""
    (arguments,) = parse(ExportArguments)
    source, output = Path(arguments.sft_file), Path(arguments.output_dir)
    rows = read_records(source, SftRow)
    if is_finished(output, [arguments], [source]):
        return

    files = image_files(rows, Path(arguments.image_root))
    splits, num_left_out = split_rows(rows, arguments.validation_share, arguments.separate_documents, arguments.seed)
    claim_folder(output, arguments.formats)
    if arguments.copy_images:
        copy_images(files, output / IMAGES_FOLDER)
    if "trl" in arguments.formats:
        write_trl(splits, output / FOLDERS["trl"])
    if "llama_factory" in arguments.formats:
        write_llama_factory(splits, output / FOLDERS["llama_factory"], arguments)
    write_text(output / "README.md", card(splits, num_left_out, arguments))
    if "datasets" in arguments.formats:
        datasets = write_datasets(splits, output / FOLDERS["datasets"], files if arguments.copy_images else None)
        if arguments.push_to:
            push(datasets, output / "README.md", arguments.push_to, arguments.push_private)
    write_run_record(output, [arguments], [source], arguments.seed)
    counts = ", ".join(f"{len(part)} rows for {split}" for split, part in splits.items())
    log.info("%s: %s, %d left out", output, counts, num_left_out)


if __name__ == "__main__":
    run(main)
