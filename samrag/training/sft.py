"""Tuning the student on SFT rows: rows to examples, checks before training, the trainer, the saved adapter.

Every check here stands for a way in which LLaVA with TRL trains without an error and learns the wrong thing: no stop
token, loss on the prompt, a prompt that inference writes differently, image tokens without features, an adapter in the
vision tower. Left out: quantised bases, packing, and evaluation by generation (`inference/` does that).
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.errors import UserError
from samrag.files import read_json, read_lines, read_records, sha256, within, write_json
from samrag.prompts import PromptStyle, template_hash
from samrag.prompts.render import IMAGE_MARK
from samrag.provenance import resolved
from samrag.schema import SftRow
from samrag.training.student import check_trainable, inference_ids, lora_config

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, ProcessorMixin
    from trl import SFTConfig, SFTTrainer

    from samrag.training.collator import PixelCache
    from samrag.training.sft_arguments import SftArguments

logger = logging.getLogger(__name__)

FACTS_FILE = "sft_run.json"
"""What a run with checkpoints was begun with."""
FREE_TO_CHANGE = ("model_path", "train_file", "image_root", "eval_file", "eval_rows", "image_cache_mb", "num_threads")
DECISIVE = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "optim"),
    *("max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("train_sampling_strategy", "max_length", "loss_type", "seed", "data_seed", "bf16", "fp16"),
)


def load_rows(path: Path) -> list[SftRow]:
    """Read `sft.jsonl` and check every row.

    Raises:
        UserError: no rows; a row with an unknown role, without a user turn, with an image marker outside user turns or
            not one for each image; or one rendered with other prompt templates than the installed ones.
    """
    rows = read_records(path, SftRow)
    current = template_hash(PromptStyle.STUDENT)
    for (number, _), row in zip(read_lines(path), rows, strict=True):
        where = f"{path}, line {number}"
        if row.template != current:
            raise UserError(
                f"{where}: rendered with prompt templates {row.template!r}, but the installed ones are {current!r}; "
                "write the file again with data_gen/distill.py (stored replies are reused)."
            )
        if not any(message.role == "user" for message in row.messages):
            raise UserError(f"{where}: the row has no user turn to answer.")
        for message in row.messages:
            if message.role != "user" and IMAGE_MARK in message.content:
                raise UserError(f"{where}: {IMAGE_MARK} may stand in user turns only, not in a {message.role} turn.")
    return rows


def spread(rows: Sequence[SftRow], limit: int) -> list[SftRow]:
    """At most `limit` rows, evenly over the file; 0 is all."""
    if not limit or len(rows) <= limit:
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]


def to_dataset(rows: Sequence[SftRow], image_root: Path) -> Dataset:
    """Rows in TRL's conversational prompt/completion form.

    The last assistant turn is the completion, so that TRL, too, puts loss on nothing else. Texts are split at the
    image markers into parts, which the chat template joins to the same string again. Images are paths, decoded when
    they are used; rows without have an empty list.

    Raises:
        UserError: an image path that leaves `image_root`.
    """
    from datasets import Dataset, Features, List, Value

    turn = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    texts = List(Value("string"))
    features = Features({"prompt": List(turn), "completion": List(turn), "images": texts, "kind": Value("string")})
    columns: dict[str, list[Any]] = {name: [] for name in features}
    for row in rows:
        turns = [{"role": message.role, "content": content_parts(message.content)} for message in row.messages]
        columns["prompt"].append(turns[:-1])
        columns["completion"].append(turns[-1:])
        columns["images"].append([str(within(image_root, image)) for image in row.images])
        columns["kind"].append(row.kind)
    return Dataset.from_dict(columns, features=features)


@dataclass(frozen=True, slots=True)
class Preflight:
    """Encoded rows that fit, and what was found on the way."""

    dataset: Dataset
    """Columns `input_ids`, `label_start`, `images`, `length`, `kind`: what `SftCollator` reads."""
    excluded: dict[str, int]
    """Rows left out, by reason."""
    rows: dict[str, dict[str, int]]
    """Rows kept, by kind and label."""
    num_tokens: int
    longest: int
    image_tokens: int
    """Tokens an image takes; 0 without images."""

    def summary(self) -> dict[str, Any]:
        """For records and logs: everything but the rows."""
        return {
            "rows": self.rows,
            "excluded": self.excluded,
            "num_tokens": self.num_tokens,
            "longest": self.longest,
            "image_tokens": self.image_tokens,
        }


def preflight(
    rows: Sequence[SftRow],
    image_root: Path,
    processor: ProcessorMixin,
    model: PreTrainedModel,
    pixels: PixelCache,
    *,
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
) -> Preflight:
    """Encode every row once, leave out those that cannot be learnt, and check the rest against inference.

    A row is never cut: its target would be lost, or its question.

    Args:
        rows: Checked rows.
        image_root: Folder of the image paths.
        processor: With samrag's chat template.
        model: The base; its context length is a limit, and its vision tower says how many features an image has.
        pixels: Takes in the images.
        max_prompt_tokens: Limit of the prompt, image tokens included.
        max_tokens: Limit of the whole row.

    Raises:
        UserError: no row is left, an image cannot be read, or the processor does not fit the model.
    """
    from datasets import Dataset

    examples = to_dataset(rows, image_root)
    image_tokens = _image_tokens(examples["images"], processor, model, pixels)
    prompts, targets = _encode(examples, processor, image_tokens)
    context = model.config.get_text_config().max_position_embeddings
    limit = min(context, max_tokens or context)
    reasons = [
        _unfit(row, prompt, target, processor.tokenizer, max_prompt_tokens or limit, limit)
        for row, prompt, target in zip(rows, prompts, targets, strict=True)
    ]
    excluded = dict(sorted(Counter(filter(None, reasons)).items()))
    found = ", ".join(f"{count} {reason}" for reason, count in excluded.items()) or "none"
    kept = [i for i, reason in enumerate(reasons) if not reason]
    if not kept:
        raise UserError(f"none of {len(rows)} rows can be learnt ({found}); a row may have {limit} tokens.")
    counts: dict[str, Counter[str]] = {}
    for i in kept:
        if prompts[i].count(processor.image_token_id) != image_tokens * len(rows[i].images):
            raise UserError(
                f"question {rows[i].question_id!r}: not {image_tokens} image tokens for each of its images."
            )
        if rows[i].kind not in counts:
            _check_against_inference(rows[i], examples[i], prompts[i], processor)
        counts.setdefault(rows[i].kind, Counter())[rows[i].label] += 1
    lengths = [len(prompts[i]) + len(targets[i]) for i in kept]
    dataset = Dataset.from_dict(
        {
            "input_ids": [prompts[i] + targets[i] for i in kept],
            "label_start": [len(prompts[i]) for i in kept],
            "images": [examples[i]["images"] for i in kept],
            "length": lengths,
            "kind": [rows[i].kind for i in kept],
        }
    )
    by_kind = {kind: dict(sorted(labels.items())) for kind, labels in sorted(counts.items())}
    result = Preflight(dataset, excluded, by_kind, sum(lengths), max(lengths), image_tokens)
    logger.info(
        "%d rows, %d tokens, longest %d, %d tokens an image; left out: %s",
        *(len(kept), result.num_tokens, result.longest, image_tokens, found),
    )
    return result


def build_trainer(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    training: SFTConfig,
    arguments: SftArguments,
    pixels: PixelCache,
    train: Preflight,
    evaluation: Preflight | None = None,
) -> SFTTrainer:
    """TRL's trainer with an adapter, our collator and, for `train_sampling_strategy: group_by_length`, our order."""
    from trl import SFTTrainer

    from samrag.training.collator import IGNORED, LengthGroupedBatches, SftCollator

    class StudentTrainer(SFTTrainer):  # type: ignore[misc]
        """Its own length groups come longest first, in an order that a resumed run does not see again."""

        def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
            if self.args.train_sampling_strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            rows_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            return LengthGroupedBatches(train.dataset["length"], rows_per_step, self.args.data_seed or self.args.seed)

    training.remove_unused_columns = False
    training.dataset_kwargs = {**(training.dataset_kwargs or {}), "skip_prepare_dataset": True}
    pad = processor.tokenizer.pad_token_id
    collator = SftCollator(pixels, processor.tokenizer.eos_token_id if pad is None else pad)
    for dataset in (train.dataset, evaluation.dataset if evaluation else train.dataset):
        labels = collator([dataset[0]])["labels"]
        assert labels[0, -1] == processor.tokenizer.eos_token_id, "the target does not end with the stop token"
        assert not (labels == processor.image_token_id).any(), "an image token is among the labels"
        assert (labels[0, :-1] != IGNORED).any(), "the target holds nothing but the stop token"
    trainer = StudentTrainer(
        model=model,
        args=training,
        data_collator=collator,
        train_dataset=train.dataset,
        eval_dataset=evaluation.dataset if evaluation else None,
        processing_class=processor,
        peft_config=lora_config(arguments),
    )
    check_trainable(trainer.model, arguments)
    return trainer


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; `trainer_state.json` is written last."""
    numbered = [
        (int(match.group(1)), path)
        for path in (Path(folder).iterdir() if Path(folder).is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and (path / "trainer_state.json").is_file()
    ]
    return max(numbered)[1] if numbered else None


def run_facts(arguments: SftArguments, training: SFTConfig, base_fingerprint: str) -> dict[str, Any]:
    """What decides the trained weights: a run is resumed only with the same facts."""
    own = {k: v for k, v in resolved([arguments])["SftArguments"].items() if k not in FREE_TO_CHANGE}
    theirs = resolved([training])["SFTConfig"]
    return {
        **own,
        **{name: theirs[name] for name in DECISIVE},
        "base_model": base_fingerprint,
        "train_data": sha256(Path(arguments.train_file)),
    }


def resumable(folder: Path, facts: Mapping[str, Any], write: bool = True) -> Path | None:
    """The checkpoint to go on from, if there is one; notes the facts of a run that begins.

    Args:
        folder: The output folder.
        facts: See `run_facts`.
        write: Note them; False on all processes but the first.

    Raises:
        UserError: the folder holds checkpoints of a run with other facts.
    """
    checkpoint, path = last_checkpoint(folder), Path(folder) / FACTS_FILE
    if checkpoint is None:
        if write:
            write_json(path, dict(facts))
        return None
    found = read_json(path) if path.is_file() else {}
    changed = sorted(name for name in {*facts, *found} if facts.get(name) != found.get(name))
    if changed:
        what = ", ".join(changed)
        raise UserError(f"{folder} holds checkpoints of another run ({what}); choose another output_dir, or delete it.")
    return checkpoint


def carry_token_count(trainer: SFTTrainer, checkpoint: Path) -> None:
    """Let `num_tokens` go on from the last count logged before the checkpoint; TRL 1.16 starts again at 0."""
    history = read_json(checkpoint / "trainer_state.json")["log_history"]
    counts = [int(entry["num_tokens"]) for entry in history if "num_tokens" in entry]
    trainer._total_train_tokens = max(counts, default=0)


def content_parts(text: str) -> list[dict[str, str | None]]:
    """Text split at the image markers into `text` and `image` parts; no empty text part beside an image."""
    parts: list[dict[str, str | None]] = []
    for i, piece in enumerate(text.split(IMAGE_MARK)):
        if i:
            parts.append({"type": "image", "text": None})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def _encode(examples: Dataset, processor: ProcessorMixin, image_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and targets, each tokenized by itself: so a prompt has the ids of inference."""
    from trl import apply_chat_template

    texts = [apply_chat_template({k: row[k] for k in ("prompt", "completion")}, processor) for row in examples]
    mark, tokenizer = processor.image_token, processor.tokenizer
    prompts = [text["prompt"].replace(mark, mark * image_tokens) for text in texts]
    targets = [text["completion"] for text in texts]
    return (
        tokenizer(prompts, add_special_tokens=False)["input_ids"],
        tokenizer(targets, add_special_tokens=False)["input_ids"],
    )


