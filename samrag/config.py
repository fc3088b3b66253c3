"""Configuration: YAML by `--config`, every key also a flag, unknown keys refused; and the frame of entry scripts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict, ValidationError

from samrag.errors import UserError

STRICT = ConfigDict(extra="forbid")
"""For our argument groups: pydantic dataclasses, so that values from YAML are checked as strictly as flags."""


def parse(*groups: type, args: list[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line and its `--config` YAML into the given dataclasses, in order.

    Flags override YAML keys. Nobody else touches the command line.

    Raises:
        UserError: the YAML file is missing or broken; an unknown key or flag, or a value of the wrong type.
        SystemExit: argparse's own exit, for `--help`.
    """
    import yaml
    from trl import TrlParser

    parser = TrlParser(groups, allow_abbrev=False)
    try:
        return tuple(parser.parse_args_and_config(args=args))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # from __post_init__: the message names its field itself
            raise UserError(f"{error.title}: {message}.") from error
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{error.title}, {key}: {message} (given: {first.get('input')!r}).") from error
    except FileNotFoundError as error:
        raise UserError(f"the configuration file {error.filename} does not exist; check --config.") from error
    except yaml.YAMLError as error:
        raise UserError(f"the configuration file is not valid YAML: {error}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"configuration: {error}") from error


def run(main: Callable[[], None]) -> None:
    """Run an entry script: a mistake of the user ends in one clear sentence and exit status 2, without a traceback."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # bars of model loading; ours are samrag.progress
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("samrag", "__main__"):  # libraries speak up only when something is wrong
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        main()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    except OSError as error:
        sys.stderr.write(f"error: {error}; check that the path is right, can be written, and that the disk has room.\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("stopped; what was finished is kept, run the same command again to go on.\n")
        raise SystemExit(130) from None
