"""Run many programs against one engine. Pure: asyncio alone, no model and no I/O of its own.

A program's result may not depend on the schedule. `sequential` asks one call at a time; `lockstep` puts the calls of
all active programs into one batch (local models); `concurrent` gives each program its own task (servers).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from samrag.calls import Call, Completion, Program
from samrag.schema import Usage

T = TypeVar("T")


class Schedule(StrEnum):
    """In which order the calls of many programs reach the engine."""

    SEQUENTIAL = "sequential"
    LOCKSTEP = "lockstep"
    CONCURRENT = "concurrent"


class Completer(Protocol):
    """The part of an engine that a schedule needs."""

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        """Answer calls, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """What a program returned, and what all its calls cost."""

    value: T
    usage: Usage


class _Running(Generic[T]):
    """A program between two steps."""

    def __init__(self, index: int, program: Program[T]) -> None:
        self.index = index
        self.program = program
        self.calls: list[Call] = []
        self.usage = Usage()

    def advance(self, completions: Sequence[Completion] | None = None) -> Result[T] | None:
        """Feed the replies to `calls` and run on to the next calls (None) or to the end (the result).

        An empty list of calls is answered at once by an empty list.
        """
        replies = None
        if completions is not None:
            replies = [completion.reply for completion in completions]
            for completion in completions:
                self.usage += completion.usage
        try:
            while True:
                self.calls = list(self.program.send(replies))  # type: ignore[arg-type]
                if self.calls:
                    return None
                replies = []
        except StopIteration as stop:
            return Result(stop.value, self.usage)


class _Feed(Generic[T]):
    """Starts programs one by one, knows which ones are unfinished, and closes those when the run ends early."""

    def __init__(self, programs: Iterable[Program[T]]) -> None:
        self._programs = iter(programs)
        self._unfinished: dict[int, _Running[T]] = {}
        self._started = 0

    def __iter__(self) -> Iterator[_Running[T]]:
        return self

    def __next__(self) -> _Running[T]:
        running = _Running(self._started, next(self._programs))
        self._unfinished[running.index] = running
        self._started += 1
        return running

    def finish(self, running: _Running[T]) -> None:
        del self._unfinished[running.index]

    def close(self) -> None:
        for running in self._unfinished.values():
            running.program.close()
        self._unfinished.clear()
        if isinstance(self._programs, Generator):
            self._programs.close()


async def _ask(engine: Completer, calls: Sequence[Call]) -> list[Completion]:
    completions = await engine.complete(calls)
    assert len(completions) == len(calls), f"{len(completions)} completions for {len(calls)} calls"
    return completions


async def _sequential(feed: _Feed[T], engine: Completer, _: int) -> AsyncIterator[tuple[int, Result[T]]]:
    for running in feed:
        result = running.advance()
        while result is None:
            result = running.advance([(await _ask(engine, [call]))[0] for call in running.calls])
        feed.finish(running)
        yield running.index, result


async def _lockstep(feed: _Feed[T], engine: Completer, max_in_flight: int) -> AsyncIterator[tuple[int, Result[T]]]:
    """Steps of at most `max_in_flight` programs; a finished program's place is taken before the next step."""
    active: list[_Running[T]] = []
    while True:
        while len(active) < max_in_flight and (running := next(feed, None)) is not None:
            result = running.advance()
            if result is None:
                active.append(running)
            else:
                feed.finish(running)
                yield running.index, result
        if not active:
            return
        completions = iter(await _ask(engine, [call for running in active for call in running.calls]))
        waiting, active = active, []
        for running in waiting:
            result = running.advance([next(completions) for _ in running.calls])
            if result is None:
                active.append(running)
            else:
                feed.finish(running)
                yield running.index, result


async def _concurrent(feed: _Feed[T], engine: Completer, max_in_flight: int) -> AsyncIterator[tuple[int, Result[T]]]:
    """`max_in_flight` workers share the feed; each leaves results, its error, or None at its end in one queue."""
    done: asyncio.Queue[tuple[int, Result[T]] | BaseException | None] = asyncio.Queue()

    async def work() -> None:
        try:
            for running in feed:
                result = running.advance()
                while result is None:
                    result = running.advance(await _ask(engine, running.calls))
                feed.finish(running)
                done.put_nowait((running.index, result))
            done.put_nowait(None)
        except BaseException as error:
            done.put_nowait(error)

    workers = [asyncio.create_task(work()) for _ in range(max_in_flight)]
    try:
        ended = 0
        while ended < len(workers):
            item = await done.get()
            if item is None:
                ended += 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


_RUNNERS: dict[Schedule, Callable[[_Feed[Any], Completer, int], AsyncIterator[tuple[int, Result[Any]]]]] = {
    Schedule.SEQUENTIAL: _sequential,
    Schedule.LOCKSTEP: _lockstep,
    Schedule.CONCURRENT: _concurrent,
}


async def run(
    programs: Iterable[Program[T]], engine: Completer, schedule: Schedule, max_in_flight: int = 256
) -> AsyncIterator[tuple[int, Result[T]]]:
    """Yield (position in `programs`, result) as programs finish.

    An exception in a program or in the engine ends the run: the other programs are closed and it is raised here.

    Args:
        programs: Programs; an iterator is drawn from only when there is room for another one.
        engine: Whatever answers calls.
        schedule: In which order calls are asked.
        max_in_flight: Programs active at once (lockstep and concurrent).
    """
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
    feed = _Feed(programs)
    results = _RUNNERS[Schedule(schedule)](feed, engine, max_in_flight)
    try:
        async for item in results:
            yield item
    finally:
        await results.aclose()  # type: ignore[attr-defined]
        feed.close()


async def gather(
    programs: Iterable[Program[T]], engine: Completer, schedule: Schedule, max_in_flight: int = 256
) -> list[Result[T]]:
    """All results, in program order."""
    results = {index: result async for index, result in run(programs, engine, schedule, max_in_flight)}
    return [results[index] for index in sorted(results)]


def run_all(
    programs: Iterable[Program[T]], engine: Completer, schedule: Schedule, max_in_flight: int = 256
) -> list[Result[T]]:
    """`gather` for callers without an event loop."""
    work: Coroutine[Any, Any, list[Result[T]]] = gather(programs, engine, schedule, max_in_flight)
    return asyncio.run(work)
