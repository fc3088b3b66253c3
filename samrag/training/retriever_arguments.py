"""Arguments of `train/retriever.py`. Pure: imports no model stack."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(config=ConfigDict(extra="forbid"))
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
        if not 0 <= self.base_weight < 1:
            raise ValueError(f"base_weight is {self.base_weight}; it must be in [0, 1)")
        if self.one_row_per_negative and self.num_negatives != 1:
            raise ValueError(f"num_negatives is {self.num_negatives}; with one_row_per_negative it must be 1")
