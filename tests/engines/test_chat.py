"""Direct verdicts over chat completions, and prompts whose static part comes first."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from samrag.calls import Call, CallKind, Failure, Passage
from samrag.engines.base import RawReply, Request
from samrag.engines.chat import ChatFormat, with_probability
from samrag.prompts import PromptStyle, render


def completion(tokens: list[str], alternatives: dict[str, float], at: int) -> dict[str, Any]:
    """A completion of these tokens, with the alternatives' probabilities at one of them."""
    top = [{"token": token, "logprob": math.log(p)} for token, p in alternatives.items()]
    content = [{"token": token, "top_logprobs": top if i == at else []} for i, token in enumerate(tokens)]
    return {"choices": [{"logprobs": {"content": content}}]}


def request(kind: CallKind, style: PromptStyle, question: str, direct: bool = False) -> Request:
    call = Call(kind, question, (Passage("t" + question, question),), answer=question, direct=direct)
    return Request(kind, render(call, style), call.sampling, 0, "", direct=direct)


@pytest.mark.parametrize(
    ("tokens", "at", "alternatives", "expected"),
    [
        (['{"', "Response", '": "', "True", '"}'], 3, {"True": 0.6, "False": 0.2, "Maybe": 0.2}, 0.75),
        (['{"Response":', '"F', "alse", '"}'], 1, {'"F': 0.3, '"T': 0.1, '"': 0.6}, 0.75),
        (['{"Response": "', "Par", "tial", '"}'], 1, {"Par": 0.5, "True": 0.25, "False": 0.25}, 0.5),
    ],
)
def test_a_direct_verdict_is_renormalised_over_the_verdicts(
    tokens: list[str], at: int, alternatives: dict[str, float], expected: float
) -> None:
    kind = CallKind.IS_SUP
    reply = with_probability(RawReply("".join(tokens), "stop"), kind, completion(tokens, alternatives, at))
    assert isinstance(reply, RawReply)
    assert reply.probability == pytest.approx(expected)


@pytest.mark.parametrize("logprobs", [None, {}, {"content": []}, {"content": [{"token": '{"Response": "True"}'}]}])
def test_a_server_without_logprobs_is_a_failure(logprobs: Any) -> None:
    answered = {"choices": [{"logprobs": logprobs}]}
    reply = with_probability(RawReply('{"Response": "True"}', "stop"), CallKind.IS_USE, answered)
    assert isinstance(reply, Failure)
    assert "logprobs" in reply.detail


def test_a_direct_request_asks_for_the_verdict_alone_with_at_most_20_logprobs() -> None:
    body = ChatFormat("m").body(request(CallKind.IS_USE, PromptStyle.STUDENT, "q", direct=True), None)
    assert list(body["response_format"]["json_schema"]["schema"]["properties"]) == ["Response"]
    assert body["logprobs"] is True
    assert body["top_logprobs"] == 20
    assert "logprobs" not in ChatFormat("m").body(request(CallKind.IS_USE, PromptStyle.STUDENT, "q"), None)


@pytest.mark.parametrize("style", list(PromptStyle))
@pytest.mark.parametrize("kind", [CallKind.IS_REL_TEXT, CallKind.ANSWER, CallKind.IS_USE, CallKind.IS_SUP])
def test_prompts_of_a_kind_share_their_static_prefix_byte_for_byte(kind: CallKind, style: PromptStyle) -> None:
    parts = [ChatFormat("m").body(request(kind, style, q), None)["messages"][0]["content"] for q in ("one", "other")]
    first, second = (json.dumps(part[0]).encode() for part in parts)
    assert first == second
    assert parts[0][-1] != parts[1][-1]
