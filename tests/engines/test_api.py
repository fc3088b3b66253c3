"""The API engine against a real server on loopback: what is sent, what is retried, what stops the run."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from samrag.calls import CallKind, Failure, FailureReason, Sampling
from samrag.engines.api import ApiBackend
from samrag.engines.base import RawReply, Request
from samrag.engines.chat import data_uri
from samrag.errors import UserError
from samrag.prompts import Prompt

KEY = "sk-test-secret-4711"
Handler = Callable[[dict[str, Any], int], Awaitable[web.Response] | web.Response]


def completion(content: str | None, finish_reason: str = "stop", **message: object) -> web.Response:
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    return web.json_response(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    )


def problem(status: int, message: str = "no", code: str | None = None, **headers: str) -> web.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": {"message": message, "code": code}}, status=status, headers=headers)


def request(body: str = "body", image: str | None = None, kind: CallKind = CallKind.IS_SUP, **sampling: Any) -> Request:
    return Request(kind, Prompt("instruction", image, body), Sampling(**sampling), 2, "t")


def ask(
    handler: Handler, *requests: Request, image_root: Path = Path(), key: str = KEY, **options: Any
) -> tuple[list[RawReply | Failure], list[dict[str, Any]]]:
    """Start a server, ask, stop; returns the replies and the bodies the server saw."""
    seen: list[dict[str, Any]] = []

    async def respond(http_request: web.Request) -> web.Response:
        assert http_request.headers["Authorization"] == f"Bearer {key}"
        seen.append(await http_request.json())
        response = handler(seen[-1], len(seen) - 1)
        return response if isinstance(response, web.Response) else await response

    async def work() -> list[RawReply | Failure]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        backend = ApiBackend("m", f"http://127.0.0.1:{port}/v1", image_root=image_root, **options)
        try:
            return await backend.generate(requests)
        finally:
            await backend.close()
            await runner.cleanup()

    return asyncio.run(work()), seen


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samrag.engines.api._FIRST_DELAY_S", 0.01)


def test_one_user_turn_of_text_image_text_with_schema_and_seed(tmp_path: Path) -> None:
    Image.new("RGB", (64, 32), "red").save(tmp_path / "a.png")
    sent = request("body", "a.png", temperature=1.2, max_tokens=77, seed=40)
    [reply], [body] = ask(lambda *_: completion('{"a": 1}'), sent, image_root=tmp_path, max_image_px=16)
    assert reply == RawReply('{"a": 1}', "stop", 11, 5)
    [message] = body["messages"]
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["text", "image_url", "text"]
    assert (message["content"][0]["text"], message["content"][2]["text"]) == ("instruction", "body")
    head, data = message["content"][1]["image_url"]["url"].split(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (16, 8)
    assert (body["temperature"], body["max_tokens"], body["seed"], body["model"]) == (1.2, 77, 42, "m")
    schema = body["response_format"]["json_schema"]
    assert schema["name"] == "is_sup"
    assert schema["schema"]["properties"]["Response"]["enum"] == ["True", "Partial", "False"]


def test_a_direct_verdict_comes_with_its_probability() -> None:
    """The server's JSON goes through the client's own types, with the probabilities of one token."""

    def direct(*_: object) -> web.Response:
        top = [{"token": token, "logprob": math.log(p)} for token, p in (("True", 0.6), ("False", 0.2), ("Maybe", 0.2))]
        tokens = ['{"Response": "', "True", '"}']
        content = [{"token": t, "logprob": -0.1, "top_logprobs": top if t == "True" else []} for t in tokens]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "".join(tokens)},
            "logprobs": {"content": content},
        }
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    sent = Request(CallKind.IS_USE, Prompt("instruction", None, "body"), Sampling(), 0, "t", direct=True)
    [reply], [body] = ask(direct, sent)
    assert isinstance(reply, RawReply)
    assert reply.probability == pytest.approx(0.75)
    assert body["top_logprobs"] == 20


def test_structured_output_and_the_length_limits_name_are_options() -> None:
    _, [body] = ask(
        lambda *_: completion("x"), request(), structured_output="none", max_tokens_name="max_completion_tokens"
    )
    assert "response_format" not in body
    assert "max_tokens" not in body
    assert body["max_completion_tokens"] == 512


def test_images_keep_their_true_media_type_and_transparency_becomes_white(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8)).save(tmp_path / "wrong_name.png", "JPEG")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "b.gif.png", "PNG")
    Image.new("P", (8, 8)).save(tmp_path / "c.gif")
    assert data_uri(tmp_path / "wrong_name.png", 100).startswith("data:image/jpeg;")
    assert data_uri(tmp_path / "c.gif", 100).startswith("data:image/png;")
    data = base64.b64decode(data_uri(tmp_path / "b.gif.png", 100).split(",")[1])
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("header", [{"Retry_After": "0.3"}, {"retry_after_ms": "300"}])
def test_a_429_waits_as_long_as_the_server_says(header: dict[str, str]) -> None:
    start = time.monotonic()
    replies, seen = ask(lambda _, i: problem(429, **header) if i == 0 else completion("ok"), request())
    assert time.monotonic() - start >= 0.3
    assert [r.text for r in replies if isinstance(r, RawReply)] == ["ok"]
    assert len(seen) == 2


@pytest.mark.parametrize("status", [408, 409, 500, 503])
def test_a_passing_server_error_is_tried_again(status: int) -> None:
    [reply], seen = ask(lambda _, i: problem(status) if i < 2 else completion("ok"), request())
    assert reply == RawReply("ok", "stop", 11, 5)
    assert len(seen) == 3


def test_attempts_are_bounded_and_then_the_request_fails() -> None:
    [reply], seen = ask(lambda *_: problem(500, "down"), request(), max_attempts=3)
    assert isinstance(reply, Failure)
    assert reply.reason is FailureReason.SERVER
    assert "down" in reply.detail
    assert len(seen) == 3


def test_a_timeout_is_tried_again() -> None:
    async def slow() -> web.Response:
        await asyncio.sleep(0.5)
        return completion("late")

    [reply], seen = ask(lambda _, i: slow() if i == 0 else completion("ok"), request(), timeout_s=0.15)
    assert reply == RawReply("ok", "stop", 11, 5)
    assert len(seen) == 2


def test_a_reply_that_is_no_completion_is_tried_again_and_then_fails() -> None:
    bad = [web.Response(text="<html>"), web.json_response({"choices": []}), web.json_response({"choices": None})]
    [reply], seen = ask(lambda _, i: bad[i], request(), max_attempts=3)
    assert isinstance(reply, Failure)
    assert reply.reason is FailureReason.SERVER
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("response", "advice"),
    [
        (lambda: problem(401, f"wrong key {KEY}"), "set OPENAI_API_KEY"),
        (lambda: problem(403, f"not {KEY}"), "may not use 'm'"),
        (lambda: problem(404), "check teacher_model and teacher_url"),
        (lambda: problem(429, code="insufficient_quota"), "no credit"),
    ],
)
def test_what_would_spoil_every_request_stops_the_run(response: Callable[[], web.Response], advice: str) -> None:
    with pytest.raises(UserError, match=advice) as caught:
        ask(lambda *_: response(), *[request()] * 3)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (lambda: problem(400, "bad"), FailureReason.BAD_REQUEST),
        (lambda: problem(422, "bad"), FailureReason.BAD_REQUEST),
        (lambda: problem(400, code="context_length_exceeded"), FailureReason.TOO_LONG),
        (lambda: problem(400, code="content_filter"), FailureReason.CONTENT_FILTER),
        (lambda: completion(""), FailureReason.INVALID_REPLY),
        (lambda: completion(None), FailureReason.INVALID_REPLY),
    ],
)
def test_a_request_that_cannot_succeed_fails_alone(response: Callable[[], web.Response], reason: FailureReason) -> None:
    def handler(body: dict[str, Any], _: int) -> web.Response:
        return response() if body["messages"][0]["content"][1]["text"] == "bad" else completion("ok")

    (bad, good), seen = ask(handler, request("bad"), request("good"))
    assert isinstance(bad, Failure)
    assert bad.reason is reason
    assert good == RawReply("ok", "stop", 11, 5)
    assert len(seen) == 2


def test_a_run_in_which_every_request_is_refused_stops() -> None:
    with pytest.raises(UserError, match=r"refused the first 20 requests.*seed"):
        ask(lambda *_: problem(400, "unknown parameter seed"), *[request()] * 25)


def test_refusal_filter_and_length_are_finish_reasons() -> None:
    answers = [completion(None, refusal="I will not"), completion("x", "content_filter"), completion("{", "length")]
    replies, _ = ask(lambda _, i: answers[i], *[request()] * 3, concurrency=1)
    assert [r.finish_reason for r in replies if isinstance(r, RawReply)] == ["content_filter"] * 2 + ["length"]


def test_a_bad_image_fails_alone_and_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    replies, seen = ask(
        lambda *_: completion("ok"), request(image="a.png"), request(image="b.png"), request(), image_root=tmp_path
    )
    reasons = [r.reason if isinstance(r, Failure) else None for r in replies]
    assert reasons == [FailureReason.BAD_IMAGE, FailureReason.BAD_IMAGE, None]
    assert len(seen) == 1


def test_concurrency_is_bounded_and_order_is_kept() -> None:
    active = most = 0

    async def busy(text: str) -> web.Response:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.02 if text == "0" else 0.005)
        active -= 1
        return completion(text)

    replies, _ = ask(
        lambda body, _: busy(body["messages"][0]["content"][1]["text"]),
        *[request(str(i)) for i in range(12)],
        concurrency=3,
    )
    assert [r.text for r in replies if isinstance(r, RawReply)] == [str(i) for i in range(12)]
    assert most == 3


def test_the_key_is_in_no_log_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        [reply], _ = ask(lambda *_: problem(500, f"echo {KEY}"), request(), max_attempts=1)
    assert KEY not in caplog.text
    assert KEY not in repr(reply)
    backend = ApiBackend("m", "http://127.0.0.1:9/v1", image_root=Path())
    assert KEY not in repr(backend) + repr(vars(backend)) + backend.identity


def _generate(backend: ApiBackend, requests: Sequence[Request]) -> list[RawReply | Failure]:
    return asyncio.run(backend.generate(requests))


def test_no_server_and_no_key_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=f"no server at http://127.0.0.1:{port}/v1; start it"):
        _generate(ApiBackend("m", f"http://127.0.0.1:{port}/v1", image_root=Path()), [request()])
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        _generate(ApiBackend("m", "https://api.openai.com/v1", image_root=Path()), [request()])
    replies, _ = ask(lambda *_: completion("ok"), request(), key="none")
    assert replies == [RawReply("ok", "stop", 11, 5)]


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="concurrency is 0"):
        ApiBackend("m", "http://x/v1", image_root=Path(), concurrency=0)
