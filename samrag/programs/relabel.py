"""A teacher's second look at mined negatives: is_rel of each, with the question. Pure.

A negative that the teacher calls relevant is asked about again: when all votes agree it is a positive that the data
does not name, otherwise it is doubtful and trains nothing (RLHN, 2505.16967: to relabel is better than to drop). A call
without a usable reply says nothing: the document stays what it was.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from samrag.calls import Call, Judgement, Passage, Program, Reply
from samrag.programs.steps import SamplingOptions, relevance_of_image, relevance_of_text
from samrag.schema import Document, Modality, Verdict


class Finding(StrEnum):
    """What a second look makes of a negative."""

    NEGATIVE = "negative"  # not relevant
    POSITIVE = "positive"  # relevant by all votes
    DOUBTFUL = "doubtful"  # relevant by the first vote, but not by all
    UNKNOWN = "unknown"  # no usable reply to the first vote


@dataclass(frozen=True, slots=True)
class RelabelOptions(SamplingOptions):
    """Options of the second look."""

    temperature: float = 0.7
    """Votes must be able to differ."""
    num_votes: int = 3
    """Votes for a document that the first one calls relevant, the first included."""

    def __post_init__(self) -> None:
        if self.num_votes < 1:
            raise ValueError(f"num_votes is {self.num_votes}; it must be at least 1")


def relabel(
    question: str, candidates: Sequence[Document], num_negatives: int, options: RelabelOptions
) -> Program[list[Finding]]:
    """Look at candidates in their order until so many are not positive or doubtful; findings of those looked at.

    Args:
        question: the question.
        candidates: mined negatives, the spare ones last.
        num_negatives: how many are wanted.
        options: how the teacher is asked.
    """
    findings: list[Finding] = []
    lacking = num_negatives
    while lacking > 0 and len(findings) < len(candidates):
        batch = candidates[len(findings) : len(findings) + lacking]
        findings += yield from _look(question, batch, options)
        lacking = num_negatives - sum(finding in (Finding.NEGATIVE, Finding.UNKNOWN) for finding in findings)
    return findings


def _look(
    question: str, documents: Sequence[Document], options: RelabelOptions
) -> Generator[list[Call], list[Reply], list[Finding]]:
    """The first vote on all, then the further votes on those called relevant."""
    replies = yield [_call(question, document, options, 0) for document in documents]
    findings = [_vote(reply) for reply in replies]
    relevant = [number for number, finding in enumerate(findings) if finding is Finding.POSITIVE]
    votes = range(1, options.num_votes)
    replies = yield [_call(question, documents[number], options, vote) for number in relevant for vote in votes]
    for place, number in enumerate(relevant):
        further = replies[place * len(votes) : (place + 1) * len(votes)]
        if not all(_vote(reply) is Finding.POSITIVE for reply in further):
            findings[number] = Finding.DOUBTFUL
    return findings


def _call(question: str, document: Document, options: RelabelOptions, vote: int) -> Call:
    if document.modality is Modality.IMAGE:
        return relevance_of_image(question, document, options.sampling(), vote)
    return relevance_of_text(question, Passage(document.title, document.text), options.sampling(), vote)


def _vote(reply: Reply) -> Finding:
    if not isinstance(reply, Judgement):
        return Finding.UNKNOWN
    return Finding.POSITIVE if reply.verdict is Verdict.TRUE else Finding.NEGATIVE
