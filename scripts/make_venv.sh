#!/usr/bin/env bash
# Make .venv and install samrag in it with all extras; does nothing when that was done for this pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/.installed
wanted=$(cksum < pyproject.toml)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: samrag needs Python 3.11 or newer; name one by PYTHON=/path/to/python." >&2
    exit 2
}
echo "installing samrag into .venv (about 2 GB, a few minutes) ..."
"$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[quickstart,zh,dev]"
echo "$wanted" > "$stamp"
