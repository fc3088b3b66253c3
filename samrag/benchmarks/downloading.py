"""Images from their URLs: each once, tried again where that can help, checked, and a fate for every one.

A file is put in its place when it is whole and can be read, so what is there need not be fetched again; links that are
dead stay so in the report, and a later run does not ask for them. A run that was cut short goes on where it stopped.

Left out: going on within a file, since images are small; and other widths of an image than its URL asks for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from samrag.arguments import DownloadArguments
from samrag.benchmarks.rag_igbench import image_path
from samrag.files import append_record, drop_cut_line, read_records, replacing, within, write_records
from samrag.images import IMAGE_ERRORS, read_image
from samrag.progress import progress

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

REPORT = "downloads.jsonl"
MAX_WAIT_S = 60.0
"""Longest pause before another attempt, whatever the server asks for."""
_MAX_REDIRECTS = 5
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class Fate(StrEnum):
    """What became of a URL."""

    FETCHED = "fetched"
    KEPT = "kept"  # its file was there
    DEAD = "dead"  # the server does not give it, or it is no address
    UNUSABLE = "unusable"  # what came is too large, or no image that can be read
    FAILED = "failed"  # no attempt came to an end; the next run tries again


@dataclass(frozen=True, slots=True)
class Download:
    """One URL of the report."""

    url: str
    image: str
    """Path below the image folder."""
    fate: Fate
    detail: str = ""
    """Why there is no image."""
    attempts: int = 0

    @property
    def has_image(self) -> bool:
        """Whether the image is there now."""
        return self.fate in (Fate.FETCHED, Fate.KEPT)


class _TryAgainError(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s
        """Pause that the server asked for."""


async def download_images(urls: Sequence[str], arguments: DownloadArguments) -> list[Download]:
    """Fetch images into the image folder; the report is `downloads.jsonl` in the output folder.

    Args:
        urls: where the images are; each is asked for once.
        arguments: see `DownloadArguments`.

    Returns:
        One record for each distinct URL, in order.
    """
    import httpx

    report = Path(arguments.output_dir) / REPORT
    distinct = list(dict.fromkeys(urls))
    done = _known(distinct, report, arguments)
    pending = [url for url in distinct if url not in done]
    room = asyncio.Semaphore(arguments.concurrency)
    limits = httpx.Limits(max_connections=arguments.concurrency)
    async with httpx.AsyncClient(
        timeout=arguments.timeout_s, limits=limits, follow_redirects=True, max_redirects=_MAX_REDIRECTS
    ) as client:

        async def one(url: str) -> Download:
            async with room:
                return await _download(url, client, arguments)

        tasks = [asyncio.create_task(one(url)) for url in pending]
        try:
            with progress("downloading", len(distinct), len(done)) as advance:
                for task in asyncio.as_completed(tasks):
                    record = await task
                    append_record(report, record)
                    done[record.url] = record
                    advance()
        finally:
            for task in tasks:
                task.cancel()
    records = [done[url] for url in distinct]
    write_records(report, records)
    return records


def _known(urls: Sequence[str], report: Path, arguments: DownloadArguments) -> dict[str, Download]:
    """URLs that need no request: their file is there, or a former run found that they have none."""
    drop_cut_line(report)
    former: Mapping[str, Download] = {}
    if report.exists():
        former = {record.url: record for record in read_records(report, Download, allow_empty=True)}
    known = {}
    for url in urls:
        if within(Path(arguments.image_root), image_path(url)).is_file():
            known[url] = Download(url, image_path(url), Fate.KEPT)
        elif url in former and former[url].fate in (Fate.DEAD, Fate.UNUSABLE) and not arguments.retry_dead:
            known[url] = former[url]
    return known


async def _download(url: str, client: httpx.AsyncClient, arguments: DownloadArguments) -> Download:
    """Try a URL until it has a fate."""
    record = Download(url, image_path(url), Fate.FAILED)
    for attempt in range(1, arguments.max_attempts + 1):
        wait_s = arguments.backoff_s * 2 ** (attempt - 1)
        try:
            fate, detail = await _attempt(url, client, arguments)
            return replace(record, fate=fate, detail=detail, attempts=attempt)
        except _TryAgainError as error:
            record = replace(record, detail=str(error), attempts=attempt)
            wait_s = max(wait_s, error.wait_s)
        if attempt < arguments.max_attempts:
            await asyncio.sleep(min(wait_s, MAX_WAIT_S))
    return record


async def _attempt(url: str, client: httpx.AsyncClient, arguments: DownloadArguments) -> tuple[Fate, str]:
    """One request; the image is in its place when it is fetched.

    Raises:
        _TryAgainError: another attempt may succeed.
    """
    import httpx

    path = within(Path(arguments.image_root), image_path(url))
    try:
        async with client.stream("GET", url) as response:
            if response.status_code in _BUSY:
                raise _TryAgainError(f"HTTP {response.status_code}", _asked_wait(response.headers.get("retry-after")))
            if response.status_code != httpx.codes.OK:
                return Fate.DEAD, f"HTTP {response.status_code}"
            with replacing(path) as temporary:
                problem = await _receive(response, temporary, round(arguments.max_file_mb * 1e6))
                if problem:
                    raise _UnusableError(problem)
            return Fate.FETCHED, ""
    except _UnusableError as error:
        return Fate.UNUSABLE, str(error)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.TooManyRedirects) as error:
        return Fate.DEAD, f"{type(error).__name__}: {error}"
    except httpx.HTTPError as error:
        raise _TryAgainError(f"{type(error).__name__}: {error}") from error


class _UnusableError(Exception):
    """What came is no image that can be kept."""


async def _receive(response: httpx.Response, path: Path, max_bytes: int) -> str:
    """Write a body to a file and look at it; what is wrong with it, or nothing."""
    size = 0
    with path.open("wb") as handle:
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            if size > max_bytes:
                return f"it is larger than {max_bytes / 1e6:g} MB"
            handle.write(chunk)
    try:
        await asyncio.to_thread(read_image, path)
    except IMAGE_ERRORS as error:
        kind = response.headers.get("content-type", "no type")
        return f"{size:,} bytes of {kind} are no image: {str(error).replace(str(path), 'it')}"
    return ""


def _asked_wait(header: str | None) -> float:
    """Seconds of a Retry-After header; a date is not read."""
    return float(header) if header and header.isascii() and header.isdigit() and len(header) < 6 else 0.0
