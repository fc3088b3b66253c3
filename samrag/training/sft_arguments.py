"""Arguments of `train/sft.py` beside the trainer's own (`trl.SFTConfig`). Imports no model stack."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from samrag.config import STRICT


@dataclass(config=STRICT)
class SftArguments:
    """What the student is tuned from and on, and its adapter; the optimiser's settings are `SFTConfig`'s."""

    model_path: str
    """Base model: a folder, which never touches the network, or a hub name (owner/name)."""
    train_file: str
    """Rows to train on: sft.jsonl."""
    image_root: str | None = None
    """Folder that the rows' image paths are relative to; none is the folder of the rows' file."""
    eval_file: str | None = None
    """Held-out rows of the same form, for the evaluation loss; needs eval_strategy."""
    eval_rows: int = 256
    """Rows of eval_file to use, spread evenly over the file; 0 is all."""
    freeze_vision_tower: bool = True
    """Put no adapter into the vision tower."""
    freeze_multi_modal_projector: bool = True
    """Put no adapter into the projector between vision tower and language model."""
    lora_r: int = 8
    """Rank of the adapter."""
    lora_alpha: int = 16
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = 0.0
    """Dropout before the adapter, 0 to below 1."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_r) instead (rsLoRA)."""
    use_dora: bool = False
    """Learn a magnitude for each output beside the adapter (DoRA)."""
    max_prompt_tokens: int | None = None
    """Rows with a longer prompt, image tokens included, are left out and counted; none leaves only max_length."""
    image_cache_mb: int = 2048
    """Memory a process may use to keep preprocessed images; those that do not fit are read again at each use."""
    num_threads: int | None = None
    """CPU threads; none leaves torch's setting."""

    def __post_init__(self) -> None:
        for name in ("lora_r", "lora_alpha", "max_prompt_tokens", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("eval_rows", "image_cache_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; it must be in [0, 1)")
