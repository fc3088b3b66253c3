"""The student: what of its base is trained, and what a trained folder says about itself.

Left out: adapters that are not LoRA.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.calls import CallKind
from samrag.errors import UserError
from samrag.files import read_json, write_json
from samrag.prompts import PromptStyle, template_hash
from samrag.report.model_card import model_card
from samrag.schema import ChatMessage
from samrag.vlm import ChatProcessor, family_of, load_model, load_processor, model_fingerprint, model_folder

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, ProcessorMixin
    from trl import SFTTrainer

    from samrag.training.sft_arguments import SftArguments

logger = logging.getLogger(__name__)

ADAPTER_FILE = "samrag.json"
"""What an adapter folder says about itself beside PEFT's own files."""
PROBE = (ChatMessage("user", "Is the document related to the question? Reply with True or False."),)
_WHOLE_ON_EACH = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU")
"""Ways to distribute in which each process holds the whole model."""


def load(
    arguments: SftArguments, dtype: str = "float32", keep_first: bool = True
) -> tuple[PreTrainedModel, ChatProcessor]:
    """The base model and its chats, written by samrag's own template.

    `model.name_or_path` is the name that an adapter will carry: relative when the folder lies in the current one.

    Args:
        arguments: Model, quantisation, memory for images.
        dtype: Type of the weights in memory.
        keep_first: See `ChatProcessor`.

    Raises:
        UserError: no such model, one of an unknown family, or one without processor, safetensors or some weights.
    """
    folder = model_folder(arguments.model_path)
    processor = load_processor(folder)
    model = load_model(folder, dtype, **_quantization(arguments))
    processor.chat_template = family_of(model.config).chat_template
    _complete(processor, model)
    path = Path(arguments.model_path)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    model.name_or_path = str(path.relative_to(Path.cwd())) if inside else arguments.model_path
    return model, ChatProcessor(processor, arguments.image_cache_mb << 20, keep_first)


def _quantization(arguments: SftArguments) -> dict[str, Any]:
    """What `from_pretrained` needs to load in 8 or 4 bits: NF4 with double quantisation, computing in bfloat16."""
    if arguments.quantization == "none":
        return {}
    import torch
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available() or not torch.cuda.is_available():
        raise UserError(
            f"quantization is {arguments.quantization}, which needs a CUDA GPU and bitsandbytes; "
            "pip install bitsandbytes there, or set quantization: none."
        )
    if arguments.quantization == "8bit":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    return {"quantization_config": four}


def trained_parts(model: PreTrainedModel, arguments: SftArguments) -> list[str]:
    """Paths of the parts that are trained, as regular expressions."""
    family = family_of(model.config)
    parts = [family.language_model]
    if not arguments.freeze_vision_tower:
        parts.append(family.vision_tower)
    if not arguments.freeze_multi_modal_projector:
        parts.append(family.projector)
    return parts


def lora_config(model: PreTrainedModel, arguments: SftArguments) -> LoraConfig:
    """The adapter: all linear layers of the language model, and of what is not frozen beside it."""
    import torch
    from peft import LoraConfig

    targets = []
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for part in trained_parts(model, arguments):
        inside = (re.fullmatch(rf"(?:.*\.)?{part}\.(?:.*\.)?([^.]+)", name) for name in linear)
        leaves = sorted({match.groups()[-1] for match in inside if match})
        if leaves:
            targets.append(rf"{part}\.(.*\.)?({'|'.join(leaves)})")
    if not targets:
        raise UserError(
            f"{model.name_or_path} has no linear layer where its family has them; nothing would be trained."
        )
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        use_rslora=arguments.use_rslora,
        use_dora=arguments.use_dora,
        target_modules=rf"(.*\.)?({'|'.join(targets)})",
        task_type="CAUSAL_LM",
    )


def freeze(model: PreTrainedModel, arguments: SftArguments) -> None:
    """For full tuning: let only the weights of the trained parts, and the output layer, be trained."""
    parts = "|".join(trained_parts(model, arguments))
    wanted = re.compile(rf"(.*\.)?({parts})\..*|lm_head\..*")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = wanted.fullmatch(name) is not None


