"""What an engine is: call in, typed reply out; in between, text.

An engine with `repairs` asks once more after an unusable reply: with twice the room after one that was cut, and after
an invalid one by a further turn that shows the model its reply and what is wrong with it. Each second try is a request
of its own, so a store pays it once, too.

A `Backend` turns prompts into raw text (`local`: a Hugging Face model; `api`: an OpenAI-compatible server; `recorded`:
either of them behind a store). `Engine` is the one place where calls are rendered and replies are parsed, so every
backend speaks the same prompts and is read by the same strict parser.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from samrag.calls import Call, CallKind, Completion, Failure, FailureReason, Judgement, Reply, Sampling
from samrag.engines.meter import Meter
from samrag.prompts import Prompt, PromptStyle, render, style_hash, template_hash
from samrag.replies import parse, reply_schema
from samrag.schema import Usage

_MORE_ROOM = 2
_REMEDIES = 2  # more room, and a repair turn, each once


@dataclass(frozen=True, slots=True)
class Repair:
    """A further turn after an invalid reply."""

    reply: str
    """What the model had said."""
    message: str
    """What is wrong with it, and what is wanted."""


@dataclass(frozen=True, slots=True)
class Request:
    """A rendered call: everything that can change the reply, and so everything that goes into a store's key."""

    kind: CallKind
    prompt: Prompt
    sampling: Sampling
    sample_index: int
    template: str
    """Hash of the prompt templates."""
    repair: Repair | None = None
    """Set for the second turn that follows an invalid reply."""
    direct: bool = False
    """The verdict alone is wanted, with its probability; the prompt says so too, and with it the key."""


@dataclass(frozen=True, slots=True)
class RawReply:
    """A model's own new text, before anything is read from it."""

    text: str
    finish_reason: str
    """`stop`, `length` or `content_filter`."""
    input_tokens: int = 0
    output_tokens: int = 0
    probability: float | None = None
    """Of a direct verdict, among those its kind has."""
    cached: bool = False
    """True when it came from a store and nothing was asked of the model."""


class Backend(Protocol):
    """Turns requests into raw text; a request that cannot be answered yields a `Failure` in its place."""

    @property
    def identity(self) -> str:
        """Names the model, its adapter and whatever else can change a reply."""
        ...

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Answer requests, in order. Raises `UserError` when the run must stop (bad key, unknown model)."""
        ...

    async def close(self) -> None:
        """Release what is held."""
        ...


class Engine:
    """Answers calls with one backend and one prompt style."""

    def __init__(
        self, backend: Backend, style: PromptStyle, *, repairs: bool = False, meter: Meter | None = None
    ) -> None:
        """Keep the parts.

        Args:
            backend: Who answers.
            style: How calls are worded.
            repairs: Ask once more after an unusable reply; for backends that can carry on a conversation.
            meter: Counts what happens; a new one by default.
        """
        self.backend = backend
        self.style = style
        self.repairs = repairs
        self.meter = meter or Meter()

    @property
    def identity(self) -> str:
        """Model and templates."""
        return f"{self.backend.identity}|{self.style}:{style_hash(self.style)}"

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        """Answer calls, in order."""
        requests = [self.request(call) for call in calls]
        done = await self._ask(requests)
        for _ in range(_REMEDIES if self.repairs else 0):
            again = {
                i: second
                for i, call in enumerate(calls)
                if (second := _second_try(call, requests[i], done[i].reply, done[i].text))
            }
            if not again:
                break
            for (i, request), completion in zip(again.items(), await self._ask(list(again.values())), strict=True):
                first = done[i]
                assert isinstance(first.reply, Failure)
                self.meter.second_tries[first.reply.reason] += 1
                usage = replace(first.usage, failures=0) + completion.usage
                requests[i], done[i] = request, replace(completion, usage=usage)
        self.meter.failures.update(item.reply.reason for item in done if isinstance(item.reply, Failure))
        return done

    async def _ask(self, requests: Sequence[Request]) -> list[Completion]:
        replies = await self.backend.generate(requests)
        for raw in replies:
            if isinstance(raw, RawReply):
                self.meter.stored += raw.cached
                self.meter.asked += not raw.cached
        return [_completion(request, raw) for request, raw in zip(requests, replies, strict=True)]

    def request(self, call: Call) -> Request:
        """Render a call."""
        template = template_hash(self.style, call.kind)
        prompt = render(call, self.style)
        return Request(call.kind, prompt, call.sampling, call.sample_index, template, direct=call.direct)

    def key(self, call: Call) -> str:
        """Key of the call's reply in the store behind this engine; of the last one, where there were second tries.

        Raises:
            TypeError: the backend keeps no store.
        """
        key, known = getattr(self.backend, "key", None), getattr(self.backend, "known", None)
        if key is None or known is None:
            raise TypeError(f"{type(self.backend).__name__} keeps no store; wrap it in RecordedBackend")
        request = self.request(call)
        while self.repairs and (raw := known(request)) is not None:
            completion = _completion(request, raw)
            second = _second_try(call, request, completion.reply, completion.text)
            if second is None or known(second) is None:
                break
            request = second
        return str(key(request))

    async def close(self) -> None:
        """Release the backend."""
        await self.backend.close()


def _completion(request: Request, raw: RawReply | Failure) -> Completion:
    if isinstance(raw, Failure):
        return Completion(raw, Usage(calls=1, failures=1))
    reply: Reply
    if raw.finish_reason == "length":
        reply = Failure(FailureReason.LENGTH, f"cut at max_tokens={request.sampling.max_tokens}")
    elif raw.finish_reason == "content_filter":
        reply = Failure(FailureReason.CONTENT_FILTER, raw.text[:200])
    else:
        reply = parse(request.kind, raw.text)
        if isinstance(reply, Judgement):
            reply = replace(reply, probability=raw.probability)
    usage = Usage(1, int(raw.cached), int(isinstance(reply, Failure)), raw.input_tokens, raw.output_tokens)
    return Completion(reply, usage, raw.text)


def _second_try(call: Call, request: Request, reply: Reply, text: str) -> Request | None:
    """The request that may mend an unusable reply; None when there is nothing to mend, or it was tried."""
    reason = reply.reason if isinstance(reply, Failure) else None
    room = call.sampling.max_tokens
    if reason is FailureReason.LENGTH and request.sampling.max_tokens == room:
        return replace(request, sampling=replace(request.sampling, max_tokens=_MORE_ROOM * room))
    if reason is FailureReason.INVALID_REPLY and request.repair is None and text:
        assert isinstance(reply, Failure)
        return replace(request, repair=Repair(text, _repair_message(request.kind, reply.detail)))
    return None


def _repair_message(kind: CallKind, problem: str) -> str:
    return (
        f"Your last reply cannot be used: {problem}. Send the whole reply again, as one JSON object of this schema and"
        f" nothing else: {json.dumps(reply_schema(kind))}"
    )
