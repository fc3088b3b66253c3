"""Tuning the student on SFT rows: rows to examples, checks before training, the trainer, the saved adapter.

Every check here stands for a way in which LLaVA with TRL trains without an error and learns the wrong thing: no stop
token, loss on the prompt, a prompt that inference writes differently, image tokens without features, an adapter in the
vision tower. Left out: quantised bases, packing, and evaluation by generation (`inference/` does that).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.errors import UserError
from samrag.files import read_json, read_lines, read_records, sha256, within, write_json
from samrag.prompts import PromptStyle, template_hash
from samrag.prompts.render import IMAGE_MARK
from samrag.provenance import resolved
from samrag.schema import SftRow

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedModel, ProcessorMixin
    from trl import SFTConfig, SFTTrainer

    from samrag.training.collator import PixelCache
    from samrag.training.sft_arguments import SftArguments

logger = logging.getLogger(__name__)

ADAPTER_FILE = "samrag.json"
"""What an adapter folder says about itself beside PEFT's own files."""
FACTS_FILE = "sft_run.json"
"""What a run with checkpoints was begun with."""
FREE_TO_CHANGE = ("model_path", "train_file", "eval_file", "eval_rows", "image_cache_mb", "num_threads")
DECISIVE = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "optim"),
    *("max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("train_sampling_strategy", "max_length", "loss_type", "seed", "data_seed", "bf16", "fp16"),
)
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
LANGUAGE_TARGETS = r"language_model\..*\.(q|k|v|o|gate|up|down)_proj"
VISION_TARGETS = r"vision_tower\..*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
PROJECTOR_TARGETS = r"multi_modal_projector\.linear_\d"
PROBE = ({"role": "user", "content": "Is the document related to the question? Reply with True or False."},)


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
        turns = [{"role": message.role, "content": _parts(message.content)} for message in row.messages]
        columns["prompt"].append(turns[:-1])
        columns["completion"].append(turns[-1:])
        columns["images"].append([str(within(image_root, image)) for image in row.images])
        columns["kind"].append(row.kind)
    return Dataset.from_dict(columns, features=features)


def load_model_and_processor(name: str, dtype: str = "float32") -> tuple[PreTrainedModel, ProcessorMixin]:
    """Load a LLaVA with its processor, and give the processor samrag's own chat template.

    Images are preprocessed by PIL, so that training and inference see the same pixels whether torchvision is there or
    not. `model.name_or_path` is the name that an adapter will carry: relative when the folder lies in the current one.

    Args:
        name: A folder, which never touches the network, or a hub name (owner/name).
        dtype: Type of the weights in memory.

    Raises:
        UserError: no such model, or one without processor, safetensors or some of its weights.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

    folder = model_folder(name)
    wanted = {"pretrained_model_name_or_path": str(folder), "local_files_only": True, "trust_remote_code": False}
    hint = f"{name} has no usable processor (tokenizer and image processor); copy its base model's files there"
    try:
        processor = AutoProcessor.from_pretrained(**wanted, backend="pil")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{hint}: {_first_line(error)}") from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise UserError(f"{hint}; found only a {type(processor).__name__}.")
    try:
        model, loading = AutoModelForImageTextToText.from_pretrained(
            **wanted, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{name} could not be loaded as a vision-language model: {_first_line(error)}") from error
    if loading["missing_keys"]:
        raise UserError(f"{name} lacks weights, {sorted(loading['missing_keys'])[0]} among them; download it again.")
    _complete(processor, model)
    path = Path(name)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    model.name_or_path = str(path.relative_to(Path.cwd())) if inside else name
    return model, processor


def model_folder(name: str) -> Path:
    """Folder of a model; a hub name is downloaded.

    Raises:
        UserError: neither a folder nor a model on the hub.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not HUB_NAME.fullmatch(name):
        raise UserError(f"the model {name!r} is no folder; check model_path, or give a hub name (owner/name).")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"the model {name!r} is no folder, and the hub did not give it ({type(error).__name__}); "
            "check the name and the network, or give a folder."
        ) from error


def model_fingerprint(folder: Path) -> str:
    """Hash of a model's configuration and weights; of large files, 64 KiB in every 16 MiB."""
    step, sample = 16 << 20, 64 << 10
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as handle:
            if size <= step:
                digest.update(handle.read())
                continue
            for offset in range(0, size, step):
                handle.seek(offset)
                digest.update(handle.read(sample))
    return digest.hexdigest()[:16]


def lora_config(arguments: SftArguments) -> LoraConfig:
    """The adapter: all linear layers of the language model, and of what is not frozen beside it."""
    from peft import LoraConfig

    targets = [LANGUAGE_TARGETS]
    if not arguments.freeze_vision_tower:
        targets.append(VISION_TARGETS)
    if not arguments.freeze_multi_modal_projector:
        targets.append(PROJECTOR_TARGETS)
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        use_rslora=arguments.use_rslora,
        use_dora=arguments.use_dora,
        target_modules=rf"(.*\.)?({'|'.join(targets)})",
        task_type="CAUSAL_LM",
    )


