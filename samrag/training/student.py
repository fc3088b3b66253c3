"""The student: its base model and processor, the adapter put on it, and what an adapter folder says about itself.

Left out: quantised bases, and adapters that are not LoRA.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.errors import UserError
from samrag.files import read_json, write_json
from samrag.prompts import PromptStyle, template_hash

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, ProcessorMixin
    from trl import SFTTrainer

    from samrag.training.sft_arguments import SftArguments

logger = logging.getLogger(__name__)

ADAPTER_FILE = "samrag.json"
"""What an adapter folder says about itself beside PEFT's own files."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
LANGUAGE_TARGETS = r"language_model\..*\.(q|k|v|o|gate|up|down)_proj"
VISION_TARGETS = r"vision_tower\..*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
PROJECTOR_TARGETS = r"multi_modal_projector\.linear_\d"
PROBE = ({"role": "user", "content": "Is the document related to the question? Reply with True or False."},)


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


def save(
    trainer: SFTTrainer, processor: ProcessorMixin, folder: Path, summary: Mapping[str, Any], base_fingerprint: str
) -> None:
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
            "training": dict(summary),
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


def check_adapter(model: PreTrainedModel, processor: ProcessorMixin, folder: Path) -> None:
    """Check that a loaded adapter fits: the installed prompts are those of its training, and it is at work.

    It is at work when the probe is nearer to the tuned logits than to the base's. A folder without `samrag.json`, of
    an adapter that was not trained here, is let pass with a warning.

    Args:
        model: Base with the adapter on.
        processor: The adapter's own.
        folder: The adapter's folder.

    Raises:
        UserError: the templates differ, or the adapter was loaded to no effect or on another base.
    """
    if not (folder / ADAPTER_FILE).is_file():
        logger.warning("%s has no %s: its prompts and its effect cannot be checked.", folder, ADAPTER_FILE)
        return
    facts = read_json(folder / ADAPTER_FILE)
    if facts["template"] != template_hash(PromptStyle.STUDENT):
        raise UserError(
            f"{folder} was trained with prompt templates {facts['template']!r}, but the installed ones are "
            f"{template_hash(PromptStyle.STUDENT)!r}; install the samrag it was trained with, or train it again."
        )
    now = probe_logits(model, processor)
    tuned, base = (
        sum((a - b) ** 2 for a, b in zip(now, facts["probe"][name], strict=True)) for name in ("logits", "base_logits")
    )
    if tuned > base:
        raise UserError(
            f"{folder}: the adapter has no effect: its base model or the libraries are not those of its training."
        )


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
