"""Build an index: python inference/build_index.py --config configs/quickstart/build_index.yaml."""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.arguments import IndexArguments
from samrag.config import parse, run
from samrag.files import read_records
from samrag.provenance import write_run_record
from samrag.schema import Document

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, embed, write."""
    (arguments,) = parse(IndexArguments)
    from samrag.retrieval.embedder import Embedder
    from samrag.retrieval.index import build_index

    path, folder = Path(arguments.documents_file), Path(arguments.output_dir)
    documents = read_records(path, Document)
    embedder = Embedder.load(arguments.embedder)
    built = build_index(documents, embedder, folder, arguments.batch_size, progress=True, overwrite=True)
    if built.skipped:
        log.info("%s is up to date: nothing to do.", folder)
        return
    write_run_record(folder, [arguments], [path])
    log.info("%s: %d documents, %d dimensions", folder, len(documents), embedder.dimension)


if __name__ == "__main__":
    run(main)
