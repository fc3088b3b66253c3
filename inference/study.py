"""Run the paper's grid: python inference/study.py --config configs/quickstart/study.yaml.

Writes one folder of traces per system; `inference/evaluate.py` makes tables, plots and the report of it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from samrag.arguments import LoopArguments, StudyArguments, TeacherArguments
from samrag.config import parse, run
from samrag.provenance import is_finished, write_run_record

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, run, record."""
    arguments, loop, teacher = groups = parse(StudyArguments, LoopArguments, TeacherArguments)
    folders = (arguments.index_dir, arguments.tuned_index_dir, arguments.model_path, arguments.adapter)
    inputs = [Path(p) for p in (arguments.questions_file, arguments.documents_file, *folders)]
    if is_finished(Path(arguments.output_dir), groups, [path for path in inputs if path.exists()]):
        return
    from samrag.study import run_study

    cells = asyncio.run(run_study(arguments, loop, teacher))
    write_run_record(Path(arguments.output_dir), groups, [path for path in inputs if path.exists()], loop.seed)
    log.info("%s: %d systems", arguments.output_dir, len(cells))


if __name__ == "__main__":
    run(main)
