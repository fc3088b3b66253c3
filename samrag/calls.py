"""Calls and replies: what a program asks a model, and what it gets back. Pure.

A call says *what* is asked; how it is worded is the business of `samrag.prompts`, who answers it of `samrag.engines`.
A failure is a reply of its own type, so that it can never pass for a verdict, an answer or a caption.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from samrag.schema import Language, Usage, Verdict


class CallKind(StrEnum):
    """The questions one can put to a model. The prompt template of a kind bears its name."""

    IS_REL_TEXT = "is_rel_text"
    IS_REL_IMAGE = "is_rel_image"
    CAPTION_RAW = "caption_raw"
    CAPTION_QUERY = "caption_query"
    ANSWER = "answer"
    IS_USE = "is_use"
    IS_SUP = "is_sup"
    INTERLEAVED_EN = "interleaved_en"
    INTERLEAVED_ZH = "interleaved_zh"
    CRITIC_TEXT = "critic_text"
    CRITIC_IMAGE = "critic_image"
    CONFIDENCE = "confidence"
    FACET = "facet"


INTERLEAVED_KINDS = {Language.EN: CallKind.INTERLEAVED_EN, Language.ZH: CallKind.INTERLEAVED_ZH}
"""The kind that asks for an answer of text and images, by the language of question and answer."""

CLIMB_KINDS = (CallKind.CRITIC_TEXT, CallKind.CRITIC_IMAGE, CallKind.CONFIDENCE, CallKind.FACET)
"""The kinds that CLIMB alone asks."""

SAM_RAG_KINDS = tuple(kind for kind in CallKind if kind not in (*INTERLEAVED_KINDS.values(), *CLIMB_KINDS))
"""The kinds of SAM-RAG's loop (section 3.4), which one student is tuned for together."""

JUDGEMENTS = {
    CallKind.IS_REL_TEXT: (Verdict.TRUE, Verdict.FALSE),
    CallKind.IS_REL_IMAGE: (Verdict.TRUE, Verdict.FALSE),
    CallKind.IS_USE: (Verdict.TRUE, Verdict.FALSE),
    CallKind.IS_SUP: (Verdict.TRUE, Verdict.PARTIAL, Verdict.FALSE),
}
"""The verdicts each judging kind may return (SAM-RAG, Table 1)."""

RATINGS = {
    CallKind.CRITIC_TEXT: ("Relevance", "Specificity"),
    CallKind.CRITIC_IMAGE: ("Relevance", "Specificity", "Alignment"),
    CallKind.CONFIDENCE: ("Support", "Specificity", "Consistency"),
}
"""What each rating kind gives a number to (CLIMB's R/E/C critic, and the terms of its confidence)."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A document as a model sees it: an image stands here as its query caption."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the reply is drawn. `seed` makes a draw repeatable where the engine can."""

    temperature: float = 0.0
    max_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Call:
    """One thing asked of a model. Fields that a kind does not use stay empty."""

    kind: CallKind
    question: str = ""
    passages: tuple[Passage, ...] = ()
    """Content: one passage for is_rel_text and the critics, all of C for the kinds about an answer; for the interleaved
    kinds all of C, each title headed by the number that the answer refers to."""
    title: str = ""
    """Title of the image."""
    image: str | None = None
    """Image path relative to the engine's image root."""
    answer: str = ""
    """The answer under judgement."""
    critique: str = ""
    """Why the previous answer was refused (regeneration), or which facets were of no use (facet)."""
    direct: bool = False
    """Ask a judging kind for its verdict alone, without reasoning; only tuned students can be asked so."""
    sampling: Sampling = field(default_factory=Sampling)
    sample_index: int = 0
    """Repeated draws of an equal call are different records."""


class FailureReason(StrEnum):
    """Why there is no usable reply."""

    INVALID_REPLY = "invalid_reply"  # not the JSON, or not the verdict, that was asked for
    LENGTH = "length"  # cut off at max_tokens
    CONTENT_FILTER = "content_filter"
    BAD_REQUEST = "bad_request"
    BAD_IMAGE = "bad_image"
    TOO_LONG = "too_long"  # the prompt does not fit the model's context
    SERVER = "server"  # still failing after the last retry
    RATE_LIMITED = "rate_limited"  # turned away by the server's limits, time and again
    PENDING = "pending"  # not asked yet: it waits for a batch


@dataclass(frozen=True, slots=True)
class Failure:
    """No usable reply. Never a label, a verdict or an answer."""

    reason: FailureReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its chain of thought."""

    verdict: Verdict
    reasoning: str
    probability: float | None = None
    """Probability of the verdict, where the engine measures it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer drawn from content; no values: the content does not state it."""

    values: tuple[str, ...]
    reasoning: str
    probability: float | None = None
    """Mean probability of its tokens, where the engine measures it."""


@dataclass(frozen=True, slots=True)
class Caption:
    """What an image shows."""

    text: str


@dataclass(frozen=True, slots=True)
class Composition:
    """An answer of text, images and citations, as the model wrote it: its references are not checked."""

    markdown: str
    """Empty: the content does not state the answer."""
    reasoning: str
    category: str = ""
    """Type of the question, in the model's eyes."""


@dataclass(frozen=True, slots=True)
class Rating:
    """Numbers from 0 to 1, one for each name in `RATINGS`."""

    scores: tuple[float, ...]
    reasoning: str


@dataclass(frozen=True, slots=True)
class Facet:
    """What the evidence lacks, as a short noun phrase; empty: nothing."""

    text: str
    reasoning: str


Reply = Judgement | Answer | Caption | Composition | Rating | Facet | Failure

T = TypeVar("T")
Program = Generator[list[Call], list[Reply], T]
"""An algorithm that now and then needs a model: yields calls, receives replies in that order, returns its result."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply and what it cost."""

    reply: Reply
    usage: Usage
    text: str = ""
    """The raw text the reply was read from: the target of a distilled training row."""
