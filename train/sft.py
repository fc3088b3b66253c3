"""Tune the student: accelerate launch train/sft.py --config configs/sft.yaml [--learning_rate 5e-4].

Reads `sft.jsonl`; writes an adapter folder. A run that was cut short goes on from its last checkpoint; a finished one
is left as it is.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from samrag.config import parse, run
from samrag.errors import UserError
from samrag.provenance import is_finished, write_run_record
from samrag.tracking import setup
from samrag.training.sft_arguments import SftArguments

if TYPE_CHECKING:
    from trl import SFTConfig

logger = logging.getLogger(__name__)


def train(arguments: SftArguments, training: SFTConfig) -> None:
    """Train the adapter and save it."""
    import torch
    from transformers import set_seed

    from samrag.training import sft, student
    from samrag.training.collator import PixelCache

    folder, train_file = Path(training.output_dir), Path(arguments.train_file)
    if training.eval_strategy != "no" and arguments.eval_file is None:
        raise UserError(
            f"eval_strategy is {training.eval_strategy.value!r}, but eval_file is not set; set both or none."
        )
    set_seed(training.seed)
    if arguments.num_threads is not None:
        torch.set_num_threads(arguments.num_threads)

    rows = sft.load_rows(train_file)
    eval_files = [Path(arguments.eval_file)] if arguments.eval_file else []
    eval_rows = [row for path in eval_files for row in sft.spread(sft.load_rows(path), arguments.eval_rows)]
    base = student.model_folder(arguments.model_path)
    requested = copy.deepcopy(training)  # the trainer changes its own
    inputs = [train_file, *eval_files, base]
    if is_finished(folder, [arguments, requested], inputs):
        return
    fingerprint = student.model_fingerprint(base)
    facts = sft.run_facts(arguments, requested, fingerprint)
    checkpoint = sft.resumable(folder, facts, write=training.process_index == 0)
    setup(training.report_to, folder)

    model, processor = student.load_model_and_processor(
        arguments.model_path, "bfloat16" if training.bf16 else "float32"
    )
    pixels = PixelCache(processor.image_processor, arguments.image_cache_mb << 20)
    limits = {"max_prompt_tokens": arguments.max_prompt_tokens, "max_tokens": training.max_length}
    image_root = Path(arguments.image_root) if arguments.image_root else None
    checked = sft.preflight(rows, image_root or train_file.parent, processor, model, pixels, **limits)
    held_out = None
    for path in eval_files:
        held_out = sft.preflight(eval_rows, image_root or path.parent, processor, model, pixels, **limits)

    trainer = sft.build_trainer(model, processor, training, arguments, pixels, checked, held_out)
    if checkpoint is not None:
        logger.info("resuming from %s", checkpoint)
        sft.carry_token_count(trainer, checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if held_out is not None:
        trainer.evaluate()

    student.save(trainer, processor, folder, checked.summary(), fingerprint)
    if trainer.is_world_process_zero():
        write_run_record(folder, [arguments, requested], inputs, training.seed)
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    """Parse the configuration, then train."""
    from trl import SFTConfig

    train(*parse(SftArguments, SFTConfig))


if __name__ == "__main__":
    run(main)
