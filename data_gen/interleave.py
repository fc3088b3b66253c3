"""Training data for answers with pictures: python data_gen/interleave.py --config configs/interleave.yaml.

Three stages, as RAG-IGBench was made. `--stage draft` asks the teacher, by way of the call store, and writes
drafts/drafts.jsonl and drafts/refine.html; on that page a person moves and removes images, accepts or rejects, and
exports a file. `--stage rows --refinement_files <file>` reads it, filters, and writes sft.jsonl and dropped.jsonl.
With `--dry_run true` the first stage only says what would be asked, and what that would cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from samrag.answering import recorded, teacher_backend
from samrag.arguments import InterleaveArguments, TeacherArguments
from samrag.asking import dry_run, interleave_stage
from samrag.benchmarks.rag_igbench import read_questions
from samrag.config import parse, run
from samrag.engines.recorded import Store
from samrag.errors import UserError
from samrag.files import read_records, sha256, write_records, write_text
from samrag.interleaving import TeacherDraft, ask_drafts, read_refinements, rows_of
from samrag.prompts import PromptStyle
from samrag.provenance import is_finished, write_run_record
from samrag.report.refining import refining_page

log = logging.getLogger(__name__)


async def draft(arguments: InterleaveArguments, teacher: TeacherArguments) -> None:
    """Ask the teacher, write the drafts and the page."""
    output, root = Path(arguments.output_dir) / "drafts", Path(arguments.image_root)
    questions = read_questions(Path(arguments.data_file), arguments.language, arguments.split)
    questions = questions[: arguments.max_questions]
    store = Store(Path(teacher.store))
    engine = recorded(teacher_backend(teacher, root), store, root, PromptStyle.TEACHER)
    try:
        drafts, usage = await ask_drafts(questions, engine, arguments, teacher.teacher_model, teacher.concurrency)
    finally:
        await engine.close()
        store.close()
        log.info("%s", engine.meter.table())
    path, page = output / "drafts.jsonl", output / "refine.html"
    write_records(path, drafts)
    documents = {document.doc_id: document for question in questions for document in question.documents}
    write_text(page, refining_page(drafts, documents, root, sha256(path)))
    write_run_record(output, [arguments, teacher], [Path(arguments.data_file)], arguments.seed)
    answered = sum(bool(item.markdown) for item in drafts)
    log.info("%d of %d questions have a draft, %d calls; now open %s", answered, len(drafts), usage.calls, page)


def make_rows(arguments: InterleaveArguments) -> None:
    """Read what people decided, filter, write the rows."""
    output = Path(arguments.output_dir)
    path, exports = output / "drafts" / "drafts.jsonl", [Path(name) for name in arguments.refinement_files]
    if not exports:
        raise UserError("refinement_files is empty; name the files that were exported from refine.html.")
    if is_finished(output, [arguments], [path, *exports]):
        return
    drafts = read_records(path, TeacherDraft)
    rows, dropped = rows_of(drafts, read_refinements(exports, drafts, sha256(path)), arguments)
    write_records(output / "dropped.jsonl", dropped)
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(d.reason for d in dropped).most_common())
    if not rows:
        raise UserError(f"no draft became a row ({reasons}); look at {output / 'dropped.jsonl'}.")
    write_records(output / "sft.jsonl", rows)
    write_run_record(output, [arguments], [path, *exports], arguments.seed)
    log.info("%s: %d rows kept, %d drafts dropped (%s)", output, len(rows), len(dropped), reasons or "none")


def main() -> None:
    """Parse, then do the stage."""
    arguments, teacher = parse(InterleaveArguments, TeacherArguments)
    if arguments.stage == "draft" and arguments.dry_run:
        log.info("%s", asyncio.run(dry_run(interleave_stage(arguments, teacher))))
    elif arguments.stage == "draft":
        asyncio.run(draft(arguments, teacher))
    else:
        make_rows(arguments)


if __name__ == "__main__":
    run(main)
