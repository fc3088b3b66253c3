"""FlagEmbedding's own runner on the same rows: the paper's framework, one switch away.

It neither evaluates nor keeps a best checkpoint, masks no known positives, and saves a folder that others load with
another pooling; the folder is therefore written again by `samrag.training.retriever.save_model`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import AutoModel, TrainerCallback

from samrag.errors import UserError
from samrag.retrieval.embedder import Embedder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformerTrainingArguments

    from samrag.training.retriever_arguments import RetrieverArguments

_SHARED = (
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("warmup_steps", "lr_scheduler_type", "weight_decay", "max_grad_norm", "seed", "bf16", "fp16", "use_cpu"),
    *("dataloader_drop_last", "logging_steps", "logging_strategy", "disable_tqdm", "report_to", "optim"),
)
_OURS = ("cache_gradients", "lora_r", "early_stopping_patience")


def train(
    embedder: Embedder,
    rows: Dataset,
    arguments: RetrieverArguments,
    training: SentenceTransformerTrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train with FlagEmbedding's runner; the embedder then holds the tuned weights. Returns the trainer's metrics.

    Raises:
        UserError: an option that only our trainer has.
    """
    from FlagEmbedding.finetune.embedder.encoder_only.base import (
        EncoderOnlyEmbedderDataArguments,
        EncoderOnlyEmbedderModelArguments,
        EncoderOnlyEmbedderRunner,
        EncoderOnlyEmbedderTrainingArguments,
    )

    for name in _OURS:
        if getattr(arguments, name):
            raise UserError(f"{name} is an option of trainer: samrag; leave it out with trainer: flagembedding.")
    if training.eval_strategy != "no":
        raise UserError("FlagEmbedding's trainer does not evaluate; set eval_strategy: no, or use trainer: samrag.")
    if embedder.pooling not in ("cls", "mean"):
        raise UserError(f"FlagEmbedding pools by cls or mean, the base model by {embedder.pooling}.")
    folder = Path(training.output_dir) / "flagembedding"
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.with_name("flagembedding_rows.jsonl")
    names = [name for name in ("query", "pos", "neg", "pos_scores", "neg_scores") if name in rows.column_names]
    data.write_text(
        "".join(json.dumps({name: row[name] for name in names}, ensure_ascii=False) + "\n" for row in rows),
        encoding="utf-8",
    )
    base = folder.with_name("flagembedding_base")
    transformer = embedder.model[0].model
    transformer.save_pretrained(base)
    embedder.model.tokenizer.save_pretrained(base)
    runner = EncoderOnlyEmbedderRunner(
        model_args=EncoderOnlyEmbedderModelArguments(model_name_or_path=str(base)),
        data_args=EncoderOnlyEmbedderDataArguments(
            train_data=[str(data)], train_group_size=1 + arguments.num_negatives, query_max_len=arguments.max_length,
            passage_max_len=arguments.max_length, query_instruction_for_retrieval=embedder.query_instruction or None,
            knowledge_distillation=bool(arguments.distillation_weight),
        ),
        training_args=EncoderOnlyEmbedderTrainingArguments(
            output_dir=str(folder), temperature=arguments.temperature, sentence_pooling_method=embedder.pooling,
            negatives_cross_device=arguments.across_processes, save_strategy="no",
            **{name: getattr(training, name) for name in _SHARED},
        ),
    )  # fmt: skip
    for callback in callbacks:
        runner.trainer.add_callback(callback)
    metrics: dict[str, Any] = dict(runner.trainer.train().metrics)
    runner.trainer.save_model()
    tuned = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    transformer.load_state_dict(tuned.state_dict())
    return metrics
