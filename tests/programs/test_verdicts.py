"""Verdict modes: what is asked instead, what stands, and that the program itself is none the wiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from samrag.calls import JUDGEMENTS, Answer, Call, CallKind, Failure, FailureReason, Judgement, Passage, Reply
from samrag.programs.verdicts import VerdictMode, VerdictOptions, with_verdicts
from samrag.schema import Verdict

TEXT = Call(CallKind.IS_REL_TEXT, "Q?", (Passage("T", "x"),))
IMAGE = Call(CallKind.IS_REL_IMAGE, "Q?", title="T", image="a.png")
ANSWER = Call(CallKind.ANSWER, "Q?", (Passage("T", "x"),))


def program(calls: list[Call]) -> Any:
    first = yield calls
    second = yield [ANSWER]
    return [*first, *second]


def play(calls: list[Call], reply: Callable[[Call], Reply], options: VerdictOptions) -> tuple[list[Reply], list[Any]]:
    """The program's result, and the calls of each step."""
    running, steps = with_verdicts(program(calls), options), []
    asked = next(running)
    while True:
        steps.append(asked)
        try:
            asked = running.send([reply(call) for call in asked])
        except StopIteration as end:
            return end.value, steps


def replying(probability: float | None, verdict: Verdict = Verdict.TRUE) -> Callable[[Call], Reply]:
    def reply(call: Call) -> Reply:
        if call.kind is CallKind.ANSWER:
            return Answer(("a",), "r")
        return Judgement(verdict, "", probability) if call.direct else Judgement(Verdict.FALSE, "because")

    return reply


def test_reasoned_verdicts_are_asked_as_the_program_asks() -> None:
    _, steps = play([TEXT, ANSWER], replying(0.9), VerdictOptions())
    assert steps == [[TEXT, ANSWER], [ANSWER]]


def test_direct_verdicts_take_the_place_of_reasoned_ones_alone() -> None:
    result, steps = play([TEXT, ANSWER], replying(0.5), VerdictOptions(VerdictMode.DIRECT))
    assert [call.direct for call in steps[0]] == [True, False]
    assert len(steps) == 2
    assert result[0] == Judgement(Verdict.TRUE, "", 0.5)


@pytest.mark.parametrize(("probability", "stands"), [(0.95, True), (0.9, True), (0.89, False), (None, False)])
def test_the_cascade_reasons_where_it_is_not_sure(probability: float | None, stands: bool) -> None:
    result, steps = play([TEXT, ANSWER], replying(probability), VerdictOptions(VerdictMode.CASCADE, 0.9))
    assert len(steps) == (2 if stands else 3)
    assert stands or steps[1] == [TEXT]
    assert result[0] == (Judgement(Verdict.TRUE, "", probability) if stands else Judgement(Verdict.FALSE, "because"))


def test_kinds_may_have_thresholds_of_their_own() -> None:
    options = VerdictOptions(VerdictMode.CASCADE, 0.9, {CallKind.IS_REL_TEXT: 0.6})
    _, steps = play([TEXT], replying(0.7), options)
    assert len(steps) == 2


@pytest.mark.parametrize("mode", [VerdictMode.DIRECT, VerdictMode.CASCADE])
@pytest.mark.parametrize("verdict", [Verdict.TRUE, Verdict.FALSE])
def test_an_image_that_may_be_used_is_described(mode: VerdictMode, verdict: Verdict) -> None:
    result, steps = play([IMAGE, TEXT], replying(1.0, verdict), VerdictOptions(mode))
    assert len(steps) == (3 if verdict is Verdict.TRUE else 2)
    if verdict is Verdict.TRUE:
        assert steps[1] == [IMAGE]
        assert result[0] == Judgement(Verdict.FALSE, "because")


def test_a_direct_failure_is_reasoned_about_in_the_cascade_alone() -> None:
    def reply(call: Call) -> Reply:
        return Failure(FailureReason.TOO_LONG) if call.direct else replying(1.0)(call)

    direct, _ = play([TEXT], reply, VerdictOptions(VerdictMode.DIRECT))
    cascade, _ = play([TEXT], reply, VerdictOptions(VerdictMode.CASCADE))
    assert isinstance(direct[0], Failure)
    assert cascade[0] == Judgement(Verdict.FALSE, "because")


def test_every_judging_kind_can_be_asked_directly() -> None:
    from samrag.prompts import PromptStyle, render

    for kind in JUDGEMENTS:
        call = Call(kind, "Q?", (Passage("T", "x"),), "T", answer="a", direct=True)
        assert render(call, PromptStyle.STUDENT).instruction


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_a_threshold_is_a_probability(value: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        VerdictOptions(sure=value)
    with pytest.raises(ValueError, match="between 0 and 1"):
        VerdictOptions(sure_by_kind={"is_use": value})
