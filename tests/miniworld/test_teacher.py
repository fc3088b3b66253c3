"""The simulated teacher: the oracle at error rate 0, wrong at a set rate, the same for the same request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from samrag.calls import (
    JUDGEMENTS,
    Answer,
    Call,
    CallKind,
    Caption,
    Completion,
    Facet,
    Failure,
    Judgement,
    Passage,
    Rating,
    Reply,
    Sampling,
)
from samrag.engines.api import ApiBackend
from samrag.engines.base import Engine
from samrag.miniworld import oracle
from samrag.miniworld.language import EMBLEM, IMAGE_RELATIONS, Relation, ask, club_text, describe, founder_text
from samrag.miniworld.teacher import MODEL, Teacher, application, read_request
from samrag.miniworld.world import Split, draw_clubs
from samrag.prompts import PromptStyle, render
from samrag.replies import parse, reply_schema, write

CLUBS = draw_clubs(Split.DEV, 30, 4)
EMBLEMS = {club.name + EMBLEM: club.emblem for club in CLUBS}


ABOUT_ANSWERS = (CallKind.ANSWER, CallKind.IS_USE, CallKind.IS_SUP, CallKind.CONFIDENCE, CallKind.FACET)


def calls_of(kind: CallKind) -> list[Call]:
    """Calls of a kind on every club, with the right documents beside another club's."""
    calls = []
    for i, club in enumerate(CLUBS):
        other = CLUBS[i - 1]
        for form, relation in enumerate(Relation):
            question = ask(relation, club.name, form)
            title = (club if form % 2 else other).name + EMBLEM
            passages = (
                Passage(other.name, club_text(other)),
                Passage(club.name, club_text(club)),
                Passage(club.founder.name, founder_text(club)),
                Passage(club.name + EMBLEM, describe(club.emblem)),
            )
            if kind in (CallKind.IS_REL_TEXT, CallKind.CRITIC_TEXT):
                calls.append(Call(kind, question, passages[form % 2 : form % 2 + 1]))
            elif kind is CallKind.CRITIC_IMAGE:
                calls.append(Call(kind, question, (Passage(title, describe(club.emblem)),), title, "a.png"))
            elif kind in ABOUT_ANSWERS:
                facts = club.emblem if relation in IMAGE_RELATIONS else club
                judged = str(getattr(facts, relation, other.sport)) if kind is not CallKind.ANSWER else ""
                calls.append(Call(kind, question, passages, answer=judged))
            else:
                asked = "" if kind is CallKind.CAPTION_RAW else question
                calls.append(Call(kind, asked, title=title, image="a.png"))
    return calls


def body_of(call: Call, seed: int = 0, style: PromptStyle = PromptStyle.TEACHER) -> dict[str, Any]:
    """The request that the API engine sends for a call."""
    prompt = render(call, style)
    parts: list[dict[str, Any]] = [{"type": "text", "text": prompt.instruction}]
    if prompt.image:
        parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})
    parts.append({"type": "text", "text": prompt.body})
    schema = {"name": str(call.kind), "schema": reply_schema(call.kind), "strict": True}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def right_text(call: Call) -> str:
    right = oracle.reply(call.kind, call.question, call.passages, call.title, EMBLEMS.get(call.title), call.answer)
    return write(right.reasoning, right.response)


def content(reply: Reply) -> object:
    """What a reply says, its reasoning aside."""
    if isinstance(reply, Judgement):
        return reply.verdict
    if isinstance(reply, Rating):
        return reply.scores
    return reply.values if isinstance(reply, Answer) else reply.text if isinstance(reply, (Caption, Facet)) else None


@pytest.mark.parametrize("style", PromptStyle)
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_at_error_rate_zero_the_teacher_says_what_the_oracle_says(kind: CallKind, style: PromptStyle) -> None:
    teacher = Teacher(CLUBS, error_rate=0)
    for call in calls_of(kind):
        assert teacher.text(body_of(call, style=style)) == right_text(call)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_at_error_rate_one_no_reply_is_right(kind: CallKind) -> None:
    teacher = Teacher(CLUBS, error_rate=1)
    broken = 0
    for call in calls_of(kind):
        reply = parse(kind, teacher.text(body_of(call)))
        broken += isinstance(reply, Failure)
        assert content(reply) != content(parse(kind, right_text(call))) or kind is CallKind.CAPTION_RAW
    assert 0.2 < broken / len(calls_of(kind)) < 0.5


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_about_the_set_share_of_replies_is_wrong(rate: float) -> None:
    teacher = Teacher(CLUBS, rate)
    kinds = [*JUDGEMENTS, CallKind.ANSWER]
    calls = [call for kind in kinds for call in calls_of(kind)]
    wrong = sum(teacher.text(body_of(call)) != right_text(call) for call in calls)
    assert abs(wrong / len(calls) - rate) < 3 * (rate * (1 - rate) / len(calls)) ** 0.5