def _check_against_inference(
    row: SftRow, example: Mapping[str, Any], prompt: list[int], processor: ProcessorMixin
) -> None:
    if inference_ids(processor, example["prompt"], example["images"]) != prompt:
        raise UserError(
            f"the prompt of question {row.question_id!r} has other tokens in training than at inference; "
            "the processor's tokenizer or chat template does not fit LLaVA."
        )


def _unfit(row: SftRow, prompt: list[int], target: list[int], tokenizer: Any, max_prompt: int, limit: int) -> str:
    """Why a row cannot be learnt; empty when it can."""
    if not row.messages[-1].content.strip():
        return "without a target"
    special = set(tokenizer.all_special_ids)
    if target[-1] != tokenizer.eos_token_id or special & set(target[:-1]):
        return "with a special token in the target"
    if len(prompt) > max_prompt:
        return f"with a prompt over {max_prompt} tokens"
    if len(prompt) + len(target) > limit:
        return f"over {limit} tokens"
    return ""


def _image_tokens(
    images: Sequence[Sequence[str]], processor: ProcessorMixin, model: PreTrainedModel, pixels: PixelCache
) -> int:
    """Tokens an image takes, which must be the features that the model makes of it."""
    import torch

    paths = list(dict.fromkeys(itertools.chain.from_iterable(images)))
    if not paths:
        return 0
    shapes = sorted({tuple(pixels.add(path)) for path in paths})
    if len(shapes) > 1:
        raise UserError(f"images differ in size after preprocessing ({shapes[:2]}); it must crop them to one size.")
    prompt = [{"role": "user", "content": [{"type": "image"}]}]
    tokens = inference_ids(processor, prompt, paths[:1]).count(processor.image_token_id)
    with torch.no_grad():
        given = pixels[paths[0]][None].to(model.device, model.dtype)
        features = model.get_image_features(pixel_values=given).pooler_output[0].shape[0]
    if tokens != features:
        raise UserError(
            f"an image has {tokens} tokens in the prompt but {features} features in the model; "
            "patch_size, vision_feature_select_strategy or num_additional_image_tokens of the processor is wrong."
        )
    return tokens
