"""What several test modules share: entry scripts as functions, a tiny untrained LLaVA, a teacher that counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from samrag import config


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a script ended in this process."""

    code: int
    log: str
    err: str
    """Standard error, without the log."""


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Callable[..., Outcome]:
    """Run an entry script's `main` in its own frame, as `python <script> <arguments>` does, but in this process."""
    for name in ("samrag", "data_gen", "train", "inference", "scripts"):
        caplog.set_level(logging.INFO, logger=name)

    def run(script: str, *arguments: object) -> Outcome:
        main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        capsys.readouterr()
        caplog.clear()
        code = 0
        try:
            config.run(main)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return Outcome(code, caplog.text, capsys.readouterr().err)

    return run


@pytest.fixture(scope="session")
def tiny_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained LLaVA with its processor."""
    from samrag.miniworld import tiny_llava

    folder = tmp_path_factory.mktemp("llava")
    with pytest.MonkeyPatch.context() as patch:
        texts = list(itertools.islice(tiny_llava._tokenizer_texts(0), 300))
        patch.setattr(tiny_llava, "_tokenizer_texts", lambda seed: texts)
        tokenizer = tiny_llava.build_tokenizer()
    tiny_llava.build_model(tokenizer, hidden=64, num_layers=2, seed=0).save_pretrained(folder)
    tiny_llava.build_processor(tokenizer).save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A teacher on loopback."""

    url: str
    asked: Counter[str]
    """How often each request came."""


@pytest.fixture
def serve_teacher() -> Iterator[Callable[..., Served]]:
    """Start simulated teachers of worlds in this process; they count what they are asked, and may take their time."""
    from aiohttp import web

    from samrag.miniworld.dataset import read_truth
    from samrag.miniworld.teacher import Teacher, application

    def serve(world: Path, delay_s: float = 0.0) -> Served:
        teacher, asked = Teacher(read_truth(world)), Counter[str]()
        reply = teacher.text

        def text(body: Any) -> str:
            asked[json.dumps(body, sort_keys=True)] += 1
            time.sleep(delay_s)
            return reply(body)

        teacher.text = text  # type: ignore[method-assign]
        loop = asyncio.new_event_loop()
        runner = web.AppRunner(application(teacher), shutdown_timeout=0.1)
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        def stop() -> None:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

        stops.callback(stop)
        return Served(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked)

    with contextlib.ExitStack() as stops:
        yield serve
