"""How fast a server may be asked: calls in flight, requests a minute, tokens a minute.

The calls in flight adapt: one more after each success until the first sign of overload, from then on one more a round;
fewer after a 429, a 503 or a timeout, and a little fewer when replies of a kind take much longer than they used to.
What a server says in its headers (`x-ratelimit-*`, `retry-after`) is obeyed. Pure apart from the clock, which tests
replace.

Left out: limits a day. A server that has one answers 429 with a long `retry-after`, and everything waits.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

_MINUTE_S = 60.0
_SLACK_S = 0.5  # a late call may catch up by so much, which keeps the pace without ever passing the limit
_FIRST_WIDTH = 8
_LONGEST_SERVER_DELAY_S = 300.0
_OVERLOADED, _STRAINED = 0.6, 0.9  # what is left of the calls in flight
_STRAIN, _LEAST_USUAL_S = 2.5, 0.05  # how much longer than usual is too long; below that latency all is noise


class Clock(Protocol):
    """Time, for those who wait."""

    def now(self) -> float:
        """Seconds since some fixed time."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds since some fixed time."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class Allowance:
    """So much a minute, evenly spread: any 60 seconds see at most that, but for a single amount that is larger.

    The whole state is the time from which nothing is owed any more; an amount books its share of time after it.
    """

    def __init__(self, per_minute: float | None = None) -> None:
        self._given = per_minute
        self.per_minute = per_minute
        self._owed_until = float("-inf")

    def take(self, amount: float, now: float) -> float:
        """Book an amount; returns the time from which it may be used."""
        if self.per_minute is None:
            return now
        begin = max(now, self._owed_until - _SLACK_S)
        self._owed_until = max(now, self._owed_until) + amount * (_MINUTE_S + _SLACK_S) / self.per_minute
        return begin

    def hold(self, until: float) -> None:
        """Let nothing begin before a time, and the even pace go on from there."""
        self._owed_until = max(self._owed_until, until + _SLACK_S)

    def learn(self, limit: float | None, remaining: float | None, reset_s: float | None, now: float) -> None:
        """Take over what a server said; a limit set by the user is never raised."""
        if limit is not None and limit > 0:
            self.per_minute = limit if self._given is None else min(limit, self._given)
        if self.per_minute is not None and remaining is not None and remaining < 1 and reset_s is not None:
            self.hold(now + min(reset_s, _MINUTE_S))


class Lanes:
    """At most so many calls at once, in the order they came; the number adapts between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.round = 0
        """Counts the narrowings, so that the failures of one round narrow once."""
        self._width = float(min(most, _FIRST_WIDTH))
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def width(self) -> int:
        """Calls that may be in flight now."""
        return int(self._width)

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """Hold one place while the block runs."""
        await self._enter()
        try:
            yield
        finally:
            self._busy -= 1
            self._admit()

    async def _enter(self) -> None:
        if self._busy < self.width and not self._waiting:
            self._busy += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given just now
                self._busy -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting and self._busy < self.width:
            place = self._waiting.popleft()
            if not place.done():
                self._busy += 1
                place.set_result(None)

    def widen(self) -> None:
        """After a success."""
        self._width = min(float(self.most), self._width + (1.0 if self.round == 0 else 1.0 / self._width))
        self._admit()

    def narrow(self, factor: float, began_in: int) -> None:
        """After a sign of overload from a call that began in a given round."""
        if began_in == self.round:
            self._width = max(1.0, self._width * factor)
            self.round += 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One attempt's leave to be sent."""

    began: float
    round: int


class Limiter:
    """All limits of one server and key."""

    def __init__(
        self,
        concurrency: int,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.lanes = Lanes(concurrency)
        self.requests = Allowance(requests_per_minute)
        self.tokens = Allowance(tokens_per_minute)
        self.clock = clock or SystemClock()
        self._parked_until = float("-inf")
        self._usual_s: dict[str, float] = {}
        self._strain = 1.0

    async def turn(self, tokens: float) -> Turn:
        """Wait until a request with so many tokens may be sent.

        Args:
            tokens: what the server will count: the prompt, and the most it may write.
        """
        now = self.clock.now()
        begin = max(self.requests.take(1, now), self.tokens.take(tokens, now))
        while (wait_s := max(begin, self._parked_until) - self.clock.now()) > 0:
            await self.clock.sleep(wait_s)
        return Turn(self.clock.now(), self.lanes.round)

    def succeeded(self, turn: Turn, kind: str, headers: Mapping[str, str]) -> None:
        """A request was answered."""
        self.learn(headers)
        self.lanes.widen()
        taken_s = max(self.clock.now() - turn.began, _LEAST_USUAL_S)
        usual_s = self._usual_s.setdefault(kind, taken_s)
        self._strain += 0.1 * (taken_s / usual_s - self._strain)
        self._usual_s[kind] += (taken_s - usual_s) * (0.2 if taken_s < usual_s else 0.01)
        if self._strain > _STRAIN:
            self._strain = 1.0
            self.lanes.narrow(_STRAINED, turn.round)

    def overloaded(self, turn: Turn, headers: Mapping[str, str], park: bool) -> None:
        """A request was turned away, or took too long; with `park`, everyone waits as long as the server says."""
        self.learn(headers)
        self.lanes.narrow(_OVERLOADED, turn.round)
        delay_s = retry_after_s(headers)
        if park and delay_s:
            self._parked_until = max(self._parked_until, self.clock.now() + delay_s)
            self.requests.hold(self._parked_until)

    def learn(self, headers: Mapping[str, str]) -> None:
        """Take over the limits that a reply's headers tell."""
        now = self.clock.now()
        for name, allowance in (("requests", self.requests), ("tokens", self.tokens)):
            limit, remaining = (_number(headers.get(f"x-ratelimit-{what}-{name}")) for what in ("limit", "remaining"))
            if limit is not None or remaining is not None:
                allowance.learn(limit, remaining, span_s(headers.get(f"x-ratelimit-reset-{name}")), now)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def span_s(text: str | None) -> float | None:
    """Seconds of a span as rate-limit headers write it (`1s`, `6m0s`, `120ms`, `1h2m`), or of a plain number."""
    if text is None or (number := _number(text)) is not None:
        return None if text is None else number
    parts = re.findall(r"([\d.]+)(ms|s|m|h|d)", text)
    if not parts or "".join(value + unit for value, unit in parts) != text.strip():
        return None
    units_s = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    values = [(_number(value), units_s[unit]) for value, unit in parts]
    return None if any(value is None for value, _ in values) else sum((value or 0.0) * unit for value, unit in values)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds a server asks to wait, from `retry-after-ms` or `retry-after` (a number or a date); None without."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if (value := _number(headers.get(name))) is not None:
            return min(value * unit_s, _LONGEST_SERVER_DELAY_S)
    try:
        date = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    return min(max(date.timestamp() - time.time(), 0.0), _LONGEST_SERVER_DELAY_S)
