"""A teacher stage by batches, at half the price: python data_gen/batch.py --config configs/batch.yaml.

Asks what the stage's store lacks, round after round, because later calls depend on earlier replies. It can be stopped
at any time: the state is on disk, and the same command goes on. When nothing is left to ask, run the stage itself; it
finds every reply in its store. With `--wait false` it submits and imports what it can now, and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

from samrag.answering import teacher_backend
from samrag.arguments import BatchArguments
from samrag.asking import Stage, dry_run, read_stage
from samrag.config import parse, run
from samrag.engines.batch import BatchRun
from samrag.engines.pending import Layer, PendingBackend
from samrag.engines.recorded import Store
from samrag.prompts import PromptStyle

log = logging.getLogger(__name__)


async def batch(arguments: BatchArguments, stage: Stage) -> None:
    """Import what has come, export what is lacking, submit, until nothing is lacking."""
    backend = teacher_backend(stage.teacher, stage.image_root)
    store = Store(Path(stage.teacher.store))
    batches = BatchRun(
        Path(arguments.batch_dir),
        backend,
        store,
        max_requests=arguments.max_requests,
        max_bytes=round(arguments.max_file_mb * 1e6),
        poll_s=arguments.poll_s,
    )
    try:
        while await batches.settle(arguments.wait):
            given_up = batches.failures
            pending = PendingBackend(backend.identity, store, stage.image_root, given_up)
            layer = Layer(pending, PromptStyle.TEACHER, backend.repairs)
            count = await batches.export(layer.wanted(stage.programs()))
            total = layer.num_finished + layer.num_waiting
            log.info("%d of %d programs are finished; %d requests to ask", layer.num_finished, total, count)
            if not count and batches.failures == given_up:
                log.info("nothing is left to ask; now run data_gen/%s.py", arguments.stage)
                break
        else:
            log.info("batches are under way; run the same command again")
    finally:
        await backend.close()
        store.close()
        reasons = Counter(reason for reason, _ in batches.state.failed.values())
        for name, number in sorted((batches.counts + reasons).items()):
            log.info("%-24s %10d", name, number)


def main() -> None:
    """Parse, go as far as it goes."""
    (arguments,) = parse(BatchArguments)
    stage = read_stage(arguments.stage, arguments.stage_config)
    if arguments.dry_run:
        log.info("%s", asyncio.run(dry_run(stage, batch=True)))
    else:
        asyncio.run(batch(arguments, stage))


if __name__ == "__main__":
    run(main)
