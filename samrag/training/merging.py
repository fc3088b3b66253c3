"""An adapter and its base made into one model, with a proof that it replies as the two did."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from samrag.errors import UserError
from samrag.files import read_json, replacing_folder, write_json
from samrag.report.model_card import model_card
from samrag.training.student import ADAPTER_FILE, PROBE, check_adapter, check_base
from samrag.vlm import ChatProcessor, load_adapter, load_model, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samrag.arguments import MergeArguments

logger = logging.getLogger(__name__)

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of a logit, as a share of the largest logit where that is above 1."""


def merge(arguments: MergeArguments) -> Path:
    """Write the merged model with its processor, `samrag.json` and a model card.

    The weights are merged in float32, saved in `dtype`, loaded again, and put to a fixed probe; the folder appears
    only when its logits are those of base and adapter.

    Raises:
        UserError: the adapter does not fit, or the merged model replies differently.
    """
    adapter = Path(arguments.adapter)
    if not (adapter / ADAPTER_FILE).is_file():
        raise UserError(f"{adapter} has no {ADAPTER_FILE}; only adapters that train/sft.py wrote are merged.")
    facts = read_json(adapter / ADAPTER_FILE)
    if facts["tuning"] != "lora":
        raise UserError(f"{adapter} is a whole model already; use it as model_path.")
    base = model_folder(arguments.model_path or facts["base_model"])
    _check_output(Path(arguments.output_dir), base, adapter)
    check_base(base, adapter)
    chat = ChatProcessor.load(adapter)
    model = load_adapter(load_model(base), adapter)
    check_adapter(model, chat, adapter)
    wanted = _probe(model, chat)
    merged = model.merge_and_unload().to(getattr(torch, arguments.dtype))
    with replacing_folder(Path(arguments.output_dir)) as folder:
        merged.save_pretrained(folder, max_shard_size=arguments.max_shard_size)
        chat.processor.save_pretrained(folder)
        given = _probe(load_model(folder, arguments.dtype), ChatProcessor.load(folder))
        difference = float((given - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not difference <= TOLERANCE[arguments.dtype]:
            raise UserError(
                f"the merged model's logits differ from the adapter's by {difference:.2g}, more than"
                f" {TOLERANCE[arguments.dtype]:g} for {arguments.dtype}; merge in float32, or serve base and adapter."
            )
        told = {key: value for key, value in facts.items() if key != "probe"}
        told |= {"tuning": "merged", "merge_difference": difference}
        write_json(folder / ADAPTER_FILE, told)
        (folder / "README.md").write_text(model_card(told, arguments.data_licence), encoding="utf-8")
    logger.info("%s: largest difference of a logit %.2g", arguments.output_dir, difference)
    return Path(arguments.output_dir)


def _check_output(output: Path, base: Path, adapter: Path) -> None:
    """Refuse to write over anything but an earlier merge."""
    if output.resolve() in (base.resolve(), adapter.resolve()):
        raise UserError(f"output_dir {output} is the base or the adapter itself; choose another.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        merged = (output / ADAPTER_FILE).is_file() and read_json(output / ADAPTER_FILE).get("tuning") == "merged"
        if not merged:
            raise UserError(f"{output} is there already, and not from a merge; choose another output_dir.")


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder to the hub; returns its address.

    Raises:
        UserError: the hub refuses, or there is no login.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    try:
        api = HfApi()
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=["checkpoint-*", "wandb/*", "*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise UserError(
            f"{folder} was not uploaded to {name!r} ({type(error).__name__}); run `hf auth login`, check the name, and"
            " run again: the folder itself is finished."
        ) from error
    return str(url)


@torch.no_grad()
def _probe(model: PreTrainedModel, chat: ChatProcessor) -> torch.Tensor:
    """logits[T, V] of the fixed probe, in float32."""
    ids = torch.tensor(chat.encode([chat.text(PROBE)], [[]]), device=model.device)
    logits: torch.Tensor = model.eval()(**chat.inputs(ids, torch.ones_like(ids), [])).logits
    return logits[0].float()
