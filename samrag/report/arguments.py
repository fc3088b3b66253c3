"""Arguments of the scripts that score. Pure: imports no plotting and no model stack."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from samrag.config import STRICT
from samrag.schema import Language


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


@dataclass(config=STRICT)
class InterleavedEvaluationArguments:
    """Which interleaved answers are scored, and by what."""

    data_file: str
    """A file of RAG-IGBench (samrag/benchmarks/rag_igbench.py)."""
    language: Language
    """Its language: en or zh."""
    outputs: list[str]
    """Model outputs: name=file, for example M=runs/m.jsonl, each line with `id` and `model_answer`. The first is what
    the others are compared with."""
    output_dir: str
    """Folder for metrics.json, tables.md and samples."""
    split: str | None = None
    """Score this split alone; none scores all."""
    text_encoder: str | None = None
    """Embedder for alignment: folder, hub name or quickstart (the benchmark's: TencentBAC/Conan-embedding-v1)."""
    image_encoder: str | None = None
    """Folder of a CLIP model (the benchmark's: openai/clip-vit-large-patch14)."""
    image_root: str | None = None
    """Folder of the images; CLIP needs it."""
    missing_images: Literal["error", "leave_out"] = "error"
    """With an image encoder, questions that have an image whose file is missing: stop, or score the others alone."""
    batch_size: int = 64
    """Images, and texts that are compared with them, per forward pass."""
    level: float = 0.95
    """Coverage of the intervals."""
    seed: int = 0
    """Seed of the bootstrap and of the permutation test."""

    def __post_init__(self) -> None:
        if not self.outputs:
            raise ValueError("outputs is empty; it must name a file of model outputs: name=file")
        if len(self.paths) < len(self.outputs):
            raise ValueError(f"outputs is {self.outputs}; every name must be another")
        if (self.image_encoder is None) != (self.image_root is None):
            raise ValueError("image_encoder and image_root need each other; give both or neither")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not 0 < self.level < 1:
            raise ValueError(f"level is {self.level}; it must lie between 0 and 1")

    @property
    def paths(self) -> dict[str, Path]:
        """Files of outputs by the names of their systems."""
        paths = {}
        for item in self.outputs:
            name, _, path = item.partition("=")
            if not path or not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"outputs has {item!r}; name=file is wanted, the name of letters, digits, . _ and -")
            paths[name] = Path(path)
        return paths