def check_trainable(model: PreTrainedModel, arguments: SftArguments) -> list[str]:
    """Names of the trainable tensors, after a check that none is in a frozen part.

    Raises:
        UserError: the adapter found nothing to adapt.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise UserError(f"no layer of {model.name_or_path} is named as in LLaVA; nothing would be trained.")
    frozen = [
        part
        for part, is_frozen in (
            ("vision_tower", arguments.freeze_vision_tower),
            ("multi_modal_projector", arguments.freeze_multi_modal_projector),
        )
        if is_frozen
    ]
    touched = [name for name in names for part in frozen if part in name]
    assert not touched, f"{touched[0]} is trainable although its part is frozen"
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = ", ".join(frozen) or "nothing"
    logger.info("%d trainable tensors, %s parameters; frozen: %s", len(names), f"{size:,}", parts)
    return names


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


def inference_ids(
    processor: ProcessorMixin, messages: Sequence[Mapping[str, Any]], images: Sequence[str] = ()
) -> list[int]:
    """Token ids of a prompt as inference writes them: the chat template, tokenized in one step."""
    waiting = iter(images)

    def fill(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "image", "path": next(waiting)} if part["type"] == "image" else part

    filled = [
        m if isinstance(m["content"], str) else {"role": m["role"], "content": [fill(part) for part in m["content"]]}
        for m in messages
    ]
    output = processor.apply_chat_template(filled, tokenize=True, add_generation_prompt=True, return_dict=True)
    return [int(token) for token in output["input_ids"][0]]


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


def save(trainer: SFTTrainer, processor: ProcessorMixin, folder: Path, train: Preflight, base_fingerprint: str) -> None:
    """Write the adapter with the processor, the chat template and `samrag.json`, and read the tensors back.

    `samrag.json` holds the hash of the prompt templates, the base model's fingerprint, the row counts, and the logits
    of a fixed probe with and without the adapter, by which `check_adapter` tells one that was loaded to no effect.
    """
    from safetensors import safe_open

    trainer.save_model(str(folder))
    if not trainer.is_world_process_zero():
        return
    processor.save_pretrained(folder)
    (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; run.json holds the configuration
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as stored:
        written = len(list(stored.keys()))
    wanted = sum(parameter.requires_grad for parameter in trainer.model.parameters())
    if written != wanted:
        raise RuntimeError(f"{folder} holds {written} adapter tensors, but {wanted} were trained")
    model = trainer.accelerator.unwrap_model(trainer.model)
    with model.disable_adapter():
        base_logits = probe_logits(model, processor)
    write_json(
        folder / ADAPTER_FILE,
        {
            "template": template_hash(PromptStyle.STUDENT),
            "chat_template": _short_hash(processor.chat_template),
            "image_processor": type(processor.image_processor).__name__,
            "base_model": model.get_base_model().name_or_path,
            "base_fingerprint": base_fingerprint,
            "training": train.summary(),
            "probe": {"logits": probe_logits(model, processor), "base_logits": base_logits},
        },
    )


def probe_logits(model: PreTrainedModel, processor: ProcessorMixin) -> list[float]:
    """The first 16 logits after a fixed prompt."""
    import torch

    was_training = model.training
    model.eval()
    ids = torch.tensor([inference_ids(processor, PROBE)], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1, :16]
    model.train(was_training)
    return [round(float(value), 5) for value in logits]


def check_adapter(model: PreTrainedModel, processor: ProcessorMixin, facts: Mapping[str, Any]) -> None:
    """Check that a loaded adapter is at work: the probe must be nearer to the tuned logits than to the base's.

    Args:
        model: Base with the adapter on.
        processor: The adapter's own.
        facts: The content of its `samrag.json`.

    Raises:
        UserError: the adapter was loaded to no effect, or on another base.
    """
    now = probe_logits(model, processor)
    tuned, base = (
        sum((a - b) ** 2 for a, b in zip(now, facts["probe"][name], strict=True)) for name in ("logits", "base_logits")
    )
    if tuned > base:
        raise UserError("the adapter has no effect: its base model or the libraries are not those of its training.")


def _parts(text: str) -> list[dict[str, str | None]]:
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


def _complete(processor: ProcessorMixin, model: PreTrainedModel) -> None:
    """Give the processor what older checkpoints leave out, and samrag's chat template."""
    if processor.patch_size is None:
        processor.patch_size = model.config.vision_config.patch_size
    if processor.vision_feature_select_strategy is None:
        processor.vision_feature_select_strategy = model.config.vision_feature_select_strategy
    template = resources.files("samrag") / "prompts" / "chat" / "llava.jinja"
    processor.chat_template = template.read_text(encoding="utf-8")


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
