"""What a person sees of a run: replies as files and tables, data and model as linked W&B artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samrag.provenance import fingerprint
from samrag.training.evaluation import HeldOut, Scored, sample_table, write_samples

SAMPLES_FOLDER = "evaluation"


def report_samples(folder: Path, step: int, scored: Sequence[Scored], rows: Sequence[HeldOut]) -> None:
    """Write all replies of an evaluation to the output folder, and a table of them to a W&B run that is under way."""
    write_samples(folder / SAMPLES_FOLDER / f"step-{step}.jsonl", scored)
    if (run := _active_run()) is not None:
        images = {name: path for item in rows for name, path in zip(item.row.images, item.paths, strict=True)}
        run.log({"samples": sample_table(scored, images)}, commit=False)


def report_artifacts(folder: Path, data: Sequence[Path], name: str) -> None:
    """Log the data files (by hash and place, not their contents) as input, and the trained folder as output."""
    import wandb

    run = _active_run()
    if run is None:
        return
    for path in data:
        given = wandb.Artifact(f"{name}-data-{path.stem}", "dataset", metadata={"sha256": fingerprint(path)})
        given.add_reference(path.resolve().as_uri(), checksum=False)
        if run.offline:  # inputs can be linked by a server alone
            run.log_artifact(given)
        else:
            run.use_artifact(given)
    made = wandb.Artifact(name, "model")
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".md", ".safetensors", ".model", ".txt"):
            made.add_file(str(path))
    run.log_artifact(made)


def _active_run() -> Any:
    import sys

    wandb = sys.modules.get("wandb")
    return None if wandb is None else wandb.run
