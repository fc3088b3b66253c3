"""Fine-tuning the embedder on rows of query, positives and negatives with sentence-transformers' trainer.

Texts get integer keys, so that the loss can tell by text which in-batch passages are known positives of a query.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer
from transformers import TrainerCallback

from samrag.errors import UserError
from samrag.files import read_json, read_json_lines, sha256, write_json
from samrag.retrieval.embedder import Embedder, pooling_mode
from samrag.training.contrastive import NO_KEY, InfoNceLoss

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator

    from samrag.training.retriever_arguments import RetrieverArguments

logger = logging.getLogger(__name__)

START_FILE = "started.json"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
PORTABLE_TYPES = ("Transformer", "Pooling", "Normalize", "Dense")


def load_rows(path: Path, one_row_per_negative: bool = False) -> Dataset:
    """Read `retriever.jsonl`, or any file in FlagEmbedding's format; fields other than query, pos, neg are not needed.

    Args:
        path: The JSONL file.
        one_row_per_negative: Make one row of each (query, negative) pair.

    Returns:
        Columns `query`, `pos`, `neg`, their teacher's scores where the file has them (`pos_scores`, `neg_scores`), and
        keys of the texts: `pos_keys`, `neg_keys`, and `known`, the positives of the same query over all rows.

    Raises:
        UserError: no rows, a row that lacks a query or a positive, or scores that do not match the texts.
    """
    rows = [_checked_row(path, number, value) for number, value in read_json_lines(path)]
    if not rows:
        raise UserError(f"{path} has no rows; mine negatives first (data_gen/mine.py).")
    keys: dict[str, int] = {}
    known: dict[str, set[int]] = {}
    for row in rows:
        for column in ("pos", "neg"):
            row[f"{column}_keys"] = [keys.setdefault(text, len(keys)) for text in row[column]]
        known.setdefault(row["query"], set()).update(row["pos_keys"])
    for row in rows:
        row["known"] = sorted(known[row["query"]])
    if one_row_per_negative:
        rows = [
            {**row, **{name: [row[name][i]] for name in ("neg", "neg_keys", "neg_scores") if name in row}}
            for row in rows
            for i in range(len(row["neg"]))
        ]
    return Dataset.from_list(rows)


def build_trainer(
    model: SentenceTransformer,
    args: SentenceTransformerTrainingArguments,
    rows: Dataset,
    arguments: RetrieverArguments,
    resample: bool = True,
    evaluator: SentenceEvaluator | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> SentenceTransformerTrainer:
    """A trainer over the rows; the model's own query and document prompts are put before the texts.

    Args:
        model: The model to train, with `max_seq_length` as wanted in training.
        args: The trainer's settings; `args.seed` also draws positives and negatives.
        rows: From `load_rows`.
        arguments: Negatives a row, the loss and its ways.
        resample: Draw positives and negatives anew each epoch.
        evaluator: Run when `args.eval_strategy` says so.
        callbacks: More callbacks.

    Raises:
        UserError: a row has no negative though some are wanted.
    """
    num_negatives = arguments.num_negatives
    without = [row["query"] for row in rows.select_columns(["query", "neg_keys"]) if not row["neg_keys"]]
    if num_negatives and without:
        raise UserError(
            f"{len(without)} rows have no negative (first: {without[0]!r}); mine them, or set num_negatives to 0."
        )
    query, document = model.prompts.get("query"), model.prompts.get("document")
    names = ["positive", *(f"negative_{i + 1}" for i in range(num_negatives))]
    args.prompts = {"query": query or "", **dict.fromkeys(names, document or "")} if query or document else None
    if arguments.distillation_weight and "pos_scores" not in rows.column_names:
        raise UserError(
            "distillation_weight needs rows with pos_scores and neg_scores; add a teacher's, or set it to 0."
        )
    columns = RowColumns(
        num_negatives, args.seed, _most_known(rows), arguments.mask_known_positives, bool(arguments.distillation_weight)
    )
    loss = InfoNceLoss(
        model, arguments.temperature, max_chunk_tokens=arguments.max_chunk_tokens,
        cache_gradients=arguments.cache_gradients, across_processes=arguments.across_processes,
        distillation_weight=arguments.distillation_weight,
    )  # fmt: skip
    numbered = rows.add_column("row", list(range(len(rows))))
    return SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=numbered.with_transform(columns),
        loss=loss,
        evaluator=evaluator,
        callbacks=[*([EpochCallback(columns)] if resample else []), *callbacks],
    )


class RowColumns:
    """Turns rows into the trainer's columns: query, positive, negative_1, ..., and the label of `InfoNceLoss`.

    A draw depends on the seed, the epoch and the row alone, so a resumed run sees what an unbroken one sees.
    """

    def __init__(
        self,
        num_negatives: int,
        seed: int,
        most_known: int,
        mask_known_positives: bool = True,
        with_scores: bool = False,
    ) -> None:
        self.num_negatives = num_negatives
        self.seed = seed
        self.most_known = most_known
        self.mask_known_positives = mask_known_positives
        self.with_scores = with_scores
        self.epoch = 0

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Columns for the rows of a batch."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        drawn = [self._draw(row) for row in rows]
        columns: dict[str, list[Any]] = {"query": [row["query"] for row in rows]}
        columns["positive"] = [texts[0] for texts, *_ in drawn]
        for i in range(self.num_negatives):
            columns[f"negative_{i + 1}"] = [texts[i + 1] for texts, *_ in drawn]
        if self.mask_known_positives or self.with_scores:
            fill = [NO_KEY] * self.most_known
            columns["label"] = [
                [*keys, *((row["known"] if self.mask_known_positives else []) + fill)[: self.most_known], *scores]
                for row, (_, keys, scores) in zip(rows, drawn, strict=True)
            ]
        return columns

    def _draw(self, row: Mapping[str, Any]) -> tuple[list[str], list[int], list[float]]:
        """One positive, then the negatives (repeated in turn when there are too few): texts, keys, teacher's scores."""
        random = np.random.default_rng([self.seed, self.epoch, row["row"]])
        chosen = int(random.integers(len(row["pos"])))
        order = random.permutation(len(row["neg"])).tolist()
        negatives = [order[i % len(order)] for i in range(self.num_negatives)]
        texts = [row["pos"][chosen], *(row["neg"][i] for i in negatives)]
        keys = [row["pos_keys"][chosen], *(row["neg_keys"][i] for i in negatives)]
        if not self.with_scores:
            return texts, keys, []
        return texts, keys, [row["pos_scores"][chosen], *(row["neg_scores"][i] for i in negatives)]


class EpochCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the columns which epoch it is, before the epoch's data loader (and its workers) start."""

    def __init__(self, columns: RowColumns) -> None:
        self.columns = columns

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch; on a resumed run `state.epoch` lies within it."""
        self.columns.epoch = int((state.epoch or 0) + 1e-6)


def add_adapter(model: SentenceTransformer, rank: int) -> None:
    """Put a LoRA adapter on all linear layers of the encoder; `merge_adapter` makes it part of the weights."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="FEATURE_EXTRACTION")
    model[0].model = get_peft_model(model[0].model, config)


def merge_adapter(model: SentenceTransformer) -> None:
    """Merge the adapter of `add_adapter`, if there is one."""
    encoder = model[0].model
    if hasattr(encoder, "merge_and_unload"):
        model[0].model = encoder.merge_and_unload()


def mix_weights(model: SentenceTransformer, base: SentenceTransformer, base_weight: float) -> None:
    """Move the model's weights towards the base's: (1 - base_weight) * tuned + base_weight * base (LM-Cocktail)."""
    import torch

    tuned, original = model.state_dict(), base.state_dict()
    with torch.no_grad():
        for name, tensor in tuned.items():
            if tensor.is_floating_point():
                tensor.lerp_(original[name].to(tensor.device, tensor.dtype), base_weight)


