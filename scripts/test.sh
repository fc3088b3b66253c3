#!/usr/bin/env bash
# Formatter check, linter, type checker, tests. Arguments go to pytest, for example: scripts/test.sh -m "not entry".
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/make_venv.sh
export TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