def check_trainable(model: PreTrainedModel, arguments: SftArguments) -> list[str]:
    """Names of the trainable tensors, after a check that none is in a frozen part."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    family = family_of(base.config)
    frozen = [
        part
        for part, is_frozen in (
            (family.vision_tower, arguments.freeze_vision_tower),
            (family.projector, arguments.freeze_multi_modal_projector),
        )
        if is_frozen
    ]
    touched = [name for name in names for part in frozen if re.search(rf"\b{part}\.", name)]
    assert names, "nothing is trainable"
    assert not touched, f"{touched[0]} is trainable although its part is frozen"
    size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info("%d trainable tensors, %s parameters; frozen: %s", len(names), f"{size:,}", ", ".join(frozen) or "-")
    return names


def save(
    trainer: SFTTrainer, chat: ChatProcessor, folder: Path, summary: Mapping[str, Any], base_fingerprint: str
) -> None:
    """Write what was trained with the processor, the chat template, `samrag.json` and a model card.

    `samrag.json` holds the hashes of the prompt templates by kind, the base model's fingerprint, the row counts, and
    for an adapter the logits of a fixed probe with and without it, by which `check_adapter` tells one that was loaded
    to no effect. An adapter's tensors are counted after writing.
    """
    from peft import PeftModel
    from safetensors import safe_open

    trainer.save_model(str(folder))
    if not trainer.is_world_process_zero():
        return
    chat.processor.save_pretrained(folder)
    (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; run.json holds the configuration
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_adapter = isinstance(model, PeftModel)
    facts = {
        "templates": {kind: template_hash(PromptStyle.STUDENT, CallKind(kind)) for kind in sorted(summary["rows"])},
        "chat_template": _short_hash(chat.processor.chat_template),
        "image_processor": type(chat.processor.image_processor).__name__,
        "tuning": "lora" if is_adapter else "full",
        "base_model": (model.get_base_model() if is_adapter else model).name_or_path,
        "base_fingerprint": base_fingerprint,
        "training": dict(summary),
    }
    if is_adapter:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as stored:
            written = len(list(stored.keys()))
        wanted = sum(parameter.requires_grad for parameter in trainer.model.parameters())
        if written != wanted:
            raise RuntimeError(f"{folder} holds {written} adapter tensors, but {wanted} were trained")
        if trainer.accelerator.distributed_type in _WHOLE_ON_EACH:  # else one process alone cannot run the model
            with model.disable_adapter():
                base_logits = probe_logits(model, chat)
            facts["probe"] = {"logits": probe_logits(model, chat), "base_logits": base_logits}
    write_json(folder / ADAPTER_FILE, facts)
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")


def probe_logits(model: PreTrainedModel, chat: ChatProcessor) -> list[float]:
    """The first 16 logits after a fixed prompt."""
    import torch

    was_training = model.training
    model.eval()
    ids = torch.tensor(chat.encode([chat.text(PROBE)], [[]]), device=model.device)
    with torch.no_grad():
        logits = model(**chat.inputs(ids, torch.ones_like(ids), [])).logits[0, -1, :16]
    model.train(was_training)
    return [round(float(value), 5) for value in logits]


def check_templates(folder: Path) -> dict[str, Any]:
    """What a trained folder says about itself, after a check that the installed prompts are those of its training.

    A folder without `samrag.json`, of a model that was not trained here, says nothing.

    Raises:
        UserError: the templates differ.
    """
    if not (folder / ADAPTER_FILE).is_file():
        return {}
    facts: dict[str, Any] = read_json(folder / ADAPTER_FILE)
    for kind, trained in facts.get("templates", {"": "an older samrag's"}).items():
        installed = template_hash(PromptStyle.STUDENT, CallKind(kind)) if kind in list(CallKind) else "none"
        if trained != installed:
            raise UserError(
                f"{folder} was trained with prompt templates {trained!r}{f' for {kind}' * bool(kind)}, but the"
                f" installed ones are {installed!r}; install the samrag it was trained with, or train it again."
            )
    return facts


def check_base(base: Path, adapter: Path) -> None:
    """Check that an adapter was trained on this base; one without `samrag.json` says nothing of it.

    Raises:
        UserError: it was trained on another, or is part of this one already.
    """
    facts = read_json(adapter / ADAPTER_FILE) if (adapter / ADAPTER_FILE).is_file() else {}
    if "base_fingerprint" in facts and facts["base_fingerprint"] != model_fingerprint(base):
        raise UserError(
            f"{adapter} was trained on {facts['base_model']!r}, and {base} has other weights; give that base, or no"
            " adapter where the base is a merged model."
        )


def check_adapter(model: PreTrainedModel, chat: ChatProcessor, folder: Path) -> None:
    """Check that a loaded adapter fits: the installed prompts are those of its training, and it is at work.

    It is at work when the probe is nearer to the tuned logits than to the base's. A folder without `samrag.json`, of
    an adapter that was not trained here, is let pass with a warning.

    Args:
        model: Base with the adapter on.
        chat: The adapter's own.
        folder: The adapter's folder.

    Raises:
        UserError: the templates differ, or the adapter was loaded to no effect or on another base.
    """
    facts = check_templates(folder)
    if "probe" not in facts:
        logger.warning("%s has no probe in %s: its effect cannot be checked.", folder, ADAPTER_FILE)
        return
    now = probe_logits(model, chat)
    tuned, base = (
        sum((a - b) ** 2 for a, b in zip(now, facts["probe"][name], strict=True)) for name in ("logits", "base_logits")
    )
    if tuned > base:
        raise UserError(
            f"{folder}: the adapter has no effect: its base model or the libraries are not those of its training."
        )


def _complete(processor: ProcessorMixin, model: PreTrainedModel) -> None:
    """Give a LLaVA's processor what older checkpoints leave out."""
    if hasattr(processor, "patch_size") and processor.patch_size is None:
        processor.patch_size = model.config.vision_config.patch_size
    if hasattr(processor, "vision_feature_select_strategy") and processor.vision_feature_select_strategy is None:
        processor.vision_feature_select_strategy = model.config.vision_feature_select_strategy


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