def save_model(model: SentenceTransformer, folder: Path, max_length: int | None, probes: Sequence[str]) -> None:
    """Save a folder that gives the same vectors in sentence-transformers, FlagEmbedding and `Embedder`, and check it.

    The configuration is written in the form that all sentence-transformers versions, and servers that read
    `1_Pooling`, understand. Checkpoints in the same folder stay.

    Args:
        model: The trained model; a Normalize module is added if it has none.
        folder: Where it is saved.
        max_length: Tokens a text is cut to when the folder is used; None leaves the model's present setting.
        probes: Texts whose vectors must survive saving and loading.

    Raises:
        RuntimeError: the saved folder gives other vectors.
    """
    from sentence_transformers.sentence_transformer.modules import Normalize

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "modules.json").unlink(missing_ok=True)  # a folder without it is not a model (Embedder.load)
    if not any(isinstance(module, Normalize) for module in model):
        model.append(Normalize())
    if max_length is not None:
        model.max_seq_length = max_length
    model.save_pretrained(str(folder), create_model_card=False)
    _write_portable_config(model, folder)
    before = Embedder(model, folder).encode_queries(probes)
    after = Embedder.load(folder, device="cpu").encode_queries(probes)
    lowest = float((before * after).sum(axis=1).min())
    if lowest < 0.9999:
        raise RuntimeError(f"{folder} does not give the trained model's vectors back (cosine {lowest:.5f})")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint: `trainer_state.json` is written last."""
    numbered = [
        (int(match.group(1)), path)
        for path in (Path(folder).iterdir() if Path(folder).is_dir() else ())
        if (match := CHECKPOINT.fullmatch(path.name)) and (path / "trainer_state.json").is_file()
    ]
    return max(numbered)[1] if numbered else None


def run_facts(
    arguments: RetrieverArguments, training: SentenceTransformerTrainingArguments, base: str
) -> dict[str, Any]:
    """What decides the trained weights; `base` is the identity of the base model."""
    facts = asdict(arguments)
    for name in ("base_model", "train_file", "eval_file", "num_threads", "early_stopping_patience"):
        del facts[name]
    return {
        **facts,
        "base": base,
        "train_data": sha256(Path(arguments.train_file)),
        "learning_rate": training.learning_rate,
        "num_train_epochs": training.num_train_epochs,
        "max_steps": training.max_steps,
        "batch_size": training.train_batch_size * training.gradient_accumulation_steps * training.world_size,
        "seed": training.seed,
    }


def start_run(folder: Path, facts: Mapping[str, Any], write: bool = True) -> None:
    """Note what a run trains on, so that it is never resumed as another one.

    Args:
        folder: The output folder.
        facts: What decides the result (hashes of data and base model, settings); JSON values.
        write: Note it; False on all processes but the first.

    Raises:
        UserError: the folder holds a run with other facts, or checkpoints of something else.
    """
    path = Path(folder) / START_FILE
    if path.is_file():
        found = read_json(path)
        changed = sorted(name for name in {*facts, *found} if facts.get(name) != found.get(name))
        if changed:
            raise UserError(
                f"{folder} holds a run with another {', '.join(changed)}; choose another output_dir, or delete it."
            )
    elif last_checkpoint(folder) is not None:
        raise UserError(f"{folder} holds checkpoints of another program; choose another output_dir.")
    elif write:
        write_json(path, dict(facts))


def _checked_row(path: Path, number: int, value: Mapping[str, Any]) -> dict[str, Any]:
    query, pos, neg = value.get("query"), value.get("pos"), value.get("neg", [])
    if not isinstance(query, str) or not query.strip():
        raise UserError(f"{path}, line {number}: `query` must be a text.")
    for name, texts in (("pos", pos), ("neg", neg)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{path}, line {number}: `{name}` must be a list of texts.")
    if not pos:
        raise UserError(f"{path}, line {number}: `pos` is empty; a row needs a positive.")
    row = {"query": query, "pos": pos, "neg": neg}
    for name, texts in (("pos_scores", pos), ("neg_scores", neg)):
        scores = value.get(name)
        if scores:  # an empty list says that there are none
            if not isinstance(scores, list) or len(scores) != len(texts) or not all(map(_is_number, scores)):
                raise UserError(f"{path}, line {number}: `{name}` must have a number for each of {len(texts)} texts.")
            row[name] = [float(score) for score in scores]
    return row


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _most_known(rows: Dataset) -> int:
    return max(len(known) for known in rows["known"])


def _write_portable_config(model: SentenceTransformer, folder: Path) -> None:
    """Rewrite the configuration in sentence-transformers' older form, which its later versions read as well."""
    modules = read_json(folder / "modules.json")
    names = [module["type"].rsplit(".", 1)[-1] for module in modules]
    mode = pooling_mode(model)
    if not set(names) <= set(PORTABLE_TYPES) or mode not in ("mean", "cls"):
        logger.warning("the model's modules (%s, pooling %s) have no older form; saved in the new one", names, mode)
        return
    pooling = folder / modules[names.index("Pooling")]["path"] / "config.json"
    kept = read_json(pooling)
    write_json(
        pooling,
        {
            "word_embedding_dimension": kept["embedding_dimension"],
            "pooling_mode_cls_token": mode == "cls",
            "pooling_mode_mean_tokens": mode == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
            "include_prompt": kept["include_prompt"],
        },
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": model.max_seq_length, "do_lower_case": False})
    for module, name in zip(modules, names, strict=True):
        module["type"] = f"sentence_transformers.models.{name}"
    write_json(folder / "modules.json", modules)
