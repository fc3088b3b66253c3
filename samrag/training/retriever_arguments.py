"""Arguments of `train/retriever.py`. Pure: imports no model stack."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from samrag.config import STRICT


@dataclass(config=STRICT)
class RetrieverArguments:
    """What the retriever is trained from, and its loss; the optimiser's settings are the trainer's own arguments."""

    base_model: str
    """Model to start from: a folder, a hub name (owner/name), or quickstart."""
    train_file: str
    """Rows to train on: retriever.jsonl, or any file in FlagEmbedding's format (query, pos, neg)."""
    eval_file: str | None = None
    """Held-out rows of the same format: measures recall@k when eval_strategy is set, and once at the end."""
    query_instruction: str | None = None
    """Text put before every query, stored with the model; none takes the base model's."""
    max_length: int = 128
    """Tokens a text is cut to in training; the saved model keeps the base model's own length."""
    num_negatives: int = 7
    """Mined negatives a query and step, drawn anew each epoch; in-batch passages come on top."""
    temperature: float = 0.02
    """Tau of InfoNCE."""
    one_row_per_negative: bool = False
    """Make one entry of each (query, negative) pair, as the paper does: an epoch then shows every negative once."""
    mask_known_positives: bool = True
    """Leave passages out of a query's in-batch negatives when their text is one of its positives."""
    trainer: Literal["samrag", "flagembedding"] = "samrag"
    """Who trains: ours, or FlagEmbedding's own runner (the paper's framework), which neither evaluates nor masks."""
    cache_gradients: bool = False
    """Keep no activations: a large batch then needs the memory of max_chunk_tokens, for about a third more time."""
    max_chunk_tokens: int = 16384
    """Tokens encoded at once, padding included; texts of a batch are sorted by length."""
    across_processes: bool = False
    """Passages of all processes are negatives, too."""
    distillation_weight: float = 0.0
    """Weight of the rows' pos_scores and neg_scores (a teacher's) beside InfoNCE; 0 does without them."""
    lora_r: int | None = None
    """Train an adapter of this rank and merge it at the end; none trains all weights."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations without a better metric_for_best_model; needs load_best_model_at_end."""
    base_weight: float = 0.0
    """Share of the base model mixed into the final weights (LM-Cocktail), 0 to below 1; 0 is the tuned model alone."""
    num_threads: int | None = None
    """CPU threads; none leaves torch's setting."""

    def __post_init__(self) -> None:
        if self.max_length < 3:
            raise ValueError(f"max_length is {self.max_length}; at least 3 tokens are needed (two are special)")
        if self.num_negatives < 0:
            raise ValueError(f"num_negatives is {self.num_negatives}; it must be 0 or more")
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        for name in ("max_chunk_tokens", "lora_r", "early_stopping_patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.distillation_weight < 0:
            raise ValueError(f"distillation_weight is {self.distillation_weight}; it must be 0 or more")
        if not 0 <= self.base_weight < 1:
            raise ValueError(f"base_weight is {self.base_weight}; it must be in [0, 1)")
        if self.one_row_per_negative and self.num_negatives != 1:
            raise ValueError(f"num_negatives is {self.num_negatives}; with one_row_per_negative it must be 1")
