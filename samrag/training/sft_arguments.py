"""Arguments of `train/sft.py` beside the trainer's own (`trl.SFTConfig`). Imports no model stack."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from samrag.config import STRICT


@dataclass(config=STRICT)
class SftArguments:
    """What the student is tuned from and on, and how; the optimiser's settings are `SFTConfig`'s."""

    model_path: str
    """Base model: a folder, which never touches the network, or a hub name (owner/name)."""
    train_files: list[str]
    """Rows to train on: one or several sft.jsonl."""
    train_weights: list[float] = field(default_factory=list)
    """How often each file's rows come in an epoch, one number a file: 2 is twice, 0.5 a seeded half. None is once."""
    image_root: str | None = None
    """Folder that the rows' image paths are relative to; none is the folder of the rows' file."""
    eval_file: str | None = None
    """Held-out rows of the same form, for the evaluation loss and scores; needs eval_strategy."""
    eval_rows: int = 256
    """Rows of eval_file for the loss, spread evenly over the file; 0 is all."""
    scored_rows: int = 64
    """Rows of those, spread evenly, whose replies are generated and scored by kind at each evaluation; 0 is none."""
    scored_batch: int = 32
    """Rows generated at once."""
    tuning: Literal["lora", "full"] = "lora"
    """Train an adapter, or the weights themselves."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Load the base in 8 or 4 bits (QLoRA); needs a GPU and the package bitsandbytes."""
    freeze_vision_tower: bool = True
    """Train nothing in the vision tower."""
    freeze_multi_modal_projector: bool = True
    """Train nothing in the projector between vision tower and language model."""
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
    """Longest prompt, image tokens included; none leaves only max_length."""
    shorten_documents: bool = True
    """Shorten the documents' text in longer rows; where that does not help, and without it, such rows are left out."""
    max_batch_tokens: int | None = None
    """Compute a batch in parts of similar length, of so many tokens with padding: less padding and less memory, the
    same gradients. None computes it at once."""
    response_weight: float = 1.0
    """Weight in the training loss of a reply's tokens from its key "Response" on, as against 1 for its reasoning: a
    verdict is one token among a hundred, and would otherwise be learnt last."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations without a better metric_for_best_model; needs load_best_model_at_end."""
    image_cache_mb: int = 2048
    """Memory a process may use to keep preprocessed images; those that do not fit are read again at each use."""
    num_threads: int | None = None
    """CPU threads; none leaves torch's setting."""

    def __post_init__(self) -> None:
        counts = ("lora_r", "lora_alpha", "max_prompt_tokens", "max_batch_tokens", "num_threads", "scored_batch",
                  "early_stopping_patience")  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("eval_rows", "scored_rows", "image_cache_mb"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; it must be in [0, 1)")
        if self.response_weight <= 0:
            raise ValueError(f"response_weight is {self.response_weight}; it must be above 0")
        if not self.train_files:
            raise ValueError("train_files is empty; name at least one sft.jsonl")
        if self.train_weights and len(self.train_weights) != len(self.train_files):
            raise ValueError(f"train_weights has {len(self.train_weights)} values for {len(self.train_files)} files")
        if any(weight <= 0 for weight in self.train_weights):
            raise ValueError("train_weights must be above 0; leave a file out instead")
        if self.tuning == "full" and self.quantization != "none":
            raise ValueError("quantization is for tuning: lora; quantised weights are not trained themselves")
