"""Tune the student: accelerate launch train/sft.py --config configs/sft.yaml [--learning_rate 5e-4].

Reads `sft.jsonl`; writes an adapter folder, or a whole model for `tuning: full`. A run that was cut short goes on from
its last checkpoint; a finished one is left as it is.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from samrag.config import parse, run
from samrag.errors import UserError
from samrag.provenance import is_finished, write_run_record
from samrag.tracking import resume_run, setup
from samrag.training.sft_arguments import SftArguments

if TYPE_CHECKING:
    from trl import SFTConfig

logger = logging.getLogger(__name__)


def train(arguments: SftArguments, training: SFTConfig) -> None:
    """Train the student and save it."""
    import torch
    from safetensors import SafetensorError
    from transformers import set_seed

    from samrag import vlm
    from samrag.training import reporting, sft, student

    folder, train_files = Path(training.output_dir), [Path(name) for name in arguments.train_files]
    if training.eval_strategy != "no" and arguments.eval_file is None:
        raise UserError(
            f"eval_strategy is {training.eval_strategy.value!r}, but eval_file is not set; set both or none."
        )
    set_seed(training.seed)
    if arguments.num_threads is not None:
        torch.set_num_threads(arguments.num_threads)

    image_root = Path(arguments.image_root) if arguments.image_root else None
    rows = sft.mixed([sft.located(path, image_root) for path in train_files], arguments.train_weights, training.seed)
    eval_files = [Path(arguments.eval_file)] if arguments.eval_file else []
    eval_rows = [row for path in eval_files for row in sft.spread(sft.located(path, image_root), arguments.eval_rows)]
    base = vlm.model_folder(arguments.model_path)
    requested = copy.deepcopy(training)  # the trainer changes its own
    inputs = [*train_files, *eval_files, base]
    if is_finished(folder, [arguments, requested], inputs):
        return
    fingerprint = vlm.model_fingerprint(base)
    facts = sft.run_facts(arguments, requested, fingerprint)
    checkpoint = sft.resumable(folder, facts, write=training.process_index == 0)
    setup(training.report_to, folder)
    resume_run(training.report_to, folder, new=checkpoint is None)

    model, chat = student.load(arguments, "bfloat16" if training.bf16 else "float32")
    limits = {"max_prompt_tokens": arguments.max_prompt_tokens, "max_tokens": training.max_length}
    checked = sft.preflight(rows, chat, model, shorten=arguments.shorten_documents, **limits)
    held_out = (
        sft.preflight(eval_rows, chat, model, shorten=arguments.shorten_documents, **limits) if eval_rows else None
    )

    sft.warn_of_gaps(checked, held_out)
    trainer = sft.build_trainer(model, chat, training, arguments, checked, held_out)
    if checkpoint is not None:
        logger.info("resuming from %s", checkpoint)
        sft.carry_token_count(trainer, checkpoint)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        scores = trainer.evaluate() if held_out is not None else {}
        student.save(trainer, chat, folder, {**checked.summary(), "scores": scores}, fingerprint)
    except torch.OutOfMemoryError as error:
        raise UserError(sft.out_of_memory_advice(arguments, training, checked)) from error
    except (OSError, RuntimeError, SafetensorError) as error:
        if not sft.is_write_failure(error):
            raise
        raise UserError(
            f"{folder}: nothing more can be written ({vlm.first_line(error)}); free some space and run the same command"
            " again: it goes on from the last whole checkpoint."
        ) from error
    if trainer.is_world_process_zero():
        write_run_record(folder, [arguments, requested], inputs, training.seed)
        reporting.report_artifacts(folder, train_files, folder.name)
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    """Parse the configuration, then train."""
    from trl import SFTConfig

    train(*parse(SftArguments, SFTConfig))


if __name__ == "__main__":
    run(main)
