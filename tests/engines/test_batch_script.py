"""The stage scripts against a server with a batch endpoint: what a batch brought, the stage finds and pays no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samrag.files import read_records, write_records
from samrag.schema import Document, Modality
from tests.faulty_server import Fault, FaultyServer, serving


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    monkeypatch.setenv("OPENAI_API_KEY", "not-needed-on-loopback")
    documents = []
    for number in range(6):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        documents.append(Document(f"d{number}", Modality.IMAGE, f"Title {number}", image=f"{number}.png"))
    write_records(tmp_path / "documents.jsonl", documents)
    return documents


def configured(folder: Path, server: FaultyServer, **teacher: object) -> tuple[Path, Path]:
    """The stage's configuration, and the batches'."""
    stage, batch = folder / "caption.yaml", folder / "batch.yaml"
    lines = {
        "documents_files": [str(folder / "documents.jsonl")], "image_root": folder, "store": folder / "calls.sqlite",
        "teacher_model": "gpt-4o", "teacher_url": server.url, **teacher,
    }  # fmt: skip
    stage.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    batch.write_text(f"stage: caption\nstage_config: {stage}\nbatch_dir: {folder / 'batches'}\npoll_s: 0.01\n")
    return stage, batch


def test_captions_by_batch_then_by_their_own_script(
    tmp_path: Path, documents: list[Document], run_script: Callable[..., Any]
) -> None:
    def script(text: str, times: int) -> Fault | None:
        return Fault.INVALID if "Title 1" in text and times == 0 else None

    with serving(FaultyServer(script)) as server:
        stage, batch = configured(tmp_path, server)
        before = run_script("data_gen/batch.py", "--config", batch, "--dry_run", "true")
        assert "0 replies are stored; to ask now: 6 calls" in before.log
        assert "at most $0.0" in before.log
        done = run_script("data_gen/batch.py", "--config", batch)
        assert done.code == 0
        assert "nothing is left to ask; now run data_gen/caption.py" in done.log
        assert len(server.batches) == 2  # the second holds the repair turn alone
        after = run_script("data_gen/caption.py", "--config", stage, "--dry_run", "true")
        assert "7 replies are stored; to ask now: 0 calls" in after.log
        captioned = run_script("data_gen/caption.py", "--config", stage)
        assert captioned.code == 0
        assert not server.bodies
        assert "second try: invalid_reply" in captioned.log
    result = read_records(tmp_path / "documents.captioned.jsonl", Document)
    assert [document.doc_id for document in result] == [document.doc_id for document in documents]
    assert all(document.caption for document in result)


def test_one_step_at_a_time_without_waiting(
    tmp_path: Path, documents: list[Document], run_script: Callable[..., Any]
) -> None:
    with serving(FaultyServer(polls=2)) as server:
        _, batch = configured(tmp_path, server)
        logs = []
        for _ in range(6):
            logs.append(run_script("data_gen/batch.py", "--config", batch, "--wait", "false").log)
            if "nothing is left" in logs[-1]:
                break
        assert "batches are under way; run the same command again" in logs[0]
        assert "nothing is left to ask" in logs[-1]
        assert len(server.batches) == 1
        assert set(server.asked.values()) == {1}


def test_a_budget_without_a_price_is_refused_in_a_sentence(
    tmp_path: Path, documents: list[Document], run_script: Callable[..., Any]
) -> None:
    with serving(FaultyServer()) as server:
        stage, _ = configured(tmp_path, server, teacher_model="unheard-of", budget_usd=1)
        refused = run_script("data_gen/caption.py", "--config", stage)
        assert refused.code == 2
        assert "give its prices in a price_file" in refused.err
        prices = tmp_path / "prices.yaml"
        prices.write_text("unheard-of: {input: 1, output: 2}\n")
        stage, _ = configured(tmp_path, server, teacher_model="unheard-of", budget_usd=1, price_file=prices)
        assert run_script("data_gen/caption.py", "--config", stage).code == 0
        prices.write_text("unheard-of: {input: 1, outptu: 2}\n")
        wrong = run_script("data_gen/caption.py", "--config", stage)
        assert wrong.code == 2
        assert "prices.yaml, unheard-of" in wrong.err
