"""What a stage still has to ask, found without asking: stored replies take its programs as far as they go.

Used for dry runs and for batches. A program whose next reply is not stored is set aside, so nothing is asked for that
a stored reply would have made needless; when those replies are there, the next look finds the calls that follow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samrag.calls import Completion, Failure, FailureReason, Program
from samrag.engines.base import Engine, RawReply, Request
from samrag.engines.recorded import Keys, Store
from samrag.prompts import PromptStyle


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request whose reply is not stored."""

    key: str
    request: Request
    canonical: str
    """The request as the store keeps it."""


class PendingBackend:
    """Answers from a store, and remembers what it lacks."""

    def __init__(
        self, identity: str, store: Store, image_root: Path, failed: Mapping[str, Failure] | None = None
    ) -> None:
        """Keep the parts.

        Args:
            identity: Of the backend that will answer.
            store: Where replies are.
            image_root: Folder that image paths are relative to.
            failed: By key, requests that were given up.
        """
        self.identity = identity
        self.store = store
        self.failed = failed or {}
        self.num_stored = 0
        self._keys = Keys(identity, image_root)
        self._noted: set[str] = set()
        self._fresh: list[Wanted] = []

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Stored replies; for all others a failure of reason `pending`."""
        described = [self._keys.describe(request) for request in requests]
        known = self.store.get([item[0] for item in described if not isinstance(item, Failure)])
        self.num_stored += len(known)
        replies: list[RawReply | Failure] = []
        for request, item in zip(requests, described, strict=True):
            if isinstance(item, Failure):
                replies.append(item)
                continue
            key, canonical = item
            reply = known.get(key) or self.failed.get(key)
            if reply is None and key not in self._noted:
                self._noted.add(key)
                self._fresh.append(Wanted(key, request, canonical))
            replies.append(reply or Failure(FailureReason.PENDING))
        return replies

    async def close(self) -> None:
        """Nothing is held; the store belongs to others."""

    def take(self) -> list[Wanted]:
        """What was found lacking since the last time; each request once."""
        fresh, self._fresh = self._fresh, []
        return fresh


@dataclass(slots=True)
class Layer:
    """How far stored replies take the programs of a stage."""

    backend: PendingBackend
    style: PromptStyle
    repairs: bool = True
    num_finished: int = 0
    num_waiting: int = 0

    async def wanted(self, programs: Iterable[Program[Any]]) -> AsyncIterator[Wanted]:
        """Run each program as far as it comes; yield the requests it waits for."""
        engine = Engine(self.backend, self.style, repairs=self.repairs)
        for program in programs:
            if await self._advance(program, engine):
                self.num_finished += 1
            else:
                self.num_waiting += 1
            for item in self.backend.take():
                yield item

    @staticmethod
    async def _advance(program: Program[Any], engine: Engine) -> bool:
        """Whether the program came to its end."""
        replies = None
        try:
            while True:
                calls = list(program.send(replies))  # type: ignore[arg-type]
                completions = await engine.complete(calls) if calls else []
                if any(map(_is_pending, completions)):
                    program.close()
                    return False
                replies = [completion.reply for completion in completions]
        except StopIteration:
            return True


def _is_pending(completion: Completion) -> bool:
    return isinstance(completion.reply, Failure) and completion.reply.reason is FailureReason.PENDING
