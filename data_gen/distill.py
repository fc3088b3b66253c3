"""Teacher data for the student: python data_gen/distill.py --config configs/quickstart/distill.yaml.

Every reply goes to the call store as it comes; the rows are made from the store, so a run that was cut short goes on
where it stopped, and an edited one pays only for calls that are new. Writes sft.jsonl, dropped.jsonl, data_card.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from samrag.answering import looked_up, rank_documents, recorded, teacher_backend
from samrag.arguments import DistillArguments, TeacherArguments
from samrag.config import parse, run
from samrag.distilling import ask_teacher, data_card, documents_by_id, rows_of
from samrag.engines.recorded import Store
from samrag.errors import UserError
from samrag.files import read_records, write_records, write_text
from samrag.programs.distill import Distilled
from samrag.prompts import PromptStyle
from samrag.provenance import is_finished, write_run_record
from samrag.schema import Document, Question, Usage

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, rank, ask, filter, write."""
    arguments, teacher = parse(DistillArguments, TeacherArguments)
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file), Path(arguments.index_dir)]
    output = Path(arguments.output_dir)
    questions = read_records(inputs[0], Question)[: arguments.max_questions]
    documents = read_records(inputs[1], Document)
    by_id = documents_by_id(documents, inputs[1], questions)
    if is_finished(output, [arguments, teacher], inputs):
        return

    deep = arguments.negatives_top + max((len(question.support_ids) for question in questions), default=0)
    hits = rank_documents(questions, documents, inputs[2], arguments.embedder, deep)
    rankings = looked_up(hits, documents)

    async def ask() -> tuple[list[Distilled], Usage]:
        store = Store(Path(teacher.store))
        root = Path(arguments.image_root)
        engine = recorded(teacher_backend(teacher, root), store, root, PromptStyle.TEACHER)
        try:
            return await ask_teacher(questions, by_id, rankings, engine, arguments, teacher)
        finally:
            await engine.close()
            store.close()

    results, usage = asyncio.run(ask())
    rows = rows_of(results, arguments.max_per_kind, arguments.seed)
    dropped = [item for result in results for item in result.dropped]
    write_records(output / "dropped.jsonl", dropped)
    if not rows:
        reasons = Counter(item.reason for item in dropped).most_common(3)
        why = ", ".join(f"{count} {reason}" for reason, count in reasons)
        raise UserError(f"no item became a row ({why}); look at {output / 'dropped.jsonl'}, and check the teacher.")
    write_records(output / "sft.jsonl", rows)
    write_text(output / "data_card.md", data_card(rows, dropped, usage, teacher, len(questions)))
    write_run_record(output, [arguments, teacher], inputs, arguments.seed)
    log.info("%s: %d rows kept, %d items dropped, %d calls", output, len(rows), len(dropped), usage.calls)


if __name__ == "__main__":
    run(main)
