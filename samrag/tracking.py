"""Weights & Biases: offline unless the user asked otherwise; files hold everything it holds."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = "samrag"
RUN_ID_FILE = "wandb_run_id.txt"
log = logging.getLogger(__name__)


def setup(report_to: str | Sequence[str], folder: Path) -> None:
    """Prepare the environment for the trainers' own W&B callback. Values that the user set are left alone."""
    if "wandb" not in ([report_to] if isinstance(report_to, str) else list(report_to)):
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_PROJECT", PROJECT)
    os.environ.setdefault("WANDB_DIR", str(folder))
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")


def resume_run(report_to: str | Sequence[str], folder: Path, new: bool) -> None:
    """Let a training that goes on be the same W&B run: its id is kept in the output folder."""
    if "wandb" not in ([report_to] if isinstance(report_to, str) else list(report_to)):
        return
    path = Path(folder) / RUN_ID_FILE
    if new or not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4), encoding="utf-8")
    os.environ.setdefault("WANDB_RUN_ID", path.read_text(encoding="utf-8").strip())
    os.environ.setdefault("WANDB_RESUME", "allow")


def log_tables(name: str, folder: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Log tables of rows as one W&B run, in the mode that the environment asks for."""
    import wandb

    setup("wandb", folder)
    with wandb.init(name=name, job_type=name, reinit="finish_previous") as run:
        for key, rows in tables.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            data = [[_cell(row.get(column)) for column in columns] for row in rows]
            run.log({key: wandb.Table(columns=[*columns], data=data)})


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, (list, tuple, dict)) else value
