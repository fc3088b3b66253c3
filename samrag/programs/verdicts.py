"""How verdicts are given: reasoned, directly, or directly where that is sure. Pure.

A program only knows that it asks for verdicts. This changes its calls on their way out, so that every program has the
three modes, and none has a line about them. A direct verdict is one step of the model instead of a hundred, and has a
probability, which the mode `cascade` compares with a threshold set on held-out rows (`inference/calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from samrag.calls import JUDGEMENTS, Call, CallKind, Judgement, Program, Reply, T
from samrag.schema import Verdict


class VerdictMode(StrEnum):
    """How a judging call is answered."""

    REASONED = "reasoned"  # the chain of thought, then the verdict: the paper's
    DIRECT = "direct"  # the verdict alone
    CASCADE = "cascade"  # direct, and reasoned where the probability is below the threshold


@dataclass(frozen=True, slots=True)
class VerdictOptions:
    """How sure is sure enough."""

    verdict_mode: VerdictMode = VerdictMode.REASONED
    """Reasoned, direct or cascade."""
    sure: float = 0.9
    """Cascade: probability from which a direct verdict stands."""
    sure_by_kind: Mapping[str, float] = field(default_factory=dict)
    """Cascade: thresholds of single kinds, as `inference/calibrate.py` finds them."""

    def __post_init__(self) -> None:
        for value in (self.sure, *self.sure_by_kind.values()):
            if not 0 <= value <= 1:
                raise ValueError(f"sure is {value}; it must be between 0 and 1")

    def threshold(self, kind: CallKind) -> float:
        """Probability from which a direct verdict of a kind stands."""
        return self.sure_by_kind.get(kind, self.sure)


def with_verdicts(program: Program[T], options: VerdictOptions) -> Program[T]:
    """The same program, its judging calls answered in the mode that is asked for.

    An image whose verdict is not False is asked about with reasoning in any mode when its verdict and its description
    come from one call: the description is what an answer is drawn from. A direct call without a usable reply is asked
    again with reasoning in the cascade, and stays a failure otherwise.
    """
    if options.verdict_mode is VerdictMode.REASONED:
        return (yield from program)
    try:
        calls = next(program)
        while True:
            replies = yield from _answered(calls, options)
            calls = program.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


def _answered(calls: Sequence[Call], options: VerdictOptions) -> Generator[list[Call], list[Reply], list[Reply]]:
    replies = list((yield [replace(call, direct=call.kind in JUDGEMENTS) for call in calls]))
    again = [i for i, call in enumerate(calls) if call.kind in JUDGEMENTS and _needs_reasons(call, replies[i], options)]
    if again:
        for i, reply in zip(again, (yield [calls[i] for i in again]), strict=True):
            replies[i] = reply
    return replies


def _needs_reasons(call: Call, reply: Reply, options: VerdictOptions) -> bool:
    if isinstance(reply, Judgement) and call.kind is CallKind.IS_REL_IMAGE and reply.verdict is not Verdict.FALSE:
        return True
    if options.verdict_mode is not VerdictMode.CASCADE:
        return False
    if not isinstance(reply, Judgement) or reply.probability is None:
        return True
    return reply.probability < options.threshold(call.kind)
