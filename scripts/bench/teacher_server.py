"""Measure the API engine and the call store against a server on loopback.

    python scripts/bench/teacher_server.py throughput --num_calls 10000
    python scripts/bench/teacher_server.py allowance --minutes 3
    python scripts/bench/teacher_server.py memory --num_calls 10000 200000
    python scripts/bench/teacher_server.py store --num_replies 1000000

`throughput`: calls a second with storing, the server replying at once. `allowance`: the share of 600 requests a minute
that is used, and the share of 429s, after the first minute; the server keeps a sliding window and tells its limit in
headers alone. `memory`: the process's peak after so many calls. `store`: opening, reading, and a finished job's re-run
over a large store. The server runs in a process of its own. Figures are of the machine at that moment.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohttp import web

from samrag.answering import recorded
from samrag.arguments import CaptionArguments, TeacherArguments
from samrag.calls import Call, CallKind, Failure, Passage, Program, Reply
from samrag.engines.api import ApiBackend
from samrag.engines.base import Engine, RawReply, Request
from samrag.engines.recorded import Entry, Keys, RecordedBackend, Store
from samrag.prompts import PromptStyle
from samrag.provenance import is_finished, write_run_record
from samrag.schedule import Schedule, run

_REPLY = json.dumps({"Reasoning": "The text states it in so many words. " * 4, "Response": "1884"})
_PASSAGE = "A paragraph as long as they mostly are in an encyclopaedia, with names, years and places. " * 6


def serve(per_minute: int | None, latency_s: float, until_s: float) -> None:
    """Reply to everything; with a limit, keep a sliding window, tell it in headers, and count after a minute."""
    window: collections.deque[float] = collections.deque()
    counts: collections.Counter[str] = collections.Counter()
    begun: float | None = None
    usage = {"prompt_tokens": 600, "completion_tokens": 40, "total_tokens": 640}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": _REPLY}}
    completion = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    data = json.dumps({**completion, "usage": usage}).encode()

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        if per_minute is None:
            return web.Response(body=data, content_type="application/json")
        nonlocal begun
        now = time.monotonic()
        begun = begun or now
        while window and window[0] <= now - 60:
            window.popleft()
        counted = 60 < now - begun <= until_s
        headers = {"x-ratelimit-limit-requests": str(per_minute)}
        if len(window) >= per_minute:
            counts["refused"] += counted
            headers |= {"x-ratelimit-remaining-requests": "0", "retry-after-ms": f"{(window[0] + 60 - now) * 1000:.0f}"}
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers=headers)
        window.append(now)
        counts["answered"] += counted
        headers["x-ratelimit-remaining-requests"] = str(per_minute - len(window))
        await asyncio.sleep(latency_s)
        return web.Response(body=data, content_type="application/json", headers=headers)

    async def tell(_: web.Request) -> web.Response:
        return web.json_response(counts)

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", chat), web.get("/counts", tell)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.contextmanager
def served(*options: str) -> Iterator[str]:
    """A server process; gives its address."""
    command = [sys.executable, __file__, "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def program(number: int) -> Program[Reply]:
    """One call, different from all others."""
    (reply,) = yield [Call(CallKind.ANSWER, f"In which year, number {number}?", (Passage("T", _PASSAGE),))]
    return reply


async def ask(url: str, folder: Path, num_calls: int, concurrency: int, seconds: float | None = None) -> int:
    """Ask and store; returns how many calls were answered."""
    store = Store(folder / "calls.sqlite")
    backend = ApiBackend("m", f"{url}/v1", image_root=folder, concurrency=concurrency)
    engine = recorded(backend, store, folder, PromptStyle.TEACHER)
    answered, begun = 0, time.monotonic()
    try:
        async for _ in run(map(program, range(num_calls)), engine, Schedule.CONCURRENT, concurrency):
            answered += 1
            if seconds is not None and time.monotonic() - begun > seconds:
                break
    finally:
        await engine.close()
        store.close()
    return answered


def throughput(num_calls: int, concurrency: int) -> None:
    """Calls a second, twice: asked and stored, then read back."""
    with tempfile.TemporaryDirectory() as scratch, served() as url:
        for what in ("asked and stored", "read from the store"):
            begun = time.monotonic()
            asyncio.run(ask(url, Path(scratch), num_calls, concurrency))
            taken_s = time.monotonic() - begun
            print(f"{num_calls:,} calls {what} in {taken_s:.1f} s: {num_calls / taken_s:,.0f} calls/s")


def allowance(minutes: float, per_minute: int, concurrency: int) -> None:
    """Use of the allowance and 429s after the first minute."""
    import urllib.request

    options = ("--per_minute", str(per_minute), "--latency_s", "0.3", "--minutes", str(minutes))
    with tempfile.TemporaryDirectory() as scratch, served(*options) as url:
        asyncio.run(ask(url, Path(scratch), 10**6, concurrency, minutes * 60 + 1))
        with urllib.request.urlopen(f"{url}/counts") as reply:
            counts = json.load(reply)
    answered, refused = counts.get("answered", 0), counts.get("refused", 0)
    allowed = per_minute * (minutes - 1)
    print(f"after the first minute, in {minutes - 1:g} more: {answered:,} answered of {allowed:,.0f} allowed")
    print(f"({answered / allowed:.1%}); {refused:,} times 429 ({refused / max(1, answered + refused):.2%} of requests)")


def memory(num_calls: list[int], concurrency: int) -> None:
    """Peak of resident memory, each count in a process of its own."""
    for count in num_calls:
        with tempfile.TemporaryDirectory() as scratch, served() as url:
            command = [sys.executable, __file__, "ask", "--url", url, "--folder", scratch,
                       "--num_calls", str(count), "--concurrency", str(concurrency)]  # fmt: skip
            print(f"{count:,} calls: {subprocess.check_output(command, text=True).strip()}", flush=True)


def store(num_replies: int, folder: Path) -> None:
    """Fill a store, then open it, look replies up, and run a finished job again."""
    path, keys = folder / "calls.sqlite", Keys("api:m", folder)
    engine = Engine(_Silent(), PromptStyle.TEACHER)
    opened = Store(path)

    async def fill() -> None:
        entries = []
        for number in range(len(opened), num_replies):
            request = engine.request(next(program(number))[0])
            described = keys.describe(request)
            assert isinstance(described, tuple)
            reply = RawReply(_REPLY, "stop", 600, 40)
            instruction = request.prompt.instruction
            entries.append(Entry(described[0], "answer", "api:m", described[1], reply, instruction))
            if len(entries) == 10_000 or number == num_replies - 1:
                await opened.put(entries)
                entries = []

    begun = time.monotonic()
    asyncio.run(fill())
    opened.close()
    print(
        f"filled with {num_replies:,} replies in {time.monotonic() - begun:.0f} s: {path.stat().st_size / 1e9:.2f} GB"
    )

    begun = time.monotonic()
    opened = Store(path)
    print(f"opened in {time.monotonic() - begun:.3f} s")
    backend = RecordedBackend(_Silent(), opened, folder)
    requests = [
        engine.request(next(program(number))[0]) for number in range(0, num_replies, max(1, num_replies // 10_000))
    ]
    begun = time.monotonic()
    found = asyncio.run(backend.generate(requests))
    taken_s = time.monotonic() - begun
    assert all(isinstance(reply, RawReply) and reply.cached for reply in found)
    print(f"{len(found):,} replies looked up in {taken_s:.2f} s: {len(found) / taken_s:,.0f} a second")
    opened.close()

    inputs = folder / "inputs.jsonl"
    inputs.write_bytes(b"x" * 999 + b"\n" * 1)
    with inputs.open("ab") as handle:
        for _ in range(200):
            handle.write(b"y" * 999_999 + b"\n")
    groups = [CaptionArguments([str(inputs)], str(folder)), TeacherArguments(str(path))]
    write_run_record(folder / "job", groups, [inputs])
    begun = time.monotonic()
    assert is_finished(folder / "job", groups, [inputs])
    print(f"a finished job over 200 MB of inputs says so in {time.monotonic() - begun:.2f} s")


class _Silent:
    """A model that is never asked."""

    identity = "api:m"

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Refuse."""
        raise AssertionError("a stored reply was asked for")

    async def close(self) -> None:
        """Nothing is held."""


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["throughput", "allowance", "memory", "store", "serve", "ask"])
    parser.add_argument("--num_calls", type=int, nargs="+", default=[10_000])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--per_minute", type=int, help="allowance: requests a minute (600)")
    parser.add_argument("--num_replies", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="store: keep the store here")
    parser.add_argument("--latency_s", type=float, default=0.0, help="serve: used by the script itself")
    parser.add_argument("--url", help="ask: used by the script itself")
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "not-needed-on-loopback")
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    if options.what == "serve":
        serve(options.per_minute, options.latency_s, 60 * options.minutes)
    elif options.what == "ask":
        asyncio.run(ask(options.url, options.folder, options.num_calls[0], options.concurrency))
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB at most")
    elif options.what == "throughput":
        throughput(options.num_calls[0], options.concurrency)
    elif options.what == "allowance":
        allowance(options.minutes, options.per_minute or 600, options.concurrency)
    elif options.what == "memory":
        memory(options.num_calls, options.concurrency)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.folder or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            store(options.num_replies, folder)


if __name__ == "__main__":
    main()
