"""Raw captions for image documents: python data_gen/caption.py --config configs/quickstart/caption.yaml.

The captions serve indexing alone (SAM-RAG, section 3.4.1). Reads documents.jsonl; writes documents.captioned.jsonl.
With `--dry_run true` it only says what would be asked, and what that would cost.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from samrag.answering import recorded, teacher_backend
from samrag.arguments import CaptionArguments, TeacherArguments
from samrag.asking import caption_stage, dry_run
from samrag.captioning import caption_documents
from samrag.config import parse, run
from samrag.engines.recorded import Store
from samrag.files import read_records, write_records
from samrag.prompts import PromptStyle
from samrag.schema import Document

log = logging.getLogger(__name__)


async def caption(arguments: CaptionArguments, teacher: TeacherArguments) -> None:
    """Caption each file's images and write the captioned copy."""
    root = Path(arguments.image_root)
    store = Store(Path(teacher.store))
    engine = recorded(teacher_backend(teacher, root), store, root, PromptStyle.TEACHER)
    try:
        for name in map(Path, arguments.documents_files):
            documents = read_records(name, Document)
            captioned, failures = await caption_documents(documents, engine, arguments, teacher.concurrency, str(name))
            write_records(name.with_name("documents.captioned.jsonl"), captioned)
            log.info("%s: %d documents, %d images without a caption", name, len(captioned), failures)
    finally:
        await engine.close()
        store.close()
        log.info("%s", engine.meter.table())


def main() -> None:
    """Parse, caption, write."""
    arguments, teacher = parse(CaptionArguments, TeacherArguments)
    if arguments.dry_run:
        log.info("%s", asyncio.run(dry_run(caption_stage(arguments, teacher))))
    else:
        asyncio.run(caption(arguments, teacher))


if __name__ == "__main__":
    run(main)