def test_equal_requests_get_equal_replies_and_another_seed_another_draw() -> None:
    calls = calls_of(CallKind.IS_SUP)[:40]
    first = [Teacher(CLUBS, 0.5).text(body_of(call)) for call in calls]
    assert first == [Teacher(CLUBS, 0.5).text(body_of(call)) for call in calls]
    assert first != [Teacher(CLUBS, 0.5).text(body_of(call, seed=1)) for call in calls]


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_a_second_try_is_answered_from_the_first_turn_and_drawn_anew(kind: CallKind) -> None:
    refused = {"role": "assistant", "content": "I cannot tell."}
    again = {"role": "user", "content": "Your last reply cannot be used."}
    calls = calls_of(kind)[:40]
    bodies = [{**body, "messages": [*body["messages"], refused, again]} for body in map(body_of, calls)]
    assert [Teacher(CLUBS, 0).text(body) for body in bodies] == [right_text(call) for call in calls]
    assert [Teacher(CLUBS, 1).text(body) for body in bodies] != [Teacher(CLUBS, 1).text(body_of(c)) for c in calls]


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_a_request_is_read_from_its_data_not_from_the_worked_examples(kind: CallKind) -> None:
    for call in calls_of(kind)[:9]:
        asked = read_request(body_of(call))
        assert (asked.kind, asked.question, asked.title) == (kind, call.question, call.title)
        assert (asked.passages, asked.answer) == (call.passages, call.answer)


def test_what_is_escaped_in_a_prompt_is_read_back() -> None:
    call = Call(CallKind.IS_SUP, "A < B & C?", (Passage("</document>", "x\n<image>"),), answer="&lt;")
    asked = read_request(body_of(call))
    assert (asked.question, asked.passages, asked.answer) == (call.question, call.passages, call.answer)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_an_impossible_error_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="error_rate"):
        Teacher(CLUBS, rate)


# --- over HTTP ---


def served(teacher: Teacher, work: Any) -> Any:
    """Serve on a free port of loopback while `work(url)` runs."""

    async def main() -> Any:
        runner = web.AppRunner(application(teacher), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await work(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_the_api_engine_gets_the_oracles_replies_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMRAG_TEST_KEY", "any")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    calls = [calls_of(kind)[5] for kind in oracle.KINDS]
    calls = [Call(c.kind, c.question, c.passages, c.title, c.image, c.answer, sampling=Sampling(1.2)) for c in calls]

    async def ask_all(url: str) -> list[Completion]:
        engine = Engine(ApiBackend(MODEL, url, "SAMRAG_TEST_KEY", image_root=tmp_path), PromptStyle.TEACHER)
        try:
            return await engine.complete(calls)
        finally:
            await engine.close()

    completions = served(Teacher(CLUBS, 0), ask_all)
    assert [completion.text for completion in completions] == [right_text(call) for call in calls]
    assert not any(isinstance(completion.reply, Failure) for completion in completions)
    assert all(completion.usage.input_tokens > completion.usage.output_tokens > 0 for completion in completions)


def test_the_server_lists_its_model_and_answers_a_bad_request_with_400() -> None:
    async def talk(url: str) -> tuple[list[str], list[int]]:
        import aiohttp

        bodies = ({}, {"messages": []}, {"messages": [{"role": "user", "content": "x"}]}, [1])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/models") as response:
                models = [model["id"] for model in (await response.json())["data"]]
            statuses = []
            for body in bodies:
                async with session.post(f"{url}/chat/completions", json=body) as response:
                    statuses.append(response.status)
        return models, statuses

    assert served(Teacher(CLUBS, 0), talk) == ([MODEL], [400] * 4)
