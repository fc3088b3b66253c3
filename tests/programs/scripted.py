"""Drive a program with a function from call to reply; no model, no engine, no event loop."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from samrag.calls import (
    INTERLEAVED_KINDS,
    JUDGEMENTS,
    RATINGS,
    Answer,
    Call,
    CallKind,
    Caption,
    Completion,
    Composition,
    Facet,
    Failure,
    FailureReason,
    Judgement,
    Program,
    Rating,
    Reply,
)
from samrag.schema import Document, Modality, Usage, Verdict

T = TypeVar("T")
Script = Callable[[Call], Reply]

BROKEN = Failure(FailureReason.SERVER)
RULES = {
    CallKind.IS_REL_TEXT: "rel",
    CallKind.IS_REL_IMAGE: "rel",
    CallKind.CAPTION_QUERY: "caption",
    CallKind.ANSWER: "answer",
    CallKind.IS_USE: "use",
    CallKind.IS_SUP: "sup",
    CallKind.INTERLEAVED_EN: "compose",
    CallKind.INTERLEAVED_ZH: "compose",
    CallKind.CRITIC_TEXT: "critic",
    CallKind.CRITIC_IMAGE: "critic",
    CallKind.CONFIDENCE: "confidence",
    CallKind.FACET: "facet",
}
DEFAULTS = {
    "rel": Verdict.TRUE,
    "caption": "caption of {title}",
    "answer": "a",
    "use": Verdict.TRUE,
    "sup": Verdict.TRUE,
    "compose": "text",
    "critic": 1.0,
    "confidence": 1.0,
    "facet": "facet",
}


@dataclass(frozen=True, slots=True)
class Played(Generic[T]):
    """What a program returned, and the calls of each of its steps."""

    value: T
    steps: list[list[Call]]

    @property
    def calls(self) -> list[Call]:
        """All calls, in order."""
        return [call for step in self.steps for call in step]

    def of(self, *kinds: CallKind) -> list[Call]:
        """The calls of some kinds, in order."""
        return [call for call in self.calls if call.kind in kinds]


def play(program: Program[T], script: Script) -> Played[T]:
    """Run a program to its end."""
    steps: list[list[Call]] = []
    replies: list[Reply] | None = None
    try:
        while True:
            calls = list(program.send(replies))  # type: ignore[arg-type]
            steps.append(calls)
            replies = [script(call) for call in calls]
    except StopIteration as stop:
        return Played(stop.value, steps)


class ScriptedEngine:
    """What a schedule needs of an engine, with a script behind it."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        return [
            Completion(reply, Usage(calls=1, failures=int(isinstance(reply, Failure))))
            for reply in map(self.script, calls)
        ]


def by_rules(**rules: Any) -> Script:
    """A script by kind, whose rules have these names; whatever is not named says yes.

    The names: `rel`, `caption`, `answer`, `use`, `sup`, `compose`, `critic`, `confidence`, `facet`.

    A rule is a reply, a list of replies (one a call, the last one for all further calls), or a function of the call.
    A verdict stands for its judgement, a text for an answer, a caption or a facet, a tuple for an answer of several
    values or for the numbers of a rating, a number for a rating that has it everywhere.
    """
    rules = {name: list(rule) if isinstance(rule, list) else rule for name, rule in (DEFAULTS | rules).items()}

    def script(call: Call) -> Reply:
        rule = rules[RULES[call.kind]]
        if isinstance(rule, list):
            rule = rule.pop(0) if len(rule) > 1 else rule[0]
        elif callable(rule):
            rule = rule(call)
        if isinstance(rule, float):
            rule = (rule,) * len(RATINGS[call.kind])
        if call.kind in RATINGS and isinstance(rule, tuple):
            return Rating(rule, about(call))
        if call.kind is CallKind.FACET and isinstance(rule, str):
            return Facet(rule, about(call))
        if isinstance(rule, Verdict):
            return Judgement(rule, f"{call.kind} of {call.answer or call.title or call.passages[0].title}: {rule}")
        if isinstance(rule, str):
            if call.kind in INTERLEAVED_KINDS.values():
                return Composition(rule, "because")
            text = rule.format(title=call.title)
            return Caption(text) if call.kind is CallKind.CAPTION_QUERY else Answer((text,), "because")
        return Answer(rule, "because") if isinstance(rule, tuple) else rule

    return script


def relevant(*titles: str) -> Callable[[Call], Verdict]:
    """A rule for `rel`: True for the documents of these titles alone."""
    return lambda call: Verdict.TRUE if shown_titles(call)[0] in titles else Verdict.FALSE


def shown_titles(call: Call) -> list[str]:
    """Titles of what a call shows: its passages, or its image."""
    return [passage.title for passage in call.passages] or [call.title]


def hashed(seed: int, failure_rate: float = 0.15) -> Script:
    """A script drawn from a hash of the call alone; a judgement's reasoning tells what it judged."""

    def script(call: Call) -> Reply:
        rng = random.Random(hashlib.sha256(f"{seed}{call!r}".encode()).digest())
        if rng.random() < failure_rate:
            return Failure(rng.choice(list(FailureReason)))
        if call.kind in JUDGEMENTS:
            return Judgement(rng.choice(JUDGEMENTS[call.kind]), about(call))
        if call.kind in RATINGS:
            return Rating(tuple(rng.choice([0.0, 0.5, 0.8, 1.0]) for _ in RATINGS[call.kind]), about(call))
        if call.kind is CallKind.FACET:
            return Facet(rng.choice(["", "t1 t2", "i1 caption", "t5", "t7 t3"]), about(call))
        if call.kind is CallKind.ANSWER:
            return Answer(rng.choice([("a",), ("b",), ("A",), ("b", "a"), ()]), about(call))
        if call.kind in INTERLEAVED_KINDS.values():
            image, document = rng.randint(0, 5), rng.randint(0, 5)
            return Composition(f"a ![b](IMG#{image}) <sup>[c](DOC#{document})</sup>" * rng.randint(0, 2), about(call))
        return Caption(f"caption of {call.title}")

    return script


def about(call: Call) -> str:
    """What a call shows and judges, as one text."""
    return f"{call.kind}|{call.answer}|{','.join(shown_titles(call))}"


def text(i: int) -> Document:
    """A text whose title is its id."""
    return Document(f"t{i}", Modality.TEXT, f"t{i}", text=f"text {i}")


def image(i: int) -> Document:
    """An image whose title is its id."""
    return Document(f"i{i}", Modality.IMAGE, f"i{i}", image=f"i{i}.png")


def texts(count: int) -> list[Document]:
    """Texts t0, t1, ..."""
    return [text(i) for i in range(count)]


def mixed(count: int) -> list[Document]:
    """Texts and images in turn: t0, i1, t2, ..."""
    return [image(i) if i % 2 else text(i) for i in range(count)]
