"""The simulated teacher: an OpenAI-compatible server on loopback that knows the mini world, and errs at a set rate.

It stands in for GPT where there is no network: it reads the prompt it is sent as a server would (fenced sections of the
user turn, the kind from the schema's name), asks the oracle, and spoils a share of the replies: wrong verdicts, wrong
answers, wrong numbers, invalid JSON. Everything it says is simulated, and nothing it says is a measurement of a real
model.
"""

from __future__ import annotations

import hashlib
import html
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from samrag.calls import JUDGEMENTS, CallKind, Passage
from samrag.miniworld import oracle
from samrag.miniworld.language import EMBLEM, VALUES, Relation, understand
from samrag.miniworld.world import COLOURS, SHAPES, Club, Emblem
from samrag.replies import NOT_STATED, NOTHING, write

MODEL = "simulated-teacher"
_SECTION = r"<{0}>\n(.*?)\n</{0}>"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a prompt asks, read back from its text."""

    kind: CallKind
    question: str
    passages: tuple[Passage, ...]
    title: str
    answer: str


def _sections(tag: str, text: str) -> list[str]:
    return [html.unescape(found) for found in re.findall(_SECTION.format(tag), text, re.DOTALL)]


def read_request(body: Mapping[str, Any]) -> Asked:
    """Read a chat-completion request.

    Raises:
        ValueError: it has no text or no kind that is known.
    """
    content = body["messages"][0]["content"]  # a second try adds the refused reply and what was wrong with it
    parts = [content] if isinstance(content, str) else [p["text"] for p in content if p.get("type") == "text"]
    text = parts[-1]  # the instruction, with its worked examples, comes first; the data come last
    kind = CallKind(body["response_format"]["json_schema"]["name"])
    documents = [found.split("\n", 1) for found in _sections("document", text)]
    last = {tag: (_sections(tag, text) or [""])[-1] for tag in ("question", "title", "answer")}
    passages = tuple(Passage(found[0], found[1] if len(found) > 1 else "") for found in documents)
    return Asked(kind, last["question"], passages, last["title"], last["answer"])


class Teacher:
    """Replies to requests; `error_rate` is the share of replies that are spoilt."""

    def __init__(self, clubs: Sequence[Club], error_rate: float = 0.15) -> None:
        if not 0 <= error_rate <= 1:
            raise ValueError(f"error_rate is {error_rate}; it must lie between 0 and 1")
        self.emblems = {club.name + EMBLEM: club.emblem for club in clubs}
        self.error_rate = error_rate

    def text(self, body: Mapping[str, Any]) -> str:
        """The reply's text; equal requests, seed included, get equal replies."""
        asked = read_request(body)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        rng = random.Random(digest)
        spoilt = rng.random() < self.error_rate
        if spoilt and rng.random() < 0.34:
            return rng.choice(
                ('{"Reasoning": "I think that', "I cannot tell.", '{"Response": ', '{"Verdict": "maybe"}')
            )
        emblem = self.emblems.get(asked.title)
        if spoilt and emblem and asked.kind in (CallKind.CAPTION_RAW, CallKind.CAPTION_QUERY):
            emblem = _repainted(emblem, rng)
        right = oracle.reply(asked.kind, asked.question, asked.passages, asked.title, emblem, asked.answer)
        return _spoil(asked, right, rng) if spoilt else write(right.reasoning, right.response)


def _repainted(emblem: Emblem, rng: random.Random) -> Emblem:
    """Another emblem, as a teacher that did not look closely would see it."""
    background, colour = rng.sample([c for c in COLOURS if c not in (emblem.background, emblem.colour)], 2)
    shape = rng.choice([s for s in SHAPES if s != emblem.shape])
    return Emblem(background, colour, shape, emblem.count, emblem.cells)


def _spoil(asked: Asked, right: oracle.OracleReply, rng: random.Random) -> str:
    """A well-formed but wrong reply."""
    if asked.kind in JUDGEMENTS:
        wrong = rng.choice([v for v in JUDGEMENTS[asked.kind] if v != right.response])
        turned = {": yes": ": no", ": no": ": yes"}
        reasoning = re.sub(r": (?:yes|no)\b", lambda m: turned[m[0]], right.reasoning)
        return write(reasoning, wrong)
    if isinstance(right.response, Mapping):
        return write(right.reasoning, {name: _other_score(score, rng) for name, score in right.response.items()})
    understood = understand(asked.question)
    if asked.kind is CallKind.FACET and understood is not None:
        others = [NOTHING, *(f"{relation} of the {understood[1]}" for relation in VALUES)]
        return write(right.reasoning, rng.choice([facet for facet in others if facet != right.response]))
    if asked.kind is not CallKind.ANSWER or understood is None:
        return write(right.reasoning, right.response)
    relation: Relation = understood[0]
    wrong_value = rng.choice([v for v in VALUES[relation] if v != right.response])
    reasoning = right.reasoning.replace(f" is {right.response}.", f" is {wrong_value}.")
    return write(reasoning, wrong_value if right.response != NOT_STATED or rng.random() < 0.5 else "unknown")


def _other_score(score: float, rng: random.Random) -> float:
    """A number on the other side of the middle, as a careless rater would give it."""
    return round(rng.uniform(0, 0.4) if score > 0.5 else rng.uniform(0.6, 1), 2)


def application(teacher: Teacher) -> web.Application:
    """The HTTP application: `/v1/chat/completions` and `/v1/models`."""

    async def completions(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            text = teacher.text(body)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            return web.json_response(
                {"error": {"message": f"bad request: {error}", "type": "invalid_request"}}, status=400
            )
        prompt_words = len(re.findall(r"\w+|[^\w\s]", json.dumps([_texts(m) for m in body["messages"]])))
        reply_words = len(re.findall(r"\w+|[^\w\s]", text))
        return web.json_response(
            {
                "id": "chatcmpl-simulated",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL,
                "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
                "usage": {
                    "prompt_tokens": prompt_words,
                    "completion_tokens": reply_words,
                    "total_tokens": prompt_words + reply_words,
                },
            }
        )

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "samrag"}]})

    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes([web.post("/v1/chat/completions", completions), web.get("/v1/models", list_models)])
    return app


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [p["text"] for p in content if p.get("type") == "text"]
