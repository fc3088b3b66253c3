"""Teacher data for the student: python data_gen/distill.py --config configs/quickstart/distill.yaml.

Every reply goes to the call store as it comes; the rows are made from the store, so a run that was cut short goes on
where it stopped, and an edited one pays only for calls that are new. Writes sft.jsonl, dropped.jsonl, quarantine.jsonl,
data_card.md and samples.html. With `--dry_run true` it only says what would be asked, and what that would cost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from samrag.answering import looked_up, rank_documents, recorded, teacher_backend
from samrag.arguments import DistillArguments, TeacherArguments
from samrag.config import parse, run
from samrag.distilling import ask_teacher, documents_by_id, materials_of, quarantined, rows_of
from samrag.engines.recorded import Store
from samrag.errors import UserError
from samrag.files import read_records, write_records, write_text
from samrag.prompts import PromptStyle
from samrag.provenance import command_line, is_finished, write_run_record
from samrag.report.data_card import data_card
from samrag.schema import Document, Question

log = logging.getLogger(__name__)


async def distill(arguments: DistillArguments, teacher: TeacherArguments) -> None:
    """Rank, ask, filter, write."""
    output = Path(arguments.output_dir)
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file), Path(arguments.index_dir)]
    questions = read_records(inputs[0], Question)[: arguments.max_questions]
    documents = read_records(inputs[1], Document)
    by_id = documents_by_id(documents, inputs[1], questions)
    if is_finished(output, [arguments, teacher], inputs):
        return

    deep = arguments.negatives_top + max((len(question.support_ids) for question in questions), default=0)
    hits = rank_documents(questions, documents, inputs[2], arguments.embedder, deep)
    materials = materials_of(questions, by_id, looked_up(hits, documents), arguments)
    root = Path(arguments.image_root)
    store = Store(Path(teacher.store))
    engine = recorded(teacher_backend(teacher, root), store, root, PromptStyle.TEACHER)
    try:
        results, usage = await ask_teacher(materials, engine, arguments, teacher.concurrency)
        rows = rows_of(results, arguments, teacher.teacher_model, engine.key)
    finally:
        await engine.close()
        store.close()

    dropped = [item for result in results for item in result.dropped]
    write_records(output / "dropped.jsonl", dropped)
    write_records(output / "quarantine.jsonl", quarantined(dropped, command_line()))
    if not rows:
        reasons = Counter(item.reason for item in dropped).most_common(3)
        why = ", ".join(f"{count} {reason}" for reason, count in reasons)
        raise UserError(f"no item became a row ({why}); look at {output / 'dropped.jsonl'}, and check the teacher.")
    write_records(output / "sft.jsonl", rows)
    passed = Counter(str(item.call.kind) for result in results for item in result.passed)
    card = data_card(rows, passed, dropped, usage, arguments, teacher, len(materials))
    write_text(output / "data_card.md", card)
    write_run_record(output, [arguments, teacher], inputs, arguments.seed)
    log.info("%s: %d rows kept, %d items dropped, %d calls", output, len(rows), len(dropped), usage.calls)


def main() -> None:
    """Parse, distil."""
    arguments, teacher = parse(DistillArguments, TeacherArguments)
    asyncio.run(distill(arguments, teacher))


if __name__ == "__main__":
    run(main)
