"""Fine-tune the retriever: accelerate launch train/retriever.py --config configs/retriever.yaml [--temperature 0.05].

Reads `retriever.jsonl`; writes a sentence-transformers folder. A run that was cut short goes on from its last
checkpoint; a finished one is left as it is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samrag import config, provenance, tracking
from samrag.errors import UserError
from samrag.files import write_json, write_text
from samrag.training.retriever_arguments import RetrieverArguments

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformerTrainingArguments

logger = logging.getLogger(__name__)


def train(arguments: RetrieverArguments, training: SentenceTransformerTrainingArguments) -> None:
    """Train, save, measure."""
    from transformers import set_seed

    from samrag.retrieval.embedder import Embedder
    from samrag.training import flagembedding, retriever
    from samrag.training.callbacks import early_stopping
    from samrag.training.retrieval_evaluation import HeldOutEvaluator, comparison

    folder = Path(training.output_dir)
    given = [arguments, copy.copy(training)]  # the trainer changes its arguments
    inputs = [Path(path) for path in (arguments.train_file, arguments.eval_file) if path]
    check_inputs(arguments, training, inputs)
    if provenance.is_finished(folder, given, inputs):
        return
    set_seed(training.seed)
    tracking.setup(training.report_to, folder)
    embedder = Embedder.load(
        arguments.base_model,
        arguments.query_instruction,
        device=training.device.type,
        num_threads=arguments.num_threads,
    )
    facts = retriever.run_facts(arguments, training, embedder.identity)
    retriever.start_run(folder, facts, write=training.process_index == 0)

    rows = retriever.load_rows(Path(arguments.train_file), arguments.one_row_per_negative)
    evaluator = before = None
    if arguments.eval_file:
        held_out = retriever.load_rows(Path(arguments.eval_file))
        evaluator = HeldOutEvaluator(held_out, rows, training.per_device_eval_batch_size)
        before = evaluator.scores(embedder.model)

    model, own_length = embedder.model, embedder.max_length
    model.max_seq_length = min(arguments.max_length, own_length or arguments.max_length)
    if arguments.trainer == "flagembedding":
        metrics, is_first = flagembedding.train(embedder, rows, arguments, training), training.process_index == 0
    else:
        if arguments.lora_r is not None:
            retriever.add_adapter(model, arguments.lora_r)
        callbacks = early_stopping(arguments.early_stopping_patience, training)
        trainer = retriever.build_trainer(model, training, rows, arguments, evaluator=evaluator, callbacks=callbacks)
        checkpoint = retriever.last_checkpoint(folder)
        if checkpoint is not None:
            logger.info("resuming from %s", checkpoint)
        metrics = dict(trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None).metrics)
        retriever.merge_adapter(model)
        is_first = trainer.is_world_process_zero()
    if arguments.base_weight:
        retriever.mix_weights(model, Embedder.load(arguments.base_model).model, arguments.base_weight)

    if is_first:
        if evaluator is not None and before is not None:
            model.max_seq_length = own_length
            after = evaluator.scores(model)
            metrics |= {name: sum(values) / len(values) for name, values in after.items()}
            write_text(folder / "report.md", comparison(before, after, len(evaluator.corpus)))
        retriever.save_model(model, folder, own_length, rows["query"][:8])
        write_json(folder / "metrics.json", metrics)
        provenance.write_run_record(folder, given, inputs, training.seed)
    if arguments.trainer == "samrag":
        trainer.accelerator.wait_for_everyone()


def check_inputs(
    arguments: RetrieverArguments, training: SentenceTransformerTrainingArguments, inputs: Sequence[Path]
) -> None:
    """Refuse, before anything is loaded, what cannot work."""
    for path in inputs:
        if not path.is_file():
            raise UserError(f"{path} does not exist; mine negatives first (data_gen/mine.py), or check the path.")
    if training.eval_strategy != "no" and not arguments.eval_file:
        raise UserError("eval_strategy is set, but eval_file is not; give held-out rows.")
    if arguments.lora_r is not None and training.save_strategy != "no":
        raise UserError("lora_r keeps no checkpoints yet that a run could go on from; set save_strategy: no.")


def main() -> None:
    """Parse the configuration, then train."""
    from sentence_transformers import SentenceTransformerTrainingArguments

    train(*config.parse(RetrieverArguments, SentenceTransformerTrainingArguments))


if __name__ == "__main__":
    config.run(main)
