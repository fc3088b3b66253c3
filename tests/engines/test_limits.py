"""Limits by a clock that tests move: pace, learning from headers, and calls in flight that adapt."""

from __future__ import annotations

import asyncio
import heapq
import itertools

import pytest

from samrag.engines.limits import Allowance, Lanes, Limiter, retry_after_s, span_s


class FakeClock:
    """Time that passes only when everyone waits."""

    def __init__(self) -> None:
        self.time = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._order), future))
        await future

    async def run(self, *tasks: asyncio.Task[object]) -> None:
        """Let tasks work, and time pass, until all are done."""
        while not all(task.done() for task in tasks):
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers and not all(task.done() for task in tasks):
                self.time, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    future.set_result(None)


def paced(requests_per_minute: float, num_calls: int, latency_s: float = 1.0) -> tuple[list[float], int]:
    """When calls were sent, and how many a server with that limit would have refused."""
    clock = FakeClock()
    limiter = Limiter(64, requests_per_minute, None, clock)
    sent: list[float] = []

    async def call() -> None:
        async with limiter.lanes.lane():
            turn = await limiter.turn(10)
            sent.append(clock.now())
            await clock.sleep(latency_s)
            limiter.succeeded(turn, "answer", {})

    async def work() -> None:
        tasks = [asyncio.ensure_future(call()) for _ in range(num_calls)]
        await clock.run(*tasks)

    asyncio.run(work())
    refused = sum(sum(1 for t in sent if begin - 60 < t <= begin) > requests_per_minute for begin in sent)
    return sent, refused


def test_the_pace_uses_the_allowance_and_never_passes_it() -> None:
    sent, refused = paced(600, 1300)
    assert refused == 0
    second_minute = [t for t in sent if 60 <= t < 120]
    assert len(second_minute) >= 0.95 * 600


def test_tokens_a_minute_hold_back_too() -> None:
    allowance = Allowance(600)
    begins = [allowance.take(100, 0.0) for _ in range(4)]
    assert begins[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(begins[1:])]
    assert gaps == pytest.approx([10.0833] * 2, abs=1e-3)


def test_a_servers_limit_is_taken_over_but_never_above_the_users() -> None:
    limiter = Limiter(4, 100, None, FakeClock())
    limiter.learn({"x-ratelimit-limit-requests": "50", "x-ratelimit-limit-tokens": "9000"})
    assert (limiter.requests.per_minute, limiter.tokens.per_minute) == (50, 9000)
    limiter.learn({"x-ratelimit-limit-requests": "5000"})
    assert limiter.requests.per_minute == 100


def test_nothing_remaining_waits_for_the_reset() -> None:
    clock = FakeClock()
    limiter = Limiter(4, None, None, clock)
    limiter.learn(
        {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "12s"}
    )
    assert limiter.requests.take(1, 0.0) >= 12.0


def test_calls_in_flight_grow_by_one_and_shrink_by_a_share_once_a_round() -> None:
    lanes = Lanes(100)
    first = lanes.width
    lanes.widen()
    assert lanes.width == first + 1
    began = lanes.round
    lanes.narrow(0.6, began)
    narrowed = lanes.width
    assert narrowed < first + 1
    lanes.narrow(0.6, began)  # of the same round: counted once
    assert lanes.width == narrowed
    for _ in range(narrowed + 1):
        lanes.widen()
    assert lanes.width == narrowed + 1
    for _ in range(100):
        lanes.narrow(0.5, lanes.round)
    assert lanes.width == 1


def test_latency_that_grows_narrows_and_steady_latency_does_not() -> None:
    clock = FakeClock()
    limiter = Limiter(64, None, None, clock)

    def answer(latency_s: float) -> None:
        turn = asyncio.run(limiter.turn(1))
        clock.time += latency_s
        limiter.succeeded(turn, "answer", {})

    for _ in range(50):
        answer(1.0)
    steady = limiter.lanes.width
    assert limiter.lanes.round == 0
    for _ in range(60):
        answer(6.0)
    assert limiter.lanes.round > 0
    assert limiter.lanes.width < steady


def test_a_429_parks_everyone_as_long_as_the_server_says() -> None:
    clock = FakeClock()
    limiter = Limiter(4, None, None, clock)

    async def work() -> float:
        turn = await limiter.turn(1)
        limiter.overloaded(turn, {"retry-after": "7"}, park=True)
        task = asyncio.ensure_future(limiter.turn(1))
        await clock.run(task)
        return (await task).began

    assert asyncio.run(work()) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("6m0s", 360), ("120ms", 0.12), ("1h2m", 3720), ("3", 3), ("soon", None), (None, None)],
)
def test_spans_of_rate_limit_headers(text: str | None, seconds: float | None) -> None:
    assert span_s(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"retry-after": "2"}, 2.0), ({"retry-after-ms": "250"}, 0.25), ({"retry-after": "99999"}, 300.0), ({}, None),
     ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0), ({"retry-after": "never"}, None)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date_and_is_capped(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds
