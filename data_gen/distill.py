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

from samrag.answering import recorded, teacher_backend
from samrag.arguments import DistillArguments, TeacherArguments
from samrag.asking import distill_stage, dry_run
from samrag.config import parse, run
from samrag.distilling import ask_teacher, options_of, quarantined, read_materials, rows_of
from samrag.engines.base import Engine
from samrag.engines.recorded import Store
from samrag.errors import UserError
from samrag.files import write_records, write_text
from samrag.programs.distill import planned_calls
from samrag.prompts import PromptStyle
from samrag.provenance import command_line, is_finished, write_run_record
from samrag.report.data_card import data_card
from samrag.report.samples import write_samples

log = logging.getLogger(__name__)


async def distill(arguments: DistillArguments, teacher: TeacherArguments) -> None:
    """Rank, ask, filter, write."""
    output = Path(arguments.output_dir)
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file), Path(arguments.index_dir)]
    if is_finished(output, [arguments, teacher], inputs):
        return
    materials, by_id = read_materials(arguments)
    root = Path(arguments.image_root)
    store = Store(Path(teacher.store))
    engine = recorded(teacher_backend(teacher, root), store, root, PromptStyle.TEACHER)
    try:
        results, usage = await ask_teacher(materials, engine, arguments, teacher.concurrency)
        rows = rows_of(results, arguments, teacher.teacher_model, engine.key)
    finally:
        await engine.close()
        store.close()
        log.info("%s", engine.meter.table())

    dropped = [item for result in results for item in result.dropped]
    write_records(output / "dropped.jsonl", dropped)
    write_records(output / "quarantine.jsonl", quarantined(dropped, command_line()))
    if not rows:
        reasons = Counter(item.reason for item in dropped).most_common(3)
        why = ", ".join(f"{count} {reason}" for reason, count in reasons)
        raise UserError(f"no item became a row ({why}); look at {output / 'dropped.jsonl'}, and check the teacher.")
    write_records(output / "sft.jsonl", rows)
    passed = Counter(str(item.call.kind) for result in results for item in result.passed)
    ledger = engine.meter.ledger
    cost = "" if ledger.price is None else f"${ledger.spent_usd:,.4f} in this run; stored replies cost nothing anew"
    refused: Counter[tuple[str, str]] = Counter()
    for result in results:
        refused.update(result.refused)
    card = data_card(rows, passed, dropped, refused, usage, arguments, teacher, len(materials), cost)
    write_text(output / "data_card.md", card)
    write_samples(
        output / "samples.html",
        rows,
        dropped,
        [material.question for material in materials],
        by_id.values(),
        root,
        per_group=arguments.samples_per_group,
        seed=arguments.seed,
    )
    write_run_record(output, [arguments, teacher], inputs, arguments.seed)
    log.info("%s: %d rows kept, %d items dropped, %d calls", output, len(rows), len(dropped), usage.calls)


async def plan(arguments: DistillArguments, teacher: TeacherArguments) -> None:
    """Say what the whole job asks at least, kind by kind, and what there is to ask at once."""
    materials, _ = read_materials(arguments)
    backend = teacher_backend(teacher, Path(arguments.image_root))
    engine = Engine(backend, PromptStyle.TEACHER)
    calls = [call for material in materials for call in planned_calls(material, options_of(arguments))]
    log.info("The job, if every item passes at its first sample (at most %d):", arguments.num_samples)
    for kind in [*sorted({call.kind for call in calls}), None]:
        requests = [engine.request(call) for call in calls if kind in (call.kind, None)]
        log.info("%-16s %s", kind or "all", backend.estimate(requests))
    log.info("%s", await dry_run(distill_stage(arguments, teacher)))


def main() -> None:
    """Parse, distil."""
    arguments, teacher = parse(DistillArguments, TeacherArguments)
    asyncio.run(plan(arguments, teacher) if arguments.dry_run else distill(arguments, teacher))


if __name__ == "__main__":
    run(main)
