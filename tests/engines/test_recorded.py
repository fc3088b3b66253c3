"""The store: paid once, by content, and never lost."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from samrag.calls import CallKind, Failure, FailureReason, Sampling
from samrag.engines.base import RawReply, Repair, Request
from samrag.engines.recorded import Entry, RecordedBackend, Store
from samrag.errors import UserError
from samrag.prompts import Prompt


class Scripted:
    """Answers with the body of the prompt, and counts what it was asked."""

    def __init__(self, identity: str = "m", delay_s: float = 0.0) -> None:
        self.identity = identity
        self.delay_s = delay_s
        self.asked: list[Request] = []
        self.batches = 0

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        self.asked += requests
        self.batches += 1
        await asyncio.sleep(self.delay_s)
        return [
            Failure(FailureReason.SERVER)
            if request.prompt.body == "fail"
            else RawReply(f"{request.prompt.body}#{request.sample_index}", "stop", 7, 3)
            for request in requests
        ]

    async def close(self) -> None:
        pass


class SinglyScripted(Scripted):
    answers_singly = True


def request(body: str = "a", image: str | None = None, sample_index: int = 0) -> Request:
    return Request(CallKind.ANSWER, Prompt("do", image, body), Sampling(), sample_index, "t")


def ask(folder: Path, inner: Scripted, *requests: Request) -> list[RawReply | Failure]:
    """One run: open the store, ask, close."""

    async def work() -> list[RawReply | Failure]:
        backend = RecordedBackend(inner, Store(folder / "calls.sqlite"), folder)
        try:
            return await backend.generate(requests)
        finally:
            await backend.close()

    return asyncio.run(work())


@pytest.mark.parametrize("scripted", [Scripted, SinglyScripted])
def test_a_second_run_asks_nothing_and_gets_the_same(tmp_path: Path, scripted: type[Scripted]) -> None:
    requests = [request(str(i)) for i in range(1000)]
    first, second = scripted(), scripted()
    replies = ask(tmp_path, first, *requests)
    again = ask(tmp_path, second, *requests)
    assert (len(first.asked), len(second.asked)) == (1000, 0)
    assert first.batches == (1000 if scripted is SinglyScripted else 1)
    assert [r.text for r in replies] == [f"{i}#0" for i in range(1000)]
    assert again == [dataclasses.replace(reply, cached=True) for reply in replies]


def test_identical_requests_are_asked_once_in_a_call_and_in_flight(tmp_path: Path) -> None:
    inner = Scripted(delay_s=0.02)

    async def work() -> list[list[RawReply | Failure]]:
        backend = RecordedBackend(inner, Store(tmp_path / "calls.sqlite"), tmp_path)
        calls = (backend.generate([request("a"), request("b"), request("a")]), backend.generate([request("a")]))
        replies = await asyncio.gather(*calls)
        await backend.close()
        return replies

    (a1, b, a2), (a3,) = asyncio.run(work())
    assert len(inner.asked) == 2
    assert [r.text for r in (a1, b, a2, a3)] == ["a#0", "b#0", "a#0", "a#0"]
    assert [r.cached for r in (a1, b, a2, a3)] == [False, False, True, True]


@pytest.mark.parametrize("scripted", [Scripted, SinglyScripted])
def test_a_request_goes_on_when_its_asker_is_cancelled_and_who_waits_for_it_gets_it(
    tmp_path: Path, scripted: type[Scripted]
) -> None:
    inner = scripted(delay_s=0.05)

    async def work() -> list[RawReply | Failure]:
        backend = RecordedBackend(inner, Store(tmp_path / "calls.sqlite"), tmp_path)
        first = asyncio.create_task(backend.generate([request("a")]))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(backend.generate([request("a")]))
        await asyncio.sleep(0.01)
        first.cancel()
        replies = await second
        await backend.close()
        return replies

    assert asyncio.run(work()) == [RawReply("a#0", "stop", 7, 3, cached=True)]
    assert len(inner.asked) == 1


def test_what_was_asked_before_closing_is_stored_though_nobody_waits(tmp_path: Path) -> None:
    inner = SinglyScripted(delay_s=0.05)

    async def work() -> None:
        backend = RecordedBackend(inner, Store(tmp_path / "calls.sqlite"), tmp_path)
        asker = asyncio.create_task(backend.generate([request("a"), request("b")]))
        await asyncio.sleep(0.01)
        asker.cancel()
        await backend.close()

    asyncio.run(work())
    again = SinglyScripted()
    ask(tmp_path, again, request("a"), request("b"))
    assert again.asked == []


def test_whatever_can_change_the_reply_is_in_the_key(tmp_path: Path) -> None:
    (tmp_path / "i.png").write_bytes(b"one")
    (tmp_path / "same.png").write_bytes(b"one")
    base = request("a", "i.png")
    assert ask(tmp_path, Scripted(), base) == [RawReply("a#0", "stop", 7, 3)]
    variants = [
        dataclasses.replace(base, prompt=Prompt("do!", "i.png", "a")),
        dataclasses.replace(base, prompt=Prompt("do", "i.png", "b")),
        dataclasses.replace(base, prompt=Prompt("do", None, "a")),
        dataclasses.replace(base, kind=CallKind.IS_SUP),
        dataclasses.replace(base, sample_index=1),
        dataclasses.replace(base, sampling=Sampling(temperature=1.2)),
        dataclasses.replace(base, template="u"),
        dataclasses.replace(base, repair=Repair("no", "again")),
    ]
    inner = Scripted()
    ask(tmp_path, inner, base, *variants, request("a", "same.png"))
    assert inner.asked == variants  # not the base, and not the same image under another name
    other = Scripted(identity="other model")
    ask(tmp_path, other, base)
    (tmp_path / "i.png").write_bytes(b"another")
    changed = Scripted()
    ask(tmp_path, changed, base)
    assert (len(other.asked), len(changed.asked)) == (1, 1)


def test_failures_are_not_stored_and_a_missing_image_is_one(tmp_path: Path) -> None:
    for _ in range(2):
        inner = Scripted()
        failed, missing, good = ask(tmp_path, inner, request("fail"), request("a", "gone.png"), request("b"))
        assert failed == Failure(FailureReason.SERVER)
        assert isinstance(missing, Failure) and missing.reason is FailureReason.BAD_IMAGE
        assert good.text == "b#0"
    assert [r.prompt.body for r in inner.asked] == ["fail"]
    with pytest.raises(UserError, match="leaves the data folder"):
        ask(tmp_path, Scripted(), request("a", "../x.png"))


def test_the_stored_request_is_readable_and_holds_no_image_bytes(tmp_path: Path) -> None:
    (tmp_path / "i.png").write_bytes(b"\x89PNG")
    ask(tmp_path, Scripted(), request("caf\u00e9 \ud800", "i.png"))
    with sqlite3.connect(tmp_path / "calls.sqlite") as connection:
        rows = connection.execute("SELECT kind, model, text, json_extract(request, '$.image') FROM replies").fetchall()
    assert rows[0][:3] == ("answer", "m", "caf\u00e9 ?#0")
    assert len(rows[0][3]) == 64


def test_an_error_of_the_inner_backend_passes_and_what_arrived_is_kept(tmp_path: Path) -> None:
    class Stopping(SinglyScripted):
        async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
            if requests[0].prompt.body == "stop":
                await asyncio.sleep(0.1)
                raise UserError("bad key")
            return await super().generate(requests)

    with pytest.raises(UserError, match="bad key"):
        ask(tmp_path, Stopping(), request("a"), request("stop"), request("b"))
    inner = Scripted()
    ask(tmp_path, inner, request("a"), request("b"))
    assert inner.asked == []


@pytest.mark.parametrize(
    "content", [b"this is no database, but it is long enough to be read as a page" * 99, b"SQLite f"]
)
def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calls.sqlite"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not a usable reply store.*move it away"):
        Store(path)
    assert path.read_bytes() == content


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE replies (x)")
    connection.commit()
    connection.close()
    with pytest.raises(UserError, match="another program"):
        Store(path)


KILLED = """
    import asyncio, sys
    from pathlib import Path
    from samrag.calls import CallKind, Sampling
    from samrag.engines.base import RawReply, Request
    from samrag.engines.recorded import RecordedBackend, Store
    from samrag.prompts import Prompt

    class Inner:
        identity, answers_singly = "m", True
        async def generate(self, requests):
            await asyncio.sleep(0)
            return [RawReply(r.prompt.body + "#0", "stop", 7, 3) for r in requests]

    async def one(backend, i):
        [reply] = await backend.generate([Request(CallKind.ANSWER, Prompt("do", None, str(i)), Sampling(), 0, "t")])
        sys.stdout.write(reply.text + "\\n"); sys.stdout.flush()

    async def main():
        backend = RecordedBackend(Inner(), Store(Path(sys.argv[1]) / "calls.sqlite"), Path(sys.argv[1]))
        for start in range(0, 10**6, 8):
            await asyncio.gather(*[one(backend, i) for i in range(start, start + 8)])

    asyncio.run(main())
"""


def test_a_killed_process_has_lost_no_reply_it_returned(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        returned = [process.stdout.readline() for _ in range(100)]
        process.send_signal(signal.SIGKILL)
        returned += [line for line in process.stdout if line.endswith("\n")]
    inner = Scripted()
    ask(tmp_path, inner, *[request(line.split("#")[0]) for line in returned])
    assert len(returned) >= 100
    assert inner.asked == []


def test_a_store_of_an_older_version_gets_the_column_of_probabilities(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE replies DROP COLUMN probability")
        row = ("k", "is_use", "m", "{}", "text", "stop", 1, 2, "now")
        connection.execute("INSERT INTO replies VALUES (?,?,?,?,?,?,?,?,?)", row)
        connection.commit()
    store = Store(path)
    assert store.get(["k"]) == {"k": RawReply("text", "stop", 1, 2, None, cached=True)}
    asyncio.run(store.put([Entry("l", "is_use", "m", "{}", RawReply("t", "stop", 1, 1, 0.75), "i")]))
    assert store.get(["l"])["l"].probability == 0.75
    store.close()
