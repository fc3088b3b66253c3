"""Tuning the student on SFT rows: rows to examples, checks before training, and the trainer.

Every check here stands for a way in which a vision-language model with TRL trains without an error and learns the wrong
thing: no stop token, loss on the prompt, a prompt that inference writes differently, image tokens without features, an
adapter in the vision tower, tensors that get no gradient.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samrag.calls import JUDGEMENTS, CallKind
from samrag.errors import UserError
from samrag.files import read_json, read_lines, read_records, sha256, within, write_json
from samrag.prompts import PromptStyle, template_hash
from samrag.prompts.render import IMAGE_MARK, shorten_documents
from samrag.provenance import resolved
from samrag.schema import ChatMessage, SftRow
from samrag.training.student import check_trainable, freeze, lora_config

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel
    from trl import SFTConfig, SFTTrainer

    from samrag.training.evaluation import HeldOut
    from samrag.training.sft_arguments import SftArguments
    from samrag.vlm import ChatProcessor

logger = logging.getLogger(__name__)

FACTS_FILE = "sft_run.json"
"""What a run with checkpoints was begun with."""
FREE_TO_CHANGE = (
    *("model_path", "train_files", "image_root", "eval_file", "eval_rows", "scored_rows", "scored_batch"),
    *("image_cache_mb", "num_threads"),
)
DECISIVE = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "optim"),
    *("max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("train_sampling_strategy", "max_length", "loss_type", "seed", "data_seed", "bf16", "fp16"),
)
_CHUNK = 512  # rows encoded at once
_SHORTENINGS = 4  # attempts; each cuts what the last left too much


class Located(NamedTuple):
    """A row, and the folder that its images are relative to."""

    row: SftRow
    image_root: Path


def load_rows(path: Path) -> list[SftRow]:
    """Read `sft.jsonl` and check every row.

    Raises:
        UserError: no rows; a row of an unknown kind, with an unknown role, without a user turn, with an image marker
            outside user turns or not one for each image; or one rendered with other prompt templates than installed.
    """
    rows = read_records(path, SftRow)
    for (number, _), row in zip(read_lines(path), rows, strict=True):
        where = f"{path}, line {number}"
        if row.kind not in list(CallKind):
            raise UserError(f"{where}: {row.kind!r} is no kind of call; the kinds are {', '.join(CallKind)}.")
        current = template_hash(PromptStyle.STUDENT, CallKind(row.kind))
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


def located(path: Path, image_root: Path | None) -> list[Located]:
    """The checked rows of a file, with the folder of their images: the file's own by default."""
    return [Located(row, image_root or path.parent) for row in load_rows(path)]


def mixed(sets: Sequence[Sequence[Located]], weights: Sequence[float], seed: int) -> list[Located]:
    """Each set's rows as often as its weight says; a fraction is a seeded draw without repeats, in the set's order."""
    rows: list[Located] = []
    for number, (own, weight) in enumerate(zip(sets, weights or [1.0] * len(sets), strict=True)):
        whole, share = int(weight), weight - int(weight)
        drawn = random.Random(f"mix:{seed}:{number}").sample(range(len(own)), round(share * len(own)))
        rows += [*(list(own) * whole), *(own[i] for i in sorted(drawn))]
    if not rows:
        raise UserError("train_weights leave no row to train on; raise one.")
    return rows


