"""A teacher on loopback that misbehaves on purpose: chat completions, files and batches, each fault by script.

It runs in a thread of its own, so that it also serves processes that a test kills. Equal requests get equal replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web


class Fault(StrEnum):
    """What goes wrong with one request of chat completions, or with one line of a batch."""

    RATE_LIMITED = "rate_limited"  # 429 with Retry-After
    NO_CREDIT = "no_credit"  # 429 that says the quota is exhausted
    SERVER_ERROR = "server_error"  # 500
    BAD_REQUEST = "bad_request"  # 400
    BAD_KEY = "bad_key"  # 401
    SLOW = "slow"  # longer than the client waits
    CUT_BODY = "cut_body"  # the connection ends within the body
    DROPPED = "dropped"  # the connection ends without a reply
    NOT_JSON = "not_json"  # a page of HTML
    LENGTH = "length"  # the reply is cut at max_tokens
    INVALID = "invalid"  # well-formed HTTP, but not the object that was asked for
    REFUSAL = "refusal"
    MISSING = "missing"  # batch: no line for this request
    DUPLICATE = "duplicate"  # batch: two lines, the second with another reply
    UNKNOWN = "unknown"  # batch: beside this request's line, one that nobody asked for


Script = Callable[[str, int], Fault | None]
"""Given a request's text and how often it came before: what goes wrong."""


def nothing(text: str, times: int) -> Fault | None:
    """No faults."""
    return None


def first_time(faults: dict[str, Fault]) -> Script:
    """Each text's fault, the first time it comes."""
    return lambda text, times: faults.get(text) if times == 0 else None


def always(faults: dict[str, Fault]) -> Script:
    """Each text's fault, every time."""
    return lambda text, times: faults.get(text)


def text_of(body: dict[str, Any]) -> str:
    """The variable text of a request's first turn."""
    return str(body["messages"][0]["content"][-1]["text"])


def reply_to(body: dict[str, Any]) -> str:
    """The right reply: an object with a response that depends on the whole request."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    return json.dumps({"Reasoning": f"because {digest}", "Response": f"answer {digest}"})


def completion(
    body: dict[str, Any], fault: Fault | None = None, reply: Callable[[dict[str, Any]], str] = reply_to
) -> dict[str, Any]:
    """A chat completion."""
    content: str | None = reply(body)
    message: dict[str, Any] = {"role": "assistant"}
    if fault is Fault.LENGTH:
        content = str(content)[:9]
    elif fault is Fault.INVALID:
        content = "I cannot tell."
    elif fault is Fault.REFUSAL:
        content, message["refusal"] = None, "I will not."
    choice = {
        "index": 0,
        "finish_reason": "length" if fault is Fault.LENGTH else "stop",
        "message": {**message, "content": content},
    }
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@dataclass
class FaultyServer:
    """The server's script, and what it saw."""

    script: Script = nothing
    reply: Callable[[dict[str, Any]], str] = reply_to
    """What is said to a request when nothing goes wrong."""
    slow_s: float = 0.5
    retry_after: str = "0.01"
    polls: int = 1
    """How often a batch is still in progress when it is looked at."""
    expire: bool = False
    """The next batch expires when it is half done."""
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    """How often each text came."""
    answered: Counter[str] = field(default_factory=Counter)
    """How often each text got a completion."""
    faults: Counter[Fault] = field(default_factory=Counter)
    """Faults of chat completions."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """All chat bodies."""
    most_at_once: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    _active: int = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion, or not."""
        body = await request.json()
        text = text_of(body)
        fault = self.script(text, self.asked[text])
        self.asked[text] += 1
        self.bodies.append(body)
        if fault:
            self.faults[fault] += 1
        self._active += 1
        self.most_at_once = max(self.most_at_once, self._active)
        try:
            return await self._respond(request, body, text, fault)
        finally:
            self._active -= 1

    async def _respond(
        self, request: web.Request, body: dict[str, Any], text: str, fault: Fault | None
    ) -> web.StreamResponse:
        status = {
            Fault.RATE_LIMITED: 429, Fault.NO_CREDIT: 429, Fault.SERVER_ERROR: 500, Fault.BAD_REQUEST: 400,
            Fault.BAD_KEY: 401,
        }.get(fault) if fault else None  # fmt: skip
        if status is not None:
            headers = {"Retry-After": self.retry_after} if fault is Fault.RATE_LIMITED else {}
            code = "insufficient_quota" if fault is Fault.NO_CREDIT else str(fault)
            return web.json_response({"error": {"message": str(fault), "code": code}}, status=status, headers=headers)
        if fault is Fault.NOT_JSON:
            return web.Response(text="<html>", content_type="text/html")
        if fault is Fault.DROPPED:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault is Fault.SLOW:
            await asyncio.sleep(self.slow_s)
        data = json.dumps(completion(body, fault, self.reply)).encode()
        if fault is Fault.CUT_BODY:
            response = web.StreamResponse(
                headers={"Content-Length": str(len(data)), "Content-Type": "application/json"}
            )
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        self.answered[text] += 1
        return web.Response(body=data, content_type="application/json")

    async def upload(self, request: web.Request) -> web.Response:
        """Take a file."""
        form = await request.post()
        name = f"file-{len(self.files)}"
        self.files[name] = form["file"].file.read()  # type: ignore[union-attr]
        return web.json_response(self._file(name))

    def _file(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        return {"id": name, "object": "file", "bytes": size, "created_at": 0, "filename": name, "purpose": "batch",
                "status": "processed"}  # fmt: skip

    async def content(self, request: web.Request) -> web.Response:
        """Give a file back."""
        return web.Response(body=self.files[request.match_info["name"]])

    async def create_batch(self, request: web.Request) -> web.Response:
        """Begin a batch."""
        given = await request.json()
        name = f"batch-{len(self.batches)}"
        self.batches[name] = {
            "id": name, "object": "batch", "status": "validating", "created_at": 0, "endpoint": given["endpoint"],
            "input_file_id": given["input_file_id"], "completion_window": "24h", "polls": self.polls,
            "expires": self.expire,
        }  # fmt: skip
        self.expire = False
        return web.json_response(self.batches[name])

    async def list_batches(self, request: web.Request) -> web.Response:
        """All batches."""
        return web.json_response({"object": "list", "data": list(self.batches.values()), "has_more": False})

    async def get_batch(self, request: web.Request) -> web.Response:
        """Look at a batch; it is done when it was looked at often enough."""
        batch = self.batches[request.match_info["name"]]
        if batch["status"] in ("validating", "in_progress"):
            batch["status"] = "in_progress" if batch["polls"] > 0 else "finalizing"
            batch["polls"] -= 1
            if batch["status"] == "finalizing":
                self._run(batch)
        return web.json_response(batch)

    def _run(self, batch: dict[str, Any]) -> None:
        lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
        if batch["expires"]:
            lines = lines[: len(lines) // 2]
        output: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for line in reversed(lines):
            text = text_of(line["body"])
            fault = self.script(text, self.asked[text])
            self.asked[text] += 1
            if fault is Fault.MISSING:
                continue
            status = {Fault.BAD_REQUEST: 400, Fault.BAD_KEY: 401, Fault.SERVER_ERROR: 500}.get(fault) if fault else None
            if status is not None:
                reply = {"error": {"message": str(fault), "code": str(fault)}}
                errors.append(self._line(line["custom_id"], reply, status))
                continue
            self.answered[text] += 1
            output.append(self._line(line["custom_id"], completion(line["body"], fault)))
            if fault is Fault.DUPLICATE:
                output.append(self._line(line["custom_id"], completion({**line["body"], "seed": -1})))
            if fault is Fault.UNKNOWN:
                output.append(self._line("nobody", completion(line["body"])))
        for key, rows in (("output_file_id", output), ("error_file_id", errors)):
            if rows:
                batch[key] = f"file-{len(self.files)}"
                self.files[batch[key]] = "".join(json.dumps(row) + "\n" for row in rows).encode()
        batch["status"] = "expired" if batch["expires"] else "completed"

    @staticmethod
    def _line(custom_id: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        response = {"status_code": status, "request_id": "r", "body": body}
        return {"id": f"line-{custom_id}", "custom_id": custom_id, "response": response, "error": None}


@contextlib.contextmanager
def serving(server: FaultyServer) -> Iterator[FaultyServer]:
    """Serve while the block runs."""
    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes(
        [
            web.post("/v1/chat/completions", server.chat),
            web.post("/v1/files", server.upload),
            web.get("/v1/files/{name}/content", server.content),
            web.post("/v1/batches", server.create_batch),
            web.get("/v1/batches", server.list_batches),
            web.get("/v1/batches/{name}", server.get_batch),
        ]
    )
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
