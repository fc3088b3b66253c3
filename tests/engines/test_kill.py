"""Kill a job at random instants and let it finish: equal bytes, no stored reply asked for again, none lost."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.faulty_server import FaultyServer, serving

ROOT = Path(__file__).parents[2]
NUM_CALLS, NUM_KILLS, CONCURRENCY = 200, 4, 8
JOB = """
    import asyncio, sys
    from pathlib import Path
    from samrag.answering import recorded
    from samrag.calls import Call, CallKind, Passage
    from samrag.engines.api import ApiBackend
    from samrag.engines.recorded import Store
    from samrag.files import write_records
    from samrag.prompts import PromptStyle
    from samrag.schedule import Schedule, gather

    def chain(number):
        (first,) = yield [Call(CallKind.ANSWER, f"Q{number}", (Passage("T", "x"),))]
        replies = yield [Call(CallKind.ANSWER, f"Q{number} {part} {first.values[0]}") for part in "ab"]
        return [first, *replies]

    async def main(url, folder, num_programs, concurrency):
        store = Store(folder / "calls.sqlite")
        backend = ApiBackend("m", url, image_root=folder, concurrency=concurrency)
        engine = recorded(backend, store, folder, PromptStyle.TEACHER)
        try:
            results = await gather(map(chain, range(num_programs)), engine, Schedule.CONCURRENT, concurrency)
        finally:
            await engine.close()
            store.close()
        write_records(folder / "out.jsonl", [reply for result in results for reply in result.value])

    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
"""


def start(url: str, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "not-needed-on-loopback"}
    command = [sys.executable, "-c", textwrap.dedent(JOB), url, str(folder), str(NUM_CALLS // 3), str(CONCURRENCY)]
    return subprocess.Popen(command, env=environment)


def stored(folder: Path) -> set[str]:
    """The texts whose replies are in the store."""
    if not (folder / "calls.sqlite").exists():
        return set()
    with closing(sqlite3.connect(folder / "calls.sqlite")) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'replies'").fetchone()[0]:
            return set()
        return {text for (text,) in connection.execute("SELECT json_extract(request, '$.body') FROM replies")}


def test_a_job_killed_four_times_ends_with_the_bytes_of_an_undisturbed_one(tmp_path: Path) -> None:
    with serving(FaultyServer()) as calm:
        assert start(calm.url, tmp_path / "calm").wait(60) == 0
    folder, rng = tmp_path / "killed", random.Random(0)
    with serving(FaultyServer()) as server:
        known: set[str] = set()
        for kill in range(NUM_KILLS):
            before = Counter(server.asked)
            at = rng.randrange(*(NUM_CALLS * (kill + i) // (NUM_KILLS + 1) for i in (0, 1))) + 1
            process = start(server.url, folder)
            while sum(server.answered.values()) < at and process.poll() is None:
                time.sleep(0.001)
            assert process.poll() is None, "it ended before it could be killed"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not [text for text in known if server.asked[text] > before[text]]
            assert known <= stored(folder)
            known = stored(folder)
        before = Counter(server.asked)
        assert start(server.url, folder).wait(60) == 0
        assert not [text for text in known if server.asked[text] > before[text]]
        assert set(server.asked) == stored(folder) == stored(tmp_path / "calm")
        repeated = sum(server.asked.values()) - len(server.asked)
        assert repeated <= NUM_KILLS * 2 * CONCURRENCY  # at a kill, no program waits for more than its two calls
    assert (folder / "out.jsonl").read_bytes() == (tmp_path / "calm" / "out.jsonl").read_bytes()
    assert len((folder / "out.jsonl").read_bytes().splitlines()) == NUM_CALLS // 3 * 3
