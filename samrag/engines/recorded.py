"""A backend behind a store: every reply is paid for once.

The store is one SQLite file, keyed by the content of the single call, so an edited run asks only what is new. A raw
reply is committed before anyone sees it; parsing comes after, and can be redone for free. Failures are not stored: the
next run asks again. A request that was sent is waited for and stored even when whoever asked has gone: it is paid for.

Left out: eviction, and a lock against two processes that ask the same thing at the same time (both pay, the first
reply stays).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from samrag.calls import Failure, FailureReason
from samrag.engines.base import Backend, RawReply, Request
from samrag.errors import UserError
from samrag.files import sha256, within

_APPLICATION_ID = 0x53524147  # "SRAG": the file is ours
_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS replies (
        key TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, model TEXT NOT NULL, request TEXT NOT NULL, text TEXT NOT NULL,
        finish_reason TEXT NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
        created TEXT NOT NULL, probability REAL
    )
    """,
    "CREATE TABLE IF NOT EXISTS instructions (digest TEXT NOT NULL UNIQUE, text TEXT NOT NULL)",
)
_MAX_VARIABLES = 900  # below SQLite's oldest limit on the variables of a statement
_WAL_PAGES = 16_000  # rows are written once more when the log is folded into the file; seldom, so 64 MB at a time


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as the store knows it, with its reply."""

    key: str
    kind: str
    model: str
    request: str
    """Canonical JSON of everything the key covers; the image by its digest, and so the instruction."""
    reply: RawReply
    instruction: str
    """The instruction's text: many requests share one, so the store keeps it once."""


