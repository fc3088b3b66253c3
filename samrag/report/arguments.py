"""Arguments of `inference/evaluate.py`. Pure: imports no plotting and no model stack."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from samrag.config import STRICT


@dataclass(config=STRICT)
class EvaluateArguments:
    """What is evaluated, and what is written of it."""

    study_dir: str
    """Folder of the study: study.json, cells/<name>/traces.jsonl, retrieval.json."""
    output_dir: str
    """Folder for metrics.json, tables, plots and report.html."""
    max_traces: int = 300
    """Questions whose traces the page shows at most, spread evenly over the file; 0 shows none."""
    wandb: bool = False
    """Log the tables to Weights & Biases too: offline unless WANDB_MODE says otherwise."""
    curves: list[str] | None = None
    """Files trainer_state.json of trainings, for a plot of their losses."""
    seed: int = 0
    """Seed of the bootstrap and of the permutation test."""

    def __post_init__(self) -> None:
        if self.max_traces < 0:
            raise ValueError(f"max_traces is {self.max_traces}; it must be 0 or more")
