"""Images over loopback: each URL asked for once, faults that pass tried again, everything else named."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data_gen.download_images import download
from samrag.arguments import DownloadArguments
from samrag.benchmarks.downloading import REPORT, Download, Fate, download_images
from samrag.benchmarks.rag_igbench import image_path
from samrag.files import read_records


def picture(colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(out, "PNG")
    return out.getvalue()


class Server(ThreadingHTTPServer):
    """Serves what its path says, and counts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.now = self.most = 0
        self.lock = threading.Lock()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        with self.server.lock:
            self.server.asked[name] += 1
            times = self.server.asked[name]
        fault, _, rest = name.partition("/")
        if fault == "once" and times == 1:
            self.fail_for_now(rest)
        elif fault == "gone":
            self.reply(404, b"not here")
        elif fault == "busy":
            self.reply(503, b"")
        elif fault == "page":
            self.reply(200, b"<html>log in first</html>", "text/html")
        elif fault == "half":
            self.reply(200, picture()[:60])
        elif fault == "large":
            self.reply(200, b"\0" * 200_000)
        elif fault == "moved":
            self.reply(302, b"", location=self.server.url("good"))
        elif fault == "circle":
            self.reply(302, b"", location=self.server.url("circle"))
        else:
            self.reply(200, picture())

    def fail_for_now(self, fault: str) -> None:
        if fault == "limited":
            self.reply(429, b"", retry="0")
        elif fault == "error":
            self.reply(500, b"")
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.wfile.write(picture())
            self.close_connection = True
        elif fault == "slow":
            threading.Event().wait(1.0)

    def reply(self, status: int, body: bytes, kind: str = "image/png", location: str = "", retry: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        if retry:
            self.send_header("Retry-After", retry)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def arguments(folder: Path, **more: Any) -> DownloadArguments:
    given = {"max_attempts": 3, "backoff_s": 0.01, "timeout_s": 0.4, "max_file_mb": 0.1} | more
    return DownloadArguments([str(folder / "questions.jsonl")], str(folder / "images"), str(folder / "report"), **given)


def fetch(folder: Path, urls: list[str], **more: Any) -> list[Download]:
    return asyncio.run(download_images(urls, arguments(folder, **more)))


@pytest.mark.parametrize("fault", ["limited", "error", "cut", "slow"])
def test_a_fault_that_passes_is_tried_again(server: Server, tmp_path: Path, fault: str) -> None:
    (record,) = fetch(tmp_path, [server.url(f"once/{fault}")])
    assert (record.fate, record.attempts) == (Fate.FETCHED, 2)
    assert (tmp_path / "images" / record.image).read_bytes() == picture()


@pytest.mark.parametrize(
    ("name", "fate", "detail", "asked"),
    [
        ("gone", Fate.DEAD, "HTTP 404", 1),
        ("circle", Fate.DEAD, "TooManyRedirects", 6),
        ("busy", Fate.FAILED, "HTTP 503", 3),
        ("page", Fate.UNUSABLE, "text/html are no image", 1),
        ("half", Fate.UNUSABLE, "are no image", 1),
        ("large", Fate.UNUSABLE, "larger than 0.1 MB", 1),
    ],
)
def test_what_gives_no_image_is_named_and_leaves_no_file(
    server: Server, tmp_path: Path, name: str, fate: Fate, detail: str, asked: int
) -> None:
    (record,) = fetch(tmp_path, [server.url(name)])
    assert (record.fate, server.asked[name]) == (fate, asked)
    assert detail in record.detail
    assert not [path for path in tmp_path.rglob("images/*") if path.is_file()]


def test_no_address_and_no_server_end_in_a_report_too(tmp_path: Path) -> None:
    records = fetch(tmp_path, ["http://x:port/", "http://127.0.0.1:1/x.png"], max_attempts=2)
    assert [record.fate for record in records] == [Fate.DEAD, Fate.FAILED]


def test_a_url_is_asked_for_once_and_redirects_are_followed(server: Server, tmp_path: Path) -> None:
    urls = [server.url("good"), server.url("moved"), server.url("good")]
    records = fetch(tmp_path, urls)
    assert [(record.url, record.fate) for record in records] == [(url, Fate.FETCHED) for url in urls[:2]]
    assert server.asked["moved"] == 1


def test_a_second_run_asks_for_what_failed_for_the_time_being_alone(server: Server, tmp_path: Path) -> None:
    urls = [server.url(name) for name in ("good", "gone", "page", "busy")]
    fetch(tmp_path, urls)
    server.asked.clear()
    again = fetch(tmp_path, urls)
    assert dict(server.asked) == {"busy": 3}
    assert [record.fate for record in again] == [Fate.KEPT, Fate.DEAD, Fate.UNUSABLE, Fate.FAILED]
    fetch(tmp_path, urls, retry_dead=True)
    assert set(server.asked) == {"busy", "gone", "page"}


def test_a_report_that_was_cut_off_is_gone_on_from(server: Server, tmp_path: Path) -> None:
    fetch(tmp_path, [server.url("gone"), server.url("good")])
    report = tmp_path / "report" / REPORT
    lines = report.read_text().splitlines(keepends=True)
    report.write_text(lines[0] + lines[1][:20])
    server.asked.clear()
    assert [record.fate for record in fetch(tmp_path, [server.url("gone"), server.url("good")])] == ["dead", "kept"]
    assert not server.asked


@pytest.mark.parametrize(
    "url", ["http://x/../../etc/passwd", "http://x/a\\..\\b.png", "http://x/%2e%2e/c.png", "http://x"]
)
def test_no_url_leads_out_of_the_image_folder(url: str) -> None:
    assert "/" not in image_path(url)
    assert ".." not in image_path(url)


def test_the_script_reports_dead_links_and_bad_lines(server: Server, tmp_path: Path) -> None:
    line = {
        "id": "1",
        "query": "q",
        "documents": ["d"],
        "images": [[server.url("good"), server.url("gone"), "local.png"]],
        "gt_clean_answer": "See ![x](IMG#1)",
        "category": ["a", "how-to"],
    }
    (tmp_path / "questions.jsonl").write_text(json.dumps(line) + "\n" + json.dumps({"id": "2"}) + "\n")
    asyncio.run(download(arguments(tmp_path, on_bad="quarantine")))
    report = tmp_path / "report"
    assert [record.url for record in read_records(report / "dead_links.jsonl", Download)] == [server.url("gone")]
    assert len(read_records(report / REPORT, Download)) == 2
    assert "line 2" in (report / "quarantine.jsonl").read_text()
