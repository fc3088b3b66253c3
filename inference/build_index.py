"""Build an index: python inference/build_index.py --config configs/quickstart/build_index.yaml."""

from __future__ import annotations

import dataclasses
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
    from samrag.retrieval.index import IndexOptions, build_index
    from samrag.retrieval.store import SearchOptions

    path, folder = Path(arguments.documents_file), Path(arguments.output_dir)
    documents = read_records(path, Document)
    given = dataclasses.asdict(arguments)
    wanted = {field.name: given[field.name] for field in dataclasses.fields(SearchOptions) if field.name in given}
    search = SearchOptions(method=arguments.search, **wanted)
    options = IndexOptions(arguments.dtype, arguments.shard_size, arguments.max_batch_tokens, search)
    embedder = Embedder.load(arguments.embedder)
    built = build_index(documents, embedder, folder, options, arguments.overwrite, show_progress=True)
    if built.skipped:
        log.info("%s is up to date: nothing to do.", folder)
        return
    write_run_record(folder, [arguments], [path])
    count, dimension = len(documents), embedder.dimension
    log.info("%s: %d documents, %d dimensions, %d texts encoded", folder, count, dimension, built.num_encoded)
    if (recall := built.index.manifest.search.recall_at_10) is not None:
        log.info("%s finds %.1f %% of the 10 nearest", arguments.search, 100 * recall)


if __name__ == "__main__":
    run(main)
