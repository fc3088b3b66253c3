"""The birth certificate of every artefact folder: `run.json`.

It holds the command, the resolved configuration, versions, the git revision, the seed, and hashes of the inputs. A
stage whose folder already has one for the same configuration and inputs has nothing left to do.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import samrag
from samrag.errors import UserError
from samrag.files import read_json, sha256, write_json

RUN_RECORD = "run.json"
_LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "FlagEmbedding",
    "sentence-transformers",
    "datasets",
)
_SECRET = ("key", "token", "password", "secret")
_MACHINE_BOUND = ("logging_dir", "run_name", "local_rank", "report_to", "dry_run")
log = logging.getLogger(__name__)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def resolved(arguments: Sequence[object]) -> dict[str, Any]:
    """The configuration as plain values, by group; fields that may hold a secret are left out."""
    return {
        type(group).__name__: {
            f.name: _plain(getattr(group, f.name, None))
            for f in dataclasses.fields(group)  # type: ignore[arg-type]
            if f.name not in _MACHINE_BOUND
            and not (any(word in f.name.split("_") for word in _SECRET) and not f.name.endswith("_env"))
        }
        for group in arguments
    }


def fingerprint(path: Path) -> str:
    """Content hash of a file, or of a folder by the names and contents of its files (run records and W&B left out)."""
    path = Path(path)
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    kept = (p for p in path.rglob("*") if p.is_file() and p.name != RUN_RECORD and "wandb" not in p.parts)
    for file in sorted(kept):
        digest.update(os.fsencode(file.relative_to(path)) + f"\0{sha256(file)}\0".encode())
    return digest.hexdigest()


def _git_revision() -> str:
    root = Path(samrag.__file__).parent.parent
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def command_line() -> str:
    """The running command as one could type it again."""
    return shlex.join(["python", *sys.argv])


def identity(arguments: Sequence[object], inputs: Sequence[Path]) -> str:
    """Hash of a stage's configuration and inputs: equal hashes give equal artefacts."""
    record = {"configuration": resolved(arguments), "inputs": [fingerprint(path) for path in inputs]}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def write_run_record(folder: Path, arguments: Sequence[object], inputs: Sequence[Path], seed: int = 0) -> None:
    """Write `run.json`, last of all files of an artefact: its presence says that the artefact is whole."""
    record = {
        "identity": identity(arguments, inputs),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "configuration": resolved(arguments),
        "inputs": {str(path): fingerprint(path) for path in inputs},
        "seed": seed,
        "samrag": samrag.__version__,
        "git": _git_revision(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_json(Path(folder) / RUN_RECORD, record)


def forget_run_record(folder: Path) -> None:
    """Take `run.json` away before an artefact is written anew, so that a half-written one is not taken for whole."""
    (Path(folder) / RUN_RECORD).unlink(missing_ok=True)


def is_finished(folder: Path, arguments: Sequence[object], inputs: Sequence[Path]) -> bool:
    """Whether the folder holds a whole artefact of this configuration and these inputs; says so when it does.

    Raises:
        UserError: there is a file in the folder's place.
    """
    path = Path(folder) / RUN_RECORD
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"{folder} is a file; give a folder to write to.")
    if not path.is_file() or read_json(path).get("identity") != identity(arguments, inputs):
        return False
    log.info("%s is up to date: nothing to do.", folder)
    return True
