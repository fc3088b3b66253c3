"""Kill a teacher job at random instants, then let it finish: equal bytes, nothing paid twice, nothing lost.

    python scripts/bench/kill_and_finish.py --run_dir runs/quickstart --num_kills 50

Needs the mini world's prepared training data (scripts/quickstart.sh writes it). The teacher is simulated, on loopback,
and counts what it is asked. A call that was under way when its process was killed may be asked again: nobody has its
reply. One whose reply was in the store when its process was killed may not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from samrag.answering import recorded
from samrag.distilling import ask_teacher, rows_of
from samrag.engines.api import ApiBackend
from samrag.engines.recorded import Store
from samrag.files import write_records
from samrag.miniworld.dataset import read_truth
from samrag.miniworld.teacher import Teacher, application
from samrag.miniworld.trial import bm25_materials, recipe
from samrag.miniworld.world import Club
from samrag.prompts import PromptStyle

CONCURRENCY = 32
Asked = tuple[str, str, int, int]
"""Kind, text, seed and number of turns of a request: what both the teacher and the store know of it."""


class CountingTeacher(Teacher):
    """Counts its requests."""

    def __init__(self, clubs: Sequence[Club], error_rate: float) -> None:
        super().__init__(clubs, error_rate)
        self.asked: Counter[Asked] = Counter()

    def text(self, body: Mapping[str, Any]) -> str:
        """Count, and reply."""
        turns = body["messages"]
        kind = body["response_format"]["json_schema"]["name"]
        self.asked[kind, turns[0]["content"][-1]["text"], int(body["seed"]), len(turns)] += 1
        return super().text(body)


def serve(teacher: Teacher) -> str:
    """Serve in a thread of this process; returns the address."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application(teacher))
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def work(run_dir: Path, url: str, folder: Path, num_questions: int) -> None:
    """The job: ask the teacher, write the rows."""
    root = run_dir / "world" / "final_dataset_images"
    store = Store(folder / "calls.sqlite")
    backend = ApiBackend("simulated-teacher", url, image_root=root, concurrency=CONCURRENCY)
    engine = recorded(backend, store, root, PromptStyle.TEACHER)
    arguments = recipe()
    try:
        materials = bm25_materials(run_dir, arguments, num_questions)
        results, _ = await ask_teacher(materials, engine, arguments, CONCURRENCY)
        rows = rows_of(results, arguments, "simulated-teacher", engine.key)
    finally:
        await engine.close()
        store.close()
    write_records(folder / "dropped.jsonl", [item for result in results for item in result.dropped])
    write_records(folder / "sft.jsonl", rows)


def stored(folder: Path) -> set[Asked]:
    """What the store holds, in the teacher's terms."""
    path = folder / "calls.sqlite"
    if not path.exists():
        return set()
    connection = sqlite3.connect(path)
    try:
        known = [json.loads(text) for (text,) in connection.execute("SELECT request FROM replies")]
    except sqlite3.OperationalError:  # killed before the table was there
        return set()
    finally:
        connection.close()
    return {
        (r["kind"], r["body"], r["sampling"]["seed"] + r["sample_index"], 3 if r.get("repair") else 1) for r in known
    }


def main() -> None:
    """Run undisturbed, then run killed; compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--num_questions", type=int, default=65)
    parser.add_argument("--num_kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2, metavar=("URL", "FOLDER"), help="used by the script itself")
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "not-needed-on-loopback")
    if options.worker:
        url, folder = options.worker
        asyncio.run(work(options.run_dir, url, Path(folder), options.num_questions))
        return

    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # connections that end are the point here
    clubs = read_truth(options.run_dir / "world")
    with tempfile.TemporaryDirectory() as scratch:
        calm, killed = Path(scratch, "calm"), Path(scratch, "killed")
        calm.mkdir()
        killed.mkdir()
        teachers = {folder: CountingTeacher(clubs, 0.15) for folder in (calm, killed)}
        urls = {folder: serve(teacher) for folder, teacher in teachers.items()}

        def start(folder: Path) -> subprocess.Popen[bytes]:
            command = [sys.executable, __file__, "--run_dir", str(options.run_dir), "--num_questions",
                       str(options.num_questions), "--worker", urls[folder], str(folder)]  # fmt: skip
            return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

        begun = time.monotonic()
        assert start(calm).wait() == 0, "the undisturbed job failed"
        whole_s, num_calls = time.monotonic() - begun, len(teachers[calm].asked)
        rng = random.Random(options.seed)
        repeated_though_stored = num_killed = 0
        for kill in range(options.num_kills):
            known, before = stored(killed), Counter(teachers[killed].asked)
            at = num_calls * (kill + rng.random()) / (options.num_kills + 1)
            process = start(killed)
            while len(teachers[killed].asked) < at and process.poll() is None:
                time.sleep(0.001)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                num_killed += 1
            process.wait()
            repeated_though_stored += sum(teachers[killed].asked[key] > before[key] for key in known)
        known, before = stored(killed), Counter(teachers[killed].asked)
        assert start(killed).wait() == 0, "the killed job did not finish"
        repeated_though_stored += sum(teachers[killed].asked[key] > before[key] for key in known)
        asked = teachers[killed].asked
        print(f"{num_calls:,} calls undisturbed, in {whole_s:.1f} s; killed {num_killed} times")
        for name in ("sft.jsonl", "dropped.jsonl"):
            print(f"{name}: equal bytes: {(calm / name).read_bytes() == (killed / name).read_bytes()}")
        print(f"asked again though stored: {repeated_though_stored}")
        print(f"asked again because nobody had the reply: {sum(asked.values()) - len(asked)}")
        print(f"stored: {len(stored(killed)):,} killed, {len(stored(calm)):,} undisturbed")


if __name__ == "__main__":
    main()
