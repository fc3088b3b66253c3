"""Progress bars, in one style."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Advance(Protocol):
    """Called as work is finished."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


@contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show a bar on standard error; `done` steps were finished before."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(label, total=total, completed=done, note="")

        def advance(steps: int = 1, note: str = "") -> None:
            bar.update(task, advance=steps, note=note)

        yield advance
