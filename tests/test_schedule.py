"""Schedules: the same results whatever the order of calls, bounded work, and nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samrag.calls import Answer, Call, CallKind, Completion, Failure, FailureReason, Program
from samrag.schedule import Result, Schedule, gather, run, run_all
from samrag.schema import Usage

SCHEDULES = list(Schedule)


class EchoEngine:
    """Answers each call with its question, later calls sooner; fails on `bad`."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        self.batches.append(len(calls))
        await asyncio.sleep(0.0001 * (sum(len(c.question) for c in calls) % 3))
        return [self._completion(call) for call in calls]

    @staticmethod
    def _completion(call: Call) -> Completion:
        if "bad" in call.question:
            return Completion(Failure(FailureReason.SERVER), Usage(calls=1, failures=1))
        return Completion(Answer((call.question,), ""), Usage(1, 0, 0, len(call.question), 1))


def ask(text: str) -> Call:
    return Call(CallKind.ANSWER, text)


def talk(name: str, steps: Sequence[int]) -> Program[list[str]]:
    """Ask steps[i] questions in step i; what is asked depends on the replies so far."""
    heard: list[str] = []
    for size in steps:
        replies = yield [ask(f"{name}.{len(heard)}.{i}") for i in range(size)]
        heard += [reply.values[0] for reply in replies if isinstance(reply, Answer)]
        assert len(replies) == size
    return heard


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6), st.integers(1, 4))
def test_every_schedule_gives_the_same_results_in_program_order(plan: list[list[int]], max_in_flight: int) -> None:
    def results(schedule: Schedule) -> list[Result[list[str]]]:
        programs = [talk(str(i), steps) for i, steps in enumerate(plan)]
        return run_all(programs, EchoEngine(), schedule, max_in_flight)

    expected = results(Schedule.SEQUENTIAL)
    assert [result.usage.calls for result in expected] == [sum(steps) for steps in plan]
    assert results(Schedule.LOCKSTEP) == expected
    assert results(Schedule.CONCURRENT) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_empty_step_is_answered_without_the_engine(schedule: Schedule) -> None:
    engine = EchoEngine()
    results = run_all([talk("a", [0, 0]), talk("b", [])], engine, schedule)
    assert [result.value for result in results] == [[], []]
    assert engine.batches == []


def test_sequential_asks_one_call_at_a_time_and_lockstep_one_batch_a_step() -> None:
    plan = [[3, 1], [2, 2]]
    engine = EchoEngine()
    run_all([talk(str(i), steps) for i, steps in enumerate(plan)], engine, Schedule.SEQUENTIAL)
    assert engine.batches == [1] * 8
    engine = EchoEngine()
    run_all([talk(str(i), steps) for i, steps in enumerate(plan)], engine, Schedule.LOCKSTEP)
    assert engine.batches == [5, 3]


def test_lockstep_refills_the_places_of_finished_programs() -> None:
    engine = EchoEngine()
    run_all([talk(str(i), [1] * (1 + i % 2)) for i in range(6)], engine, Schedule.LOCKSTEP, max_in_flight=2)
    assert sum(engine.batches) == 9
    assert len(engine.batches) == 5


def test_a_failure_reaches_the_program_and_is_counted() -> None:
    [result] = run_all([talk("bad", [2])], EchoEngine(), Schedule.LOCKSTEP)
    assert result == Result([], Usage(calls=2, failures=2))


@pytest.mark.parametrize("schedule", [Schedule.LOCKSTEP, Schedule.CONCURRENT])
def test_programs_are_started_lazily_within_the_bound(schedule: Schedule) -> None:
    active, most, started = 0, 0, 0

    def counted(i: int) -> Program[int]:
        nonlocal active, most
        active += 1
        most = max(most, active)
        for _ in range(1 + i % 3):
            yield [ask(str(i))]
        active -= 1
        return i

    def programs() -> Iterator[Program[int]]:
        nonlocal started
        for i in range(20):
            started += 1
            yield counted(i)

    async def first_then_all() -> list[int]:
        results = run(programs(), EchoEngine(), schedule, 3)
        index, result = await anext(results)
        assert started < 20
        return [index, *[i async for i, _ in results]] if result.value == index else []

    assert sorted(asyncio.run(first_then_all())) == list(range(20))
    assert most == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_closes_the_other_programs_and_is_raised(schedule: Schedule) -> None:
    closed: list[str] = []

    def patient(name: str) -> Program[None]:
        try:
            while True:
                yield [ask(name)]
        finally:
            closed.append(name)

    def failing() -> Program[None]:
        yield [ask("x")]
        raise LookupError("broken program")

    programs = [failing(), patient("a"), patient("b")] if schedule is Schedule.SEQUENTIAL else [
        patient("a"), failing(), patient("b"),
    ]  # fmt: skip
    with pytest.raises(LookupError, match="broken program"):
        run_all(programs, EchoEngine(), schedule)
    assert sorted(closed) == ([] if schedule is Schedule.SEQUENTIAL else ["a", "b"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_engine_error_and_an_early_end_close_the_programs(schedule: Schedule) -> None:
    closed: list[int] = []

    def program(i: int) -> Program[int]:
        try:
            yield [ask("x")] * (1 + i)
            yield [ask("y")]
        finally:
            closed.append(i)
        return i

    class Broken:
        async def complete(self, calls: Sequence[Call]) -> list[Completion]:
            await asyncio.sleep(0)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        run_all([program(0)], Broken(), schedule)
    assert closed == [0]

    async def stop_after_one() -> None:
        results = run([program(i) for i in range(1, 4)], EchoEngine(), schedule, 2)
        async for _ in results:
            break
        await results.aclose()

    closed.clear()
    asyncio.run(stop_after_one())
    assert len(closed) == len(set(closed)) >= 1
    assert len(asyncio.run(gather([], EchoEngine(), schedule))) == 0


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_in_flight is 0"):
        run_all([], EchoEngine(), Schedule.CONCURRENT, 0)
