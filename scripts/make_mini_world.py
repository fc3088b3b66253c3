"""Write a mini world: python scripts/make_mini_world.py --config configs/quickstart/make_mini_world.yaml."""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.arguments import MiniWorldArguments
from samrag.config import parse, run
from samrag.errors import UserError
from samrag.miniworld.dataset import SplitSize, write_world
from samrag.miniworld.world import Split
from samrag.provenance import is_finished, write_run_record

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, draw, write."""
    (arguments,) = parse(MiniWorldArguments)
    folder = Path(arguments.output_dir)
    if is_finished(folder, [arguments], []):
        return
    sizes = {
        Split.TRAIN: SplitSize(arguments.train_clubs, arguments.train_questions),
        Split.DEV: SplitSize(arguments.dev_clubs, arguments.dev_questions),
        Split.TEST: SplitSize(arguments.test_clubs, arguments.test_questions),
    }
    try:
        write_world(folder, sizes, arguments.seed)
    except ValueError as error:
        raise UserError(f"no such world can be drawn ({error}); change the numbers of clubs and questions.") from error
    write_run_record(folder, [arguments], [], arguments.seed)
    log.info("mini world: %s in %s", ", ".join(f"{s.num_questions} {n} questions" for n, s in sizes.items()), folder)


if __name__ == "__main__":
    run(main)