def spread(rows: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` items, evenly over all; 0 is all."""
    if not limit or len(rows) <= limit:
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]


@dataclass(frozen=True, slots=True)
class Preflight:
    """Encoded rows that fit, and what was found on the way."""

    dataset: Dataset
    """Columns `input_ids`, `label_start`, `response_start`, `images`, `length`, `kind`: what `SftCollator` reads."""
    kept: list[Located]
    """The rows of the dataset."""
    excluded: dict[str, int]
    """Rows left out, by reason."""
    shortened: int
    """Rows whose documents were shortened."""
    rows: dict[str, dict[str, int]]
    """Rows kept, by kind and label."""
    num_tokens: int
    longest: int
    image_tokens: int
    """Most tokens that an image takes; 0 without images."""

    def summary(self) -> dict[str, Any]:
        """For records and logs: everything but the rows."""
        return {
            "rows": self.rows,
            "teachers": sorted({item.row.teacher for item in self.kept if item.row.teacher}),
            "excluded": self.excluded,
            "shortened": self.shortened,
            "num_tokens": self.num_tokens,
            "longest": self.longest,
            "image_tokens": self.image_tokens,
        }

    def held_out(self, limit: int) -> list[HeldOut]:
        """At most so many of the rows, evenly over all, ready to be replied to."""
        from samrag.training.evaluation import HeldOut

        chosen = spread(range(len(self.kept)), limit) if limit else []
        made = []
        for i in chosen:
            encoded = self.dataset[i]
            start = encoded["label_start"]
            paths = tuple(map(Path, encoded["images"]))
            made.append(HeldOut(self.kept[i].row, paths, encoded["input_ids"][:start], encoded["input_ids"][start:]))
        return made


@dataclass(slots=True)
class _Encoded:
    """A row on its way."""

    item: Located
    paths: list[Path]
    prompt: list[int]
    target: list[int]
    response: int
    """Index of the target's token with which the response begins."""
    problem: str = ""


def preflight(
    rows: Sequence[Located],
    chat: ChatProcessor,
    model: PreTrainedModel,
    *,
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
    shorten: bool = True,
) -> Preflight:
    """Encode every row once, leave out those that cannot be learnt, and check the rest against inference.

    A row that is too long has its documents' text shortened, never its image, question or target; what is still too
    long is left out, and counted.

    Args:
        rows: Checked rows.
        chat: Of the base, with samrag's chat template.
        model: The base; its context length is a limit, and its vision tower says how many features an image has.
        max_prompt_tokens: Limit of the prompt, image tokens included.
        max_tokens: Limit of the whole row.
        shorten: Shorten documents.

    Raises:
        UserError: no row is left, an image cannot be read, or the processor does not fit the model.
    """
    from datasets import Dataset, Features, List, Value

    context = model.config.get_text_config().max_position_embeddings
    limits = _Limits(max_prompt_tokens, min(context, max_tokens or context))
    encoded: list[_Encoded] = []
    for start in range(0, len(rows), _CHUNK):
        encoded += _encode(rows[start : start + _CHUNK], chat)
    num_shortened = 0
    for entry in encoded:
        entry.problem = _unfit(entry, chat, limits)
        if shorten and entry.problem.startswith("over"):
            num_shortened += _shorten(entry, chat, limits)
    excluded = dict(sorted(Counter(entry.problem for entry in encoded if entry.problem).items()))
    found = ", ".join(f"{count} {reason}" for reason, count in excluded.items()) or "none"
    kept = [entry for entry in encoded if not entry.problem]
    if not kept:
        raise UserError(f"none of {len(rows)} rows can be learnt ({found}); a row may have {limits.row} tokens.")
    counts: dict[str, Counter[str]] = {}
    for entry in kept:
        row = entry.item.row
        if row.kind not in counts:
            _check_against_inference(entry, chat)
        counts.setdefault(row.kind, Counter())[row.label] += 1
    image_tokens = _check_features(kept, chat, model)
    lengths = [len(entry.prompt) + len(entry.target) for entry in kept]
    columns = {
        "input_ids": [entry.prompt + entry.target for entry in kept],
        "label_start": [len(entry.prompt) for entry in kept],
        "response_start": [len(entry.prompt) + entry.response for entry in kept],
        "images": [list(map(str, entry.paths)) for entry in kept],
        "length": lengths,
        "kind": [entry.item.row.kind for entry in kept],
    }
    number, numbers = Value("int32"), ("label_start", "response_start", "length")
    features = Features(
        {"input_ids": List(number), "images": List(Value("string")), "kind": Value("string"),
         **dict.fromkeys(numbers, number)}
    )  # fmt: skip
    by_kind = {kind: dict(sorted(labels.items())) for kind, labels in sorted(counts.items())}
    result = Preflight(
        Dataset.from_dict(columns, features=features), [entry.item for entry in kept], excluded, num_shortened, by_kind,
        sum(lengths), max(lengths), image_tokens,
    )  # fmt: skip
    logger.info(
        "%d rows, %d tokens, longest %d, at most %d tokens an image; %d shortened; left out: %s",
        *(len(kept), result.num_tokens, result.longest, image_tokens, num_shortened, found),
    )
    return result


def build_trainer(
    model: PreTrainedModel,
    chat: ChatProcessor,
    training: SFTConfig,
    arguments: SftArguments,
    train: Preflight,
    evaluation: Preflight | None = None,
) -> SFTTrainer:
    """TRL's trainer with our collator, our order of rows, scores of generated replies, and a check of gradients."""
    from trl import SFTTrainer

    from samrag.training.callbacks import GradientCheck, early_stopping
    from samrag.training.collator import IGNORED, PARTS, RESPONSE_MASK, LengthGroupedBatches, SftCollator
    from samrag.training.evaluation import score, summary
    from samrag.training.reporting import report_samples

    lengths, with_image = train.dataset["length"], [bool(images) for images in train.dataset["images"]]
    held_out = evaluation.held_out(arguments.scored_rows) if evaluation else []

    class StudentTrainer(SFTTrainer):  # type: ignore[misc]
        """TRL's, with what it lacks: order and parts by length, weights of the response, and scores of replies."""

        def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
            if self.args.train_sampling_strategy != "group_by_length":
                return super()._get_train_sampler(train_dataset)
            rows_per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            seed = self.args.data_seed or self.args.seed
            return LengthGroupedBatches(lengths, rows_per_step, seed, with_image)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            own = vars(self)["data_collator"]
            self.data_collator = SftCollator(chat)  # parts and weights are for training
            try:
                return super().get_eval_dataloader(eval_dataset)
            finally:
                self.data_collator = own

        def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
            parts = inputs.get(PARTS)
            if parts is None:
                return super().training_step(model, inputs, num_items_in_batch)
            losses = []
            for part in parts:  # each adds its tokens' share to the gradients, so their sum is the whole batch's
                waits = part is not parts[-1]
                with self.accelerator.no_sync(model) if waits else contextlib.nullcontext():
                    losses.append(super().training_step(model, part, num_items_in_batch))
            return sum(losses)

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            response = inputs.pop(RESPONSE_MASK, None)
            if response is None or not self.model.training:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            weights = 1 + (arguments.response_weight - 1) * response[:, 1:]

            def weighed(**given: Any) -> Any:
                outputs = model(**given)
                outputs.log_probs = outputs.log_probs * weights  # of each token; TRL sums them to the loss
                return outputs

            return super().compute_loss(weighed, inputs, return_outputs, num_items_in_batch)

        def evaluation_loop(self, *given: Any, **options: Any) -> Any:
            output = super().evaluation_loop(*given, **options)
            if held_out:
                scored = self._scored()
                prefix = options.get("metric_key_prefix", "eval")
                output.metrics.update({f"{prefix}_{name}": value for name, value in summary(scored).items()})
                if self.is_world_process_zero():
                    report_samples(Path(self.args.output_dir), self.state.global_step, scored, held_out)
            return output

        def _scored(self) -> list[Any]:
            """Each process replies to its share of the held-out rows; all get all scores."""
            from accelerate.utils import gather_object
            from trl.models.utils import unwrap_model_for_generation

            share = held_out[self.args.process_index :: self.args.world_size]
            with unwrap_model_for_generation(self.model, self.accelerator) as unwrapped:
                scored = score(unwrapped, chat, share, arguments.scored_batch)
            return list(gather_object(scored)) if self.args.world_size > 1 else scored

    training.remove_unused_columns = False
    training.dataset_kwargs = {**(training.dataset_kwargs or {}), "skip_prepare_dataset": True}
    if arguments.max_batch_tokens is not None and training.fsdp:
        raise UserError("max_batch_tokens gives processes different numbers of parts, which FSDP cannot wait for.")
    collator = SftCollator(chat, arguments.response_weight != 1, arguments.max_batch_tokens)
    for dataset in (train.dataset, evaluation.dataset if evaluation else train.dataset):
        labels = SftCollator(chat)([dataset[0]])["labels"]
        assert labels[0, -1] == chat.stop_token_id, "the target does not end with the stop token"
        assert not (labels == chat.image_token_id).any(), "an image token is among the labels"
        assert (labels[0, :-1] != IGNORED).any(), "the target holds nothing but the stop token"
    if arguments.tuning == "full":
        freeze(model, arguments)
    trainer = StudentTrainer(
        model=model,
        args=training,
        data_collator=collator,
        train_dataset=train.dataset,
        eval_dataset=evaluation.dataset if evaluation else None,
        processing_class=chat.processor,
        peft_config=lora_config(model, arguments) if arguments.tuning == "lora" else None,
        callbacks=[GradientCheck(), *early_stopping(arguments.early_stopping_patience, training)],
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
        "train_data": [sha256(Path(name)) for name in arguments.train_files],
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


def warn_of_gaps(train: Preflight, held_out: Preflight | None = None) -> None:
    """Say which kinds the student will not learn, and which it sees one label of, before hours are spent."""
    needed = [CallKind.IS_REL_TEXT, CallKind.ANSWER, CallKind.IS_USE, CallKind.IS_SUP]
    if missing := [kind for kind in needed if kind not in train.rows]:
        logger.warning("no rows of %s: the student will not learn it.", ", ".join(missing))
    for kind, labels in train.rows.items():
        if CallKind(kind) in JUDGEMENTS and len(labels) == 1:
            logger.warning("all rows of %s are %s: the student will learn to say that always.", kind, *labels)
    if held_out and (unlearnt := sorted(set(held_out.rows) - set(train.rows))):
        logger.warning("eval_file has rows of %s, which train_files lack.", ", ".join(unlearnt))


def is_write_failure(error: BaseException) -> bool:
    """Whether a file could not be written, as the libraries that save say it."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
    said = str(error)
    return any(words in said for words in ("No space left", "File too large", "file write failed", "failed writing"))


def out_of_memory_advice(arguments: SftArguments, training: SFTConfig, checked: Preflight) -> str:
    """What to change when the memory is not enough, by what would help most here."""
    rows = training.per_device_train_batch_size
    ways = []
    if not training.activation_checkpointing:
        ways.append("activation_checkpointing: true")
    if rows > 1:
        ways.append(f"per_device_train_batch_size below {rows} with gradient_accumulation_steps raised likewise")
        if arguments.max_batch_tokens is None:
            ways.append(f"max_batch_tokens, such as {max(checked.longest, rows * checked.longest // 2)}")
    if arguments.max_prompt_tokens is None and checked.longest > 1024:
        ways.append(f"max_prompt_tokens (the longest row has {checked.longest:,} tokens)")
    if arguments.tuning == "full":
        ways.append("tuning: lora")
    elif arguments.quantization == "none":
        ways.append("quantization: 4bit")
    ways.append("several GPUs with configs/accelerate/fsdp2.yaml")
    return f"the device has too little memory; set {', or '.join(ways)}."


@dataclass(frozen=True, slots=True)
class _Limits:
    """Most tokens."""

    prompt: int | None
    row: int


def _encode(rows: Sequence[Located], chat: ChatProcessor) -> list[_Encoded]:
    """Token ids of prompts and targets, each tokenized by itself: so a prompt has the ids of inference."""
    from samrag.training.collator import read_picture

    paths = [[within(item.image_root, image) for image in item.row.images] for item in rows]
    pictures = [[read_picture(chat, path).tokens for path in own] for own in paths]
    prompts = chat.encode([chat.text(item.row.messages[:-1]) for item in rows], pictures)
    targets = chat.encode_targets([item.row.messages for item in rows])
    return [
        _Encoded(item, own, prompt, target, response)
        for item, own, prompt, (target, response) in zip(rows, paths, prompts, targets, strict=True)
    ]


def _shorten(entry: _Encoded, chat: ChatProcessor, limits: _Limits) -> bool:
    """Cut the documents of a row that is too long, until it fits or nothing is left to cut; whether it fits then."""
    keep = 1.0
    original = entry.item.row
    for _ in range(_SHORTENINGS):
        most = min(limits.prompt or limits.row, limits.row - len(entry.target))
        keep *= max(0.0, 0.95 * most / max(1, len(entry.prompt)))
        messages = tuple(
            ChatMessage(m.role, shorten_documents(m.content, keep)) if m.role == "user" else m
            for m in original.messages
        )
        if messages == original.messages:
            return False
        (shorter,) = _encode([Located(replace(original, messages=messages), entry.item.image_root)], chat)
        entry.prompt = shorter.prompt
        if not _unfit(shorter, chat, limits):
            entry.item, entry.problem = shorter.item, ""
            return True
    return False


def _check_against_inference(entry: _Encoded, chat: ChatProcessor) -> None:
    if chat.reference(entry.item.row.messages[:-1], entry.paths) != entry.prompt:
        raise UserError(
            f"the prompt of question {entry.item.row.question_id!r} has other tokens in training than at inference; "
            "the processor's tokenizer or chat template does not fit the model."
        )


def _unfit(entry: _Encoded, chat: ChatProcessor, limits: _Limits) -> str:
    """Why a row cannot be learnt; empty when it can."""
    prompt, target = entry.prompt, entry.target
    if not entry.item.row.messages[-1].content.strip():
        return "without a target"
    special = set(chat.tokenizer.all_special_ids)
    if target[-1] != chat.stop_token_id or special & set(target[:-1]):
        return "with a special token in the target"
    if limits.prompt is not None and len(prompt) > limits.prompt:
        return f"over {limits.prompt} tokens in the prompt"
    if len(prompt) + len(target) > limits.row:
        return f"over {limits.row} tokens"
    return ""


def _check_features(kept: Sequence[_Encoded], chat: ChatProcessor, model: PreTrainedModel) -> int:
    """Most tokens that an image takes, after a check on one image that they are the features the model makes of it."""
    import inspect

    import torch

    from samrag.training.collator import read_picture
    from samrag.vlm import join

    paths = [path for entry in kept for path in entry.paths]
    if not paths:
        return 0
    picture = read_picture(chat, paths[0])
    tokens = picture.tokens.count(chat.image_token_id)
    wanted = inspect.signature(model.get_image_features).parameters
    given = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in join([picture]).items()
        if name in wanted
    }
    with torch.no_grad():
        output = model.get_image_features(**given).pooler_output
    features = sum(part.shape[:-1].numel() for part in (output if isinstance(output, (list, tuple)) else [output]))
    if tokens != features:
        raise UserError(
            f"an image has {tokens} tokens in the prompt but {features} features in the model; "
            "patch_size, vision_feature_select_strategy or num_additional_image_tokens of the processor is wrong."
        )
    return max(entry.prompt.count(chat.image_token_id) // max(1, len(entry.paths)) for entry in kept)
