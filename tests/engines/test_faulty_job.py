"""A whole distillation by a teacher whose server spoils three replies in ten."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from samrag.answering import recorded
from samrag.benchmarks.mmqa import read_documents, read_questions
from samrag.calls import FailureReason
from samrag.distilling import ask_teacher, materials_of, rows_of
from samrag.engines.api import ApiBackend
from samrag.engines.meter import Meter
from samrag.engines.recorded import Store
from samrag.miniworld.dataset import SplitSize, document_id, read_truth, write_world
from samrag.miniworld.language import EMBLEM, describe
from samrag.miniworld.teacher import Teacher
from samrag.miniworld.trial import recipe
from samrag.miniworld.world import Split
from samrag.programs.distill import Material
from samrag.prompts import PromptStyle
from samrag.retrieval.lexical import Bm25Ranker
from samrag.schema import SftRow, Usage
from tests.faulty_server import Fault, FaultyServer, serving

TROUBLES = {
    Fault.RATE_LIMITED: "rate_limited", Fault.SERVER_ERROR: "server", Fault.SLOW: "network", Fault.CUT_BODY: "network",
    Fault.DROPPED: "network", Fault.NOT_JSON: "malformed",
}  # fmt: skip
UNUSABLE = {
    Fault.INVALID: FailureReason.INVALID_REPLY, Fault.LENGTH: FailureReason.LENGTH,
    Fault.REFUSAL: FailureReason.CONTENT_FILTER,
}  # fmt: skip
CONCURRENCY = 16


def three_in_ten(text: str, times: int) -> Fault | None:
    """A fault by text and time, so that the order of requests does not matter."""
    rng = random.Random(f"{text} {times}")
    return rng.choice([*TROUBLES, *UNUSABLE]) if rng.random() < 0.3 else None


def materials(world: Path) -> list[Material]:
    write_world(world, {Split.TRAIN: SplitSize(20, 16)}, seed=0)
    described = {document_id(club.name + EMBLEM): describe(club.emblem) for club in read_truth(world)}
    questions = read_questions(world / "MMQA_train.jsonl.gz", "train")
    documents = [
        replace(document, caption=described[document.doc_id]) if document.image else document
        for document in read_documents(world / "MMQA_images.jsonl.gz", world / "MMQA_texts.jsonl.gz", "")
    ]
    by_id = {document.doc_id: document for document in documents}
    ranked = Bm25Ranker(documents).search([question.question for question in questions], 14)
    return materials_of(questions, by_id, [[by_id[hit.doc_id] for hit in hits] for hits in ranked], recipe())


def distilled(world: Path, store_path: Path, server: FaultyServer) -> tuple[Usage, list[SftRow], Meter]:
    async def work() -> tuple[Usage, list[SftRow], Meter]:
        store, root = Store(store_path), world / "final_dataset_images"
        backend = ApiBackend("m", server.url, image_root=root, concurrency=CONCURRENCY, timeout_s=1.0)
        engine = recorded(backend, store, root, PromptStyle.TEACHER)
        try:
            results, usage = await ask_teacher(materials(world), engine, recipe(), CONCURRENCY)
            return usage, rows_of(results, recipe(), "m", engine.key), engine.meter
        finally:
            await engine.close()
            store.close()

    return asyncio.run(work())


def test_three_replies_in_ten_faulty_end_the_job_with_each_counted_and_none_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr("samrag.engines.api._FIRST_DELAY_S", 0.01)
    materials(tmp_path / "world")
    teacher = Teacher(read_truth(tmp_path / "world"), error_rate=0.0)
    with serving(FaultyServer(three_in_ten, slow_s=1.5, reply=teacher.text)) as server:
        usage, rows, meter = distilled(tmp_path / "world", tmp_path / "calls.sqlite", server)
        said = {teacher.text(body) for body in server.bodies}
    assert 0.25 < sum(server.faults.values()) / sum(server.asked.values()) < 0.35

    expected = Counter[str]()
    for fault, name in TROUBLES.items():
        expected[name] += server.faults[fault]
    assert meter.troubles == expected
    unusable = Counter[str](meter.second_tries) + Counter[str](meter.failures)
    assert {r: unusable[r] for r in UNUSABLE.values()} == {r: server.faults[f] for f, r in UNUSABLE.items()}

    with closing(sqlite3.connect(tmp_path / "calls.sqlite")) as connection:
        stored = dict(connection.execute("SELECT key, text FROM replies"))
    assert len(rows) > 300
    assert {stored[row.call_key] for row in rows} <= said
    assert sum(meter.failures.values()) == usage.failures > 0
