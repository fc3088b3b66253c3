"""Make an adapter and its base into one model folder: python inference/merge.py --config configs/merge.yaml.

The folder serves as `model_path` here, and in any server that takes Hugging Face models. With `push_to` it is uploaded
to the hub, model card included.
"""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.arguments import MergeArguments
from samrag.config import parse, run
from samrag.provenance import is_finished, write_run_record

logger = logging.getLogger(__name__)


def main() -> None:
    """Parse the configuration, merge, check, upload."""
    (arguments,) = parse(MergeArguments)
    from samrag.training.merging import merge, push

    folder, inputs = Path(arguments.output_dir), [Path(arguments.adapter)]
    if not is_finished(folder, [arguments], inputs):
        merge(arguments)
        write_run_record(folder, [arguments], inputs)
    if arguments.push_to:
        logger.info("uploaded to %s", push(folder, arguments.push_to, arguments.private))


if __name__ == "__main__":
    run(main)
