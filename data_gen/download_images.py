"""Fetch the images of RAG-IGBench: python data_gen/download_images.py --config configs/download_images.yaml.

Writes the images, downloads.jsonl with what became of every URL, and dead_links.jsonl with those that gave no image.
The same command goes on where a run stopped, and tries again what failed for the time being.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from samrag.arguments import DownloadArguments
from samrag.benchmarks.corpus import Quarantine
from samrag.benchmarks.downloading import download_images
from samrag.benchmarks.rag_igbench import read_questions
from samrag.config import parse, run
from samrag.files import write_records
from samrag.provenance import write_run_record
from samrag.schema import Language

log = logging.getLogger(__name__)


async def download(arguments: DownloadArguments) -> None:
    """Read the URLs, fetch, report."""
    output = Path(arguments.output_dir)
    files = [Path(name) for name in arguments.data_files]
    quarantine = Quarantine(arguments.on_bad)
    # The language decides nothing here: a file's URLs are the same in either.
    questions = [q for path in files for q in read_questions(path, Language.EN, quarantine=quarantine)]
    urls = [document.url for question in questions for document in question.images if document.url]
    Path(arguments.image_root).mkdir(parents=True, exist_ok=True)
    records = await download_images(urls, arguments)
    missing = [record for record in records if not record.has_image]
    write_records(output / "dead_links.jsonl", missing)
    write_records(output / "quarantine.jsonl", quarantine.items)
    write_run_record(output, [arguments], files)
    counts = ", ".join(f"{count:,} {fate}" for fate, count in Counter(record.fate for record in records).items())
    log.info("%d images: %s", len(records), counts or "none has a URL")
    if missing:
        log.warning("%d images are not there; see %s", len(missing), output / "dead_links.jsonl")


def main() -> None:
    """Parse, download."""
    (arguments,) = parse(DownloadArguments)
    asyncio.run(download(arguments))


if __name__ == "__main__":
    run(main)
