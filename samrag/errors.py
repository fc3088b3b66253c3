"""The one error type for mistakes that a user can mend. Pure."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input, configuration or environment. The message is one sentence or two: what is wrong, and the way out.

    Entry scripts print it without a traceback and exit with status 2 (`samrag.config.main`).
    """
