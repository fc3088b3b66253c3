"""What an engine is: call in, typed reply out; in between, text.

A `Backend` turns prompts into raw text (`local`: a Hugging Face model; `api`: an OpenAI-compatible server; `recorded`:
either of them behind a store). `Engine` is the one place where calls are rendered and replies are parsed, so every
backend speaks the same prompts and is read by the same strict parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from samrag.calls import Call, CallKind, Completion, Failure, FailureReason, Reply, Sampling
from samrag.prompts import Prompt, PromptStyle, render, template_hash
from samrag.replies import parse
from samrag.schema import Usage


@dataclass(frozen=True, slots=True)
class Request:
    """A rendered call: everything that can change the reply, and so everything that goes into a store's key."""

    kind: CallKind
    prompt: Prompt
    sampling: Sampling
    sample_index: int
    template: str
    """Hash of the prompt templates."""


@dataclass(frozen=True, slots=True)
class RawReply:
    """A model's own new text, before anything is read from it."""

    text: str
    finish_reason: str
    """`stop`, `length` or `content_filter`."""
    input_tokens: int = 0
    output_tokens: int = 0
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

    def __init__(self, backend: Backend, style: PromptStyle) -> None:
        self.backend = backend
        self.style = style

    @property
    def identity(self) -> str:
        """Model and templates."""
        return f"{self.backend.identity}|{self.style}:{template_hash(self.style)}"

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        """Answer calls, in order."""
        replies = await self.backend.generate([self.request(call) for call in calls])
        return [self._completion(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def request(self, call: Call) -> Request:
        """Render a call."""
        return Request(call.kind, render(call, self.style), call.sampling, call.sample_index, template_hash(self.style))

    def key(self, call: Call) -> str:
        """The call's key in the store behind this engine.

        Raises:
            TypeError: the backend keeps no store.
        """
        key = getattr(self.backend, "key", None)
        if key is None:
            raise TypeError(f"{type(self.backend).__name__} keeps no store; wrap it in RecordedBackend")
        return str(key(self.request(call)))

    async def close(self) -> None:
        """Release the backend."""
        await self.backend.close()

    @staticmethod
    def _completion(call: Call, raw: RawReply | Failure) -> Completion:
        if isinstance(raw, Failure):
            return Completion(raw, Usage(calls=1, failures=1))
        reply: Reply
        if raw.finish_reason == "length":
            reply = Failure(FailureReason.LENGTH, f"cut at max_tokens={call.sampling.max_tokens}")
        elif raw.finish_reason == "content_filter":
            reply = Failure(FailureReason.CONTENT_FILTER)
        else:
            reply = parse(call.kind, raw.text)
        usage = Usage(1, int(raw.cached), int(isinstance(reply, Failure)), raw.input_tokens, raw.output_tokens)
        return Completion(reply, usage, raw.text)