class Store:
    """Replies by key, in one SQLite file.

    Commits are synced to disk (`synchronous=FULL`) by one writer thread. What arrives while it is busy goes into the
    next commit together, so many callers with one reply each do not pay a sync each.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            self._writer = self._connect()
            self._reader = self._connect()  # its own connection: reads do not wait for a commit
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="samrag-store")
        self._lock = threading.Lock()
        self._waiting: list[Entry] = []
        self._next_commit: Future[None] | None = None

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
        try:
            application_id = connection.execute("PRAGMA application_id").fetchone()[0]
            tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if tables and application_id != _APPLICATION_ID:
                raise UserError(f"{self.path} is a database of another program; give another path for the store.")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            if not tables:
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            for table in _SCHEMA:
                connection.execute(table)
            if "probability" not in {column[1] for column in connection.execute("PRAGMA table_info(replies)")}:
                connection.execute("ALTER TABLE replies ADD COLUMN probability REAL")  # a store of an older version
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(f"{self.path}: {error}; check space, permissions and other users of the file.") from error
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{self.path} is not a usable reply store ({error}); move it away to begin anew, or save what can be"
                f" read of it with `sqlite3 {self.path} .recover`."
            ) from error

    def get(self, keys: Sequence[str]) -> dict[str, RawReply]:
        """The replies that are known, marked as cached."""
        found: dict[str, RawReply] = {}
        columns = "key, text, finish_reason, input_tokens, output_tokens, probability"
        with self._explained():
            for start in range(0, len(keys), _MAX_VARIABLES):
                part = keys[start : start + _MAX_VARIABLES]
                marks = ",".join("?" * len(part))
                query = f"SELECT {columns} FROM replies WHERE key IN ({marks})"
                for key, text, finish_reason, num_in, num_out, probability in self._reader.execute(query, part):
                    found[key] = RawReply(text, finish_reason, num_in, num_out, probability, cached=True)
        return found

    async def put(self, entries: Sequence[Entry]) -> None:
        """Store replies; returns when they are on the disk. A key that is there already keeps its reply."""
        if not entries:
            return
        with self._lock:
            self._waiting.extend(entries)
            if self._next_commit is None:
                self._next_commit = self._executor.submit(self._commit)
            commit = self._next_commit
        # Shielded: a cancelled caller must not take the others' commit with it.
        await asyncio.shield(asyncio.wrap_future(commit))

    def _commit(self) -> None:
        with self._lock:
            entries, self._waiting, self._next_commit = self._waiting, [], None
        created = datetime.now(UTC).isoformat(timespec="seconds")
        rows = [
            (e.key, e.kind, e.model, e.request, e.reply.text, e.reply.finish_reason, e.reply.input_tokens,
             e.reply.output_tokens, created, e.reply.probability)
            for e in entries
        ]  # fmt: skip
        instructions = {(_digest(e.instruction), e.instruction.encode("utf-8", "replace").decode()) for e in entries}
        with self._explained():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                self._writer.executemany("INSERT OR IGNORE INTO instructions VALUES (?,?)", sorted(instructions))
                self._writer.executemany("INSERT OR IGNORE INTO replies VALUES (?,?,?,?,?,?,?,?,?,?)", rows)
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def __len__(self) -> int:
        with self._explained():
            return int(self._reader.execute("SELECT count(*) FROM replies").fetchone()[0])

    def close(self) -> None:
        """Finish the commits under way and close the file."""
        self._executor.shutdown(wait=True)
        self._reader.close()
        self._writer.close()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def storable(reply: RawReply) -> RawReply:
    """The reply without lone surrogates, which no file can hold: what is returned is what a later run will read."""
    return replace(reply, text=reply.text.encode("utf-8", "replace").decode())


class Keys:
    """Names requests by their content."""

    def __init__(self, identity: str, image_root: Path) -> None:
        """Keep what requests do not hold.

        Args:
            identity: Of the backend that answers.
            image_root: Folder that image paths are relative to.
        """
        self.identity = identity
        self.image_root = Path(image_root)
        self._digests: dict[tuple[Path, int, int], str] = {}

    def describe(self, request: Request) -> tuple[str, str] | Failure:
        """Key and canonical JSON of a request, or why it cannot be asked."""
        image = None
        if request.prompt.image:
            try:
                image = self._image_digest(within(self.image_root, request.prompt.image))
            except OSError as error:
                return Failure(FailureReason.BAD_IMAGE, f"{request.prompt.image}: {error.strerror or error}")
        content = {
            "model": self.identity,
            "kind": str(request.kind),
            "instruction": _digest(request.prompt.instruction),
            "body": request.prompt.body,
            "image": image,
            "sampling": asdict(request.sampling),
            "sample_index": request.sample_index,
            "template": request.template,
        }
        if request.repair is not None:
            content["repair"] = asdict(request.repair)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest(), canonical

    def _image_digest(self, path: Path) -> str:
        status = path.stat()
        version = (path, status.st_mtime_ns, status.st_size)
        if version not in self._digests:
            self._digests[version] = sha256(path)
        return self._digests[version]


class RecordedBackend:
    """Answers from a store what it knows, asks `inner` for the rest, and stores that before returning it.

    An `inner` with a true `answers_singly` attribute is given one request at a time, so each of its replies is safe
    as soon as it arrives; any other gets its requests as one batch.
    """

    def __init__(self, inner: Backend, store: Store, image_root: Path) -> None:
        self.inner = inner
        self.store = store
        self._singly = bool(getattr(inner, "answers_singly", False))
        self._keys = Keys(inner.identity, image_root)
        self._in_flight: dict[str, asyncio.Task[dict[str, RawReply | Failure]]] = {}

    @property
    def identity(self) -> str:
        """That of the inner backend: a stored reply is its reply."""
        return self.inner.identity

    def key(self, request: Request) -> str:
        """The store's key of a request; empty when its image cannot be read, since then nothing is stored."""
        description = self._keys.describe(request)
        return "" if isinstance(description, Failure) else description[0]

    def known(self, request: Request) -> RawReply | None:
        """The stored reply, if there is one; nothing is asked."""
        key = self.key(request)
        return self.store.get([key]).get(key)

    async def close(self) -> None:
        """Close the inner backend, store what it had still been asked, and close the store."""
        tasks = list(self._in_flight.values())
        if not self._singly:  # a batch is no one's any more, and may take long
            for task in tasks:
                task.cancel()
        await self.inner.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Answer requests, in order; equal requests, here or in flight elsewhere, are asked once."""
        described = [self._keys.describe(request) for request in requests]
        wanted = {
            description[0]: (request, description[1])
            for request, description in zip(requests, described, strict=True)
            if not isinstance(description, Failure)
        }
        replies: dict[str, RawReply | Failure] = dict(self.store.get(list(wanted)))
        unknown = {key: value for key, value in wanted.items() if key not in replies}
        asked_here = unknown.keys() - self._in_flight.keys()
        self._start({key: value for key, value in unknown.items() if key in asked_here})
        tasks = {id(task): task for task in (self._in_flight[key] for key in unknown)}
        # Shielded: a caller that is cancelled leaves, the request goes on.
        for answers in await asyncio.gather(*map(asyncio.shield, tasks.values())):
            replies.update(answers)
        return [self._pick(description, replies, asked_here) for description in described]

    @staticmethod
    def _pick(
        description: tuple[str, str] | Failure, replies: dict[str, RawReply | Failure], asked_here: set[str]
    ) -> RawReply | Failure:
        """A request's reply; of equal requests only the first that asked has paid for it."""
        if isinstance(description, Failure):
            return description
        key = description[0]
        reply = replies[key]
        if key in asked_here:
            asked_here.remove(key)
        elif isinstance(reply, RawReply) and not reply.cached:
            return replace(reply, cached=True)
        return reply

    def _start(self, wanted: dict[str, tuple[Request, str]]) -> None:
        """Ask the inner backend, in tasks of their own."""
        groups = [{key: value} for key, value in wanted.items()] if self._singly else [wanted] if wanted else []
        for group in groups:
            task = asyncio.create_task(self._ask(group))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if by nobody else
            self._in_flight.update(dict.fromkeys(group, task))

    async def _ask(self, wanted: dict[str, tuple[Request, str]]) -> dict[str, RawReply | Failure]:
        """Ask the inner backend and store what it says."""
        try:
            asked = await self.inner.generate([request for request, _ in wanted.values()])
            replies = [storable(reply) if isinstance(reply, RawReply) else reply for reply in asked]
            await self.store.put(
                [
                    Entry(key, str(request.kind), self.inner.identity, canonical, reply, request.prompt.instruction)
                    for (key, (request, canonical)), reply in zip(wanted.items(), replies, strict=True)
                    if isinstance(reply, RawReply)
                ]
            )
            return dict(zip(wanted, replies, strict=True))
        finally:
            for key in wanted:
                self._in_flight.pop(key, None)
