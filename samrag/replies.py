"""Model text to typed reply, strictly. Pure.

The contract of SAM-RAG's calls is one JSON object: `Reasoning`, then `Response` (SAM-RAG, appendix B); captions have
`Response` alone. Only the model's own new text is ever read here, never its prompt. Text is taken as JSON and nothing
else: no evaluation, no guess from a stray "true", no default verdict. Interleaved answers have a contract of their own
and are read with more patience, because nothing is decided by them: see `samrag.interleaved.read_output`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from samrag.calls import (
    INTERLEAVED_KINDS,
    JUDGEMENTS,
    RATINGS,
    Answer,
    CallKind,
    Caption,
    Composition,
    Facet,
    Failure,
    FailureReason,
    Judgement,
    Rating,
    Reply,
)
from samrag.interleaved import CATEGORIES, read_output
from samrag.schema import Verdict

NOT_STATED = "not stated"
"""The response by which a model says that the content does not hold the answer."""
NOTHING = "none"
"""The response by which a model says that the evidence lacks nothing."""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


_STRING = {"type": "string"}
_JSON = json.JSONDecoder(parse_constant=_no_constant)


def reply_schema(kind: CallKind) -> dict[str, Any]:
    """JSON schema of a kind's reply, for servers that can enforce one."""
    if kind in INTERLEAVED_KINDS.values():
        return _object({"reason": _STRING, "category": _STRING | {"enum": list(CATEGORIES)}, "answer": _STRING})
    response: dict[str, Any] = dict(_STRING)
    if kind in JUDGEMENTS:
        response["enum"] = [str(verdict) for verdict in JUDGEMENTS[kind]]
    elif kind in RATINGS:
        score = {"type": "number", "minimum": 0, "maximum": 1}
        response = _object(dict.fromkeys(RATINGS[kind], score))
    elif kind is CallKind.ANSWER:
        response = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    properties = {"Reasoning": _STRING, "Response": response}
    if kind in (CallKind.CAPTION_RAW, CallKind.CAPTION_QUERY):
        del properties["Reasoning"]
    return _object(properties)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has these keys and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def extract_object(text: str) -> dict[str, Any] | None:
    """The first JSON object in a text, or None when it is broken. Braces inside strings are just text.

    Only text before the first `{"` is passed over: what stands inside a broken object is never read as the reply.
    """
    start = re.search(r'\{\s*"', text)
    if start is None:
        return None
    try:
        value, _ = _JSON.raw_decode(text, start.start())
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number of more than 4,300 digits
        return None
    return value if isinstance(value, dict) else None


def _string(value: Any) -> str | None:
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, (int, float)):
        return str(value) if math.isfinite(value) else None
    return value.strip() if isinstance(value, str) else None


def _verdict(kind: CallKind, value: Any) -> Verdict | None:
    text = _string(value)
    return next((v for v in JUDGEMENTS[kind] if text is not None and text.casefold() == v.casefold()), None)


def _answer(value: Any) -> tuple[str, ...] | None:
    """Distinct non-empty strings; () when the model says it is not stated; None when it is no answer at all."""
    items = [_string(item) for item in (value if isinstance(value, list) else [value])]
    if not items or any(not item for item in items):
        return None
    values = tuple(dict.fromkeys(item for item in items if item))
    return () if len(values) == 1 and values[0].casefold().rstrip(".") == NOT_STATED else values


def _scores(kind: CallKind, value: Any) -> tuple[float, ...] | None:
    """A number from 0 to 1 under each name of the kind; None when one is missing or is no such number."""
    if not isinstance(value, dict):
        return None
    given = [value.get(name) for name in RATINGS[kind]]
    numbers = [score for score in given if isinstance(score, (int, float)) and not isinstance(score, bool)]
    scores = [float(number) for number in numbers if 0 <= number <= 1]
    return tuple(scores) if len(scores) == len(given) else None


def _facet(value: Any) -> str | None:
    """The phrase; empty when nothing is missing, None when it is no phrase at all."""
    text = _string(value) if isinstance(value, str) else None
    return "" if text and text.casefold().rstrip(".") == NOTHING else text or None


def parse(kind: CallKind, text: str) -> Reply:
    """Read the reply of a call kind; whatever does not keep the contract is a `Failure`."""
    if kind in INTERLEAVED_KINDS.values():
        return _composition(text)
    found = extract_object(text)
    if found is None:
        return Failure(FailureReason.INVALID_REPLY, f"no JSON object in {text[:200]!r}")
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Failure(FailureReason.INVALID_REPLY, "a lone surrogate, which is no text")
    if "Response" not in found:
        return Failure(FailureReason.INVALID_REPLY, f'no "Response" among the keys {sorted(found)[:5]}')
    response, reasoning = found["Response"], found.get("Reasoning", "")
    if not isinstance(reasoning, str):
        return Failure(FailureReason.INVALID_REPLY, '"Reasoning" is not a string')
    if kind in JUDGEMENTS:
        verdict = _verdict(kind, response)
        if verdict is None:
            return Failure(FailureReason.INVALID_REPLY, f"{response!r} is no verdict of {kind}"[:200])
        return Judgement(verdict, reasoning)
    if kind in RATINGS:
        scores = _scores(kind, response)
        if scores is None:
            wanted = ", ".join(RATINGS[kind])
            return Failure(FailureReason.INVALID_REPLY, f"{response!r} has not {wanted}, each from 0 to 1"[:200])
        return Rating(scores, reasoning)
    if kind is CallKind.FACET:
        facet = _facet(response)
        if facet is None:
            return Failure(FailureReason.INVALID_REPLY, f"{response!r} is no facet"[:200])
        return Facet(facet, reasoning)
    if kind is CallKind.ANSWER:
        values = _answer(response)
        if values is None:
            return Failure(FailureReason.INVALID_REPLY, f"{response!r} is no answer"[:200])
        return Answer(values, reasoning)
    caption = _string(response)
    return Caption(caption) if caption else Failure(FailureReason.INVALID_REPLY, "empty caption")


def _composition(text: str) -> Composition | Failure:
    """An interleaved answer out of whatever a model wrote; only one without any text is a failure."""
    output = read_output(text)
    if not output.markdown:
        return Failure(FailureReason.INVALID_REPLY, f"no answer in {text[:200]!r}")
    stated = output.markdown.casefold().rstrip(".") != NOT_STATED
    return Composition(output.markdown if stated else "", output.reason, output.category)


def write(reasoning: str, response: str | list[str] | Mapping[str, float]) -> str:
    """The contract's JSON text; without reasoning, `Response` alone."""
    body = {"Reasoning": reasoning, "Response": response} if reasoning else {"Response": response}
    return json.dumps(body, ensure_ascii=False)


def write_reply(reply: Judgement | Answer | Caption) -> str:
    """A reply as a student is to write it: the contract's JSON, chain of thought first."""
    if isinstance(reply, Judgement):
        return write(reply.reasoning, reply.verdict)
    if isinstance(reply, Caption):
        return write("", reply.text)
    values = list(reply.values) or [NOT_STATED]
    return write(reply.reasoning, values[0] if len(values) == 1 else values)


def write_composition(reason: str, category: str, answer: str) -> str:
    """The interleaved contract's JSON text (RAG-IGBench)."""
    return json.dumps({"reason": reason, "category": category, "answer": answer}, ensure_ascii=False)
