"""Reading replies: strict JSON, no guessed verdict, and nothing that can make it raise."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samrag.calls import (
    INTERLEAVED_KINDS,
    JUDGEMENTS,
    RATINGS,
    SAM_RAG_KINDS,
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
from samrag.interleaved import CATEGORIES
from samrag.replies import NOT_STATED, NOTHING, extract_object, parse, reply_schema, write, write_composition
from samrag.schema import Verdict

SUP, REL, ANSWER, CAPTION = CallKind.IS_SUP, CallKind.IS_REL_TEXT, CallKind.ANSWER, CallKind.CAPTION_RAW


def failed(reply: Reply) -> bool:
    return isinstance(reply, Failure) and reply.reason is FailureReason.INVALID_REPLY


# --- finding the object ---


def test_braces_in_the_reasoning_are_text() -> None:
    reasoning = 'a set {1, 2}, a "quote", {"Response": "False"}, a } and a {'
    assert parse(SUP, write(reasoning, "Partial")) == Judgement(Verdict.PARTIAL, reasoning)


@pytest.mark.parametrize("before", ["", "Sure! ", "```json\n", "Thinking {hard}...\n", "{ {"])
@pytest.mark.parametrize("after", ["", "\n```", " Hope it helps {}.", '{"Response": "False"}'])
def test_text_around_the_object_is_ignored_and_the_first_object_counts(before: str, after: str) -> None:
    assert parse(REL, before + write("r", "True") + after) == Judgement(Verdict.TRUE, "r")


@pytest.mark.parametrize("cut", range(1, 34))
def test_a_cut_object_is_a_failure(cut: int) -> None:
    text = '{"Reasoning": "r", "Response": "True"}'
    assert failed(parse(REL, text[:-cut]))


def test_the_first_object_must_keep_the_contract() -> None:
    assert failed(parse(REL, '{"Verdict": "True"}'))
    assert failed(parse(REL, '[{"a": 1}]'))
    assert failed(parse(REL, '{"response": "True"}'))
    assert failed(parse(REL, '{"Reasoning": ["r"], "Response": "True"}'))
    assert failed(parse(REL, '{"Reasoning": null, "Response": "True"}'))


@pytest.mark.parametrize(
    "text",
    [
        '{"Reasoning": "One may say {"Response": "True"}, but no.", "Response": "False"}',
        '{"Reasoning": "One may say {"Response": "True"}, but',
    ],
)
def test_no_verdict_is_read_from_inside_a_broken_object(text: str) -> None:
    assert failed(parse(REL, text))


# --- verdicts ---


@pytest.mark.parametrize("kind", JUDGEMENTS)
@pytest.mark.parametrize("verdict", Verdict)
def test_each_judge_has_its_own_verdicts(kind: CallKind, verdict: Verdict) -> None:
    reply = parse(kind, write("r", verdict))
    assert reply == Judgement(verdict, "r") if verdict in JUDGEMENTS[kind] else failed(reply)


def test_partial_is_no_verdict_of_relevance() -> None:
    assert failed(parse(CallKind.IS_REL_TEXT, write("r", "Partial")))
    assert failed(parse(CallKind.IS_REL_IMAGE, write("r", "partial")))
    assert failed(parse(CallKind.IS_USE, write("r", "Partial")))


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"Response": true}', Verdict.TRUE),
        ('{"Response": false}', Verdict.FALSE),
        ('{"Response": "partial"}', Verdict.PARTIAL),
        ('{"Response": " TRUE\\n"}', Verdict.TRUE),
    ],
)
def test_booleans_and_other_cases_are_verdicts(text: str, verdict: Verdict) -> None:
    assert parse(SUP, text) == Judgement(verdict, "")


@pytest.mark.parametrize(
    "text",
    [
        "True",
        "The verdict is True.",
        "Response: True",
        '"Response": "True"',
        '{"Reasoning": "It is True."}',
        '{"Response": "True, mostly"}',
        '{"Response": "not False"}',
        '{"Response": ""}',
        '{"Response": null}',
        '{"Response": 1}',
        '{"Response": ["True"]}',
        '{"Response": {"verdict": "True"}}',
        "",
    ],
)
@pytest.mark.parametrize("kind", JUDGEMENTS)
def test_no_verdict_is_guessed(kind: CallKind, text: str) -> None:
    assert failed(parse(kind, text))


# --- answers and captions ---


@pytest.mark.parametrize(
    ("response", "values"),
    [
        ('"1871"', ("1871",)),
        ("1871", ("1871",)),
        ("2.5", ("2.5",)),
        ("true", ("True",)),
        ('" Ebble "', ("Ebble",)),
        ('["Ebble", "Tarr"]', ("Ebble", "Tarr")),
        ('["Ebble", "Ebble", 3]', ("Ebble", "3")),
        ('"True story"', ("True story",)),
        ('"true"', ("true",)),
        ('"Not stated."', ()),
        ('["not stated"]', ()),
        ('"NOT STATED"', ()),
    ],
)
def test_answers_are_distinct_texts_as_they_were_written(response: str, values: tuple[str, ...]) -> None:
    assert parse(ANSWER, f'{{"Reasoning": "r", "Response": {response}}}') == Answer(values, "r")


@pytest.mark.parametrize("response", ['""', '" "', "[]", '["a", ""]', "null", '[["a"]]', '{"a": 1}', "[null]"])
def test_what_is_no_answer_is_a_failure_not_an_abstention(response: str) -> None:
    assert failed(parse(ANSWER, f'{{"Response": {response}}}'))


def test_captions() -> None:
    assert parse(CAPTION, write("", "A bear.")) == Caption("A bear.")
    assert parse(CallKind.CAPTION_QUERY, '{"Response": " A bear. "}') == Caption("A bear.")
    assert failed(parse(CAPTION, '{"Response": ""}'))
    assert failed(parse(CAPTION, '{"Response": ["A bear."]}'))


# --- ratings and facets ---


@pytest.mark.parametrize("kind", RATINGS)
@pytest.mark.parametrize(("score", "read"), [(0, 0.0), (1, 1.0), (0.35, 0.35)])
def test_a_rating_has_a_number_under_each_name_of_its_kind(kind: CallKind, score: float, read: float) -> None:
    text = write("r", dict.fromkeys(reversed(RATINGS[kind]), score))
    assert parse(kind, text) == Rating((read,) * len(RATINGS[kind]), "r")


@pytest.mark.parametrize("score", [-0.01, 1.01, 10, "0.5", "high", True, None, [0.5], {"a": 1}])
@pytest.mark.parametrize("kind", RATINGS)
def test_no_number_is_guessed(kind: CallKind, score: object) -> None:
    first, *others = RATINGS[kind]
    response = {**dict.fromkeys(others, 0.5), first: score}
    assert failed(parse(kind, json.dumps({"Reasoning": "r", "Response": response})))
    del response[first]
    assert failed(parse(kind, json.dumps({"Reasoning": "r", "Response": response})))
    assert failed(parse(kind, json.dumps({"Reasoning": "r", "Response": score})))


@pytest.mark.parametrize(
    ("response", "facet"), [("birthplace of A", "birthplace of A"), (" x ", "x"), (NOTHING, ""), ("None.", "")]
)
def test_facets(response: str, facet: str) -> None:
    assert parse(CallKind.FACET, write("r", response)) == Facet(facet, "r")


@pytest.mark.parametrize("response", ['""', '" "', "1", "null", "true", '["x"]', "{}"])
def test_what_is_no_phrase_is_a_failure_not_a_complete_evidence(response: str) -> None:
    assert failed(parse(CallKind.FACET, f'{{"Response": {response}}}'))


# --- any text ---

VALUES = st.text(min_size=1).filter(lambda s: s == s.strip() and s.casefold().rstrip(".") != NOT_STATED)


@given(
    st.text(), st.sampled_from([(kind, v) for kind, verdicts in JUDGEMENTS.items() for v in verdicts]), st.text("x{ ")
)
def test_a_written_judgement_reads_back(reasoning: str, judged: tuple[CallKind, Verdict], noise: str) -> None:
    kind, verdict = judged
    assert parse(kind, noise + write(reasoning, verdict) + noise) == Judgement(verdict, reasoning)


@given(st.text(), st.lists(VALUES, min_size=1, max_size=4, unique=True))
def test_a_written_answer_reads_back(reasoning: str, values: list[str]) -> None:
    response = values[0] if len(values) == 1 else values
    assert parse(ANSWER, write(reasoning, response)) == Answer(tuple(values), reasoning)
    assert parse(ANSWER, write(reasoning, NOT_STATED)) == Answer((), reasoning)


@given(st.sampled_from(CallKind), st.text() | st.text('{}[]":,\\ \ntruefalsReponsing01'))
def test_no_text_makes_reading_raise(kind: CallKind, text: str) -> None:
    assert not isinstance(parse(kind, text), str)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(CallKind), JSON, JSON)
def test_no_json_value_makes_reading_raise(kind: CallKind, reasoning: object, response: object) -> None:
    reply = parse(kind, json.dumps({"Reasoning": reasoning, "Response": response}))
    if kind in JUDGEMENTS and not isinstance(response, (str, bool)):
        assert failed(reply)


@pytest.mark.parametrize("text", ['{"Response": ' + "1" * 5000 + "}", '{"Response": ' + "[" * 100_000, "{" * 1000])
@pytest.mark.parametrize("kind", [REL, ANSWER, CAPTION])
def test_runaway_replies_are_failures(kind: CallKind, text: str) -> None:
    assert failed(parse(kind, text))


def test_an_answer_can_be_encoded() -> None:
    reply = parse(ANSWER, '{"Response": "\\ud800"}')
    assert isinstance(reply, Failure) or "".join(getattr(reply, "values", ())).encode()


# --- interleaved answers ---


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS.values())
def test_an_interleaved_answer_is_read_with_patience_and_an_empty_one_is_a_failure(kind: CallKind) -> None:
    assert parse(kind, 'plain ![x](IMG#1) "text"') == Composition('plain ![x](IMG#1) "text"', "")
    assert parse(kind, '{"reason": "r", "answer": "cut') == Composition("cut", "r")
    assert parse(kind, write_composition("r", "what-is", "Not stated.")) == Composition("", "r", "what-is")
    assert failed(parse(kind, write_composition("r", "what-is", " ")))
    assert failed(parse(kind, ""))


# --- schema ---


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS.values())
def test_the_schema_of_interleaved_answers_is_their_contract(kind: CallKind) -> None:
    schema = reply_schema(kind)
    assert schema["required"] == list(schema["properties"]) == ["reason", "category", "answer"]
    assert schema["properties"]["category"]["enum"] == list(CATEGORIES)
    assert not schema["additionalProperties"]
    assert parse(kind, write_composition("r", "how-to", "a")) == Composition("a", "r", "how-to")


@pytest.mark.parametrize("kind", SAM_RAG_KINDS)
def test_the_schema_a_server_enforces_is_the_contract_that_is_read(kind: CallKind) -> None:
    schema = reply_schema(kind)
    assert schema["required"] == list(schema["properties"])
    assert not schema["additionalProperties"]
    for verdict in schema["properties"]["Response"].get("enum", []):
        assert parse(kind, write("r", verdict)) == Judgement(Verdict(verdict), "r")
    assert ("enum" in schema["properties"]["Response"]) == (kind in JUDGEMENTS)


def test_extract_object() -> None:
    assert extract_object("none") is None
    assert extract_object('x {"a": {"b": 1}} {"c": 2}') == {"a": {"b": 1}}
