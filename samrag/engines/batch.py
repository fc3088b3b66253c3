"""The batch endpoint: requests by file, replies within a day, at half the price, into the same store as online.

A folder holds the state of a stage's batches, written before anything is sent and after each step, so that a run that
was cut short goes on where it was: input files, their ids, the batches' ids, which key each line stands for. A line's
`custom_id` is the store's key of its request. Nothing is assumed about a result file: lines come in any order, twice,
not at all, or for ids that were never sent. What got no reply goes back to the queue, three times at most.

Left out: cancelling a batch, and deleting files on the server (OpenAI lets them expire).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from samrag.calls import Failure, FailureReason
from samrag.engines.api import ApiBackend
from samrag.engines.base import RawReply
from samrag.engines.chat import billed, read_completion
from samrag.engines.costs import BATCH_SHARE, Tokens, most_tokens
from samrag.engines.limits import Clock, SystemClock
from samrag.engines.pending import Wanted
from samrag.engines.recorded import Entry, Store, storable
from samrag.errors import UserError
from samrag.files import read_json, write_json

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

_ENDPOINT: Final = "/v1/chat/completions"
_ENDED = ("completed", "failed", "expired", "cancelled")
_QUEUE_FULL = "token_limit_exceeded"
_MAX_TIMES = 3  # batches that one request goes through, at most
_CHUNK = 500  # replies stored in one commit
_FATAL = (401, 402, 403, 404)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Part:
    """One input file and its batch."""

    name: str
    num_requests: int
    most_usd: float
    """The most it may cost."""
    input_file_id: str = ""
    batch_id: str = ""


@dataclass(slots=True)
class State:
    """Everything a run needs to go on."""

    identity: str
    """Model and format of all requests; another one needs another folder."""
    round: int = 0
    parts: list[Part] = field(default_factory=list)
    """Parts that are not imported."""
    times: dict[str, int] = field(default_factory=dict)
    """By key, batches that ended without a reply to it."""
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By key, reason and detail of requests that were given up."""
    spent_usd: float = 0.0


class _PartFile:
    """An input file that grows line by line, and beside it what the store needs to know of each line."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.num_requests = self.num_bytes = 0
        self.most_usd = 0.0
        self._lines: IO[bytes] = (folder / f"{name}.jsonl").open("wb")
        self._requests: IO[bytes] = (folder / f"{name}.requests.jsonl").open("wb")

    def add(self, line: bytes, wanted: Wanted, most_usd: float) -> None:
        self._lines.write(line)
        known = {
            "custom_id": wanted.key,
            "kind": str(wanted.request.kind),
            "request": wanted.canonical,
            "instruction": wanted.request.prompt.instruction,
        }
        self._requests.write(json.dumps(known).encode() + b"\n")
        self.num_requests += 1
        self.num_bytes += len(line)
        self.most_usd += most_usd

    def close(self) -> Part:
        self._lines.close()
        self._requests.close()
        return Part(self.name, self.num_requests, self.most_usd)


class BatchRun:
    """The batches of one stage, in one folder."""

    def __init__(
        self,
        folder: Path,
        backend: ApiBackend,
        store: Store,
        *,
        max_requests: int = 50_000,
        max_bytes: int = 200_000_000,
        poll_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        """Open the folder, or begin it.

        Args:
            folder: Where the state lies; one stage and teacher each.
            backend: Model, format, client, and the ledger that holds the budget.
            store: Where replies go.
            max_requests: Requests in a file, at most.
            max_bytes: Bytes in a file, at most.
            poll_s: Between two looks at a batch.
            clock: For waiting; the machine's own by default.

        Raises:
            UserError: the folder holds batches of another model or format.
        """
        self.folder = Path(folder)
        self.backend = backend
        self.store = store
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.poll_s = poll_s
        self.clock = clock or SystemClock()
        self.counts: Counter[str] = Counter()
        """What the imported lines were."""
        self._fatal = ""  # what would spoil every further batch; told once this one's replies are safe
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / "state.json"
        self.state = self._read() if self._path.exists() else State(backend.identity)
        if self.state.identity != backend.identity:
            raise UserError(
                f"{self.folder} holds batches of {self.state.identity!r}, not {backend.identity!r}; give another"
                " batch_dir, or the former settings."
            )

    def _read(self) -> State:
        value = read_json(self._path)
        try:
            known = {f.name: value[f.name] for f in fields(State)}
            return State(**{**known, "parts": [Part(**part) for part in value["parts"]]})
        except (KeyError, TypeError) as error:
            raise UserError(f"{self._path} is no state of batches ({error}); give another batch_dir.") from error

    def _save(self) -> None:
        write_json(self._path, asdict(self.state))

    @property
    def failures(self) -> dict[str, Failure]:
        """By key, requests that were given up: their programs go on without a reply."""
        return {key: Failure(FailureReason(reason), detail) for key, (reason, detail) in self.state.failed.items()}

    async def export(self, wanted: AsyncIterator[Wanted]) -> int:
        """Write requests to input files; returns how many. Only when no part is open.

        Raises:
            UserError: a single request is larger than a file may be.
        """
        assert not self.state.parts, "parts are open"
        self.state.round += 1
        parts: list[Part] = []
        current: _PartFile | None = None
        async for item in wanted:
            body = await self.backend.body(item.request)
            if isinstance(body, Failure):
                self.state.failed[item.key] = (body.reason, body.detail)
                continue
            line = {"custom_id": item.key, "method": "POST", "url": _ENDPOINT, "body": body}
            data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if len(data) > self.max_bytes:
                raise UserError(
                    f"one request has {len(data):,} bytes, and a batch file may have {self.max_bytes:,};"
                    " lower max_image_px."
                )
            full = current and (
                current.num_requests >= self.max_requests or current.num_bytes + len(data) > self.max_bytes
            )
            if current is None or full:
                parts += [current.close()] if current else []
                current = _PartFile(self.folder, f"{self.state.round:04}-{len(parts):03}")
            current.add(data, item, self._most_usd(item))
        parts += [current.close()] if current else []
        self.state.parts = parts
        self._save()
        return sum(part.num_requests for part in parts)

    def _most_usd(self, item: Wanted) -> float:
        price = self.backend.ledger.price
        if price is None:
            return 0.0
        tokens = Tokens(most_tokens(item.request, price, self.backend.max_image_px), item.request.sampling.max_tokens)
        return price.cost_usd(tokens) * BATCH_SHARE

    async def settle(self, wait: bool = True) -> bool:
        """Submit what is not submitted, look at what is, import what has ended; returns whether all has.

        Args:
            wait: Look again and again until all batches have ended; otherwise once.

        Raises:
            UserError: the server refuses a batch, or the budget does not hold the next one.
        """
        while self.state.parts:
            before = len(self.state.parts)
            for part in self.state.parts:
                if not part.batch_id and self._affordable(part):
                    await self._submit(part)
            for part in [part for part in self.state.parts if part.batch_id]:
                batch = await self._told(self._client().batches.retrieve(part.batch_id))
                if batch.status in _ENDED:
                    await self._end(part, batch)
            if not wait:
                break
            if len(self.state.parts) == before:
                await self.clock.sleep(self.poll_s)
        return not self.state.parts

    def _client(self) -> openai.AsyncOpenAI:
        return self.backend.connect()

    async def _told(self, asked: Any) -> Any:
        """The client's answer; its errors in one sentence."""
        import openai

        try:
            return await asked
        except (openai.APIStatusError, openai.APIConnectionError) as error:
            said = self.backend.plain(error)
            raise UserError(
                f"the batch endpoint at {self.backend.base_url}: {said}; nothing is lost, run the same command again."
            ) from None

    def _affordable(self, part: Part) -> bool:
        """Whether the budget holds a part beside those under way; False: wait for them."""
        budget = self.backend.ledger.budget_usd
        if budget is None:
            return True
        under_way = sum(other.most_usd for other in self.state.parts if other.batch_id)
        if self.state.spent_usd + under_way + part.most_usd <= budget:
            return True
        if under_way:
            return False
        raise UserError(
            f"budget_usd of ${budget:,.2f}: ${self.state.spent_usd:,.4f} is spent, and the next {part.num_requests:,}"
            f" requests may cost ${part.most_usd:,.4f} in a batch; raise budget_usd and run the same command again."
        )

    async def _submit(self, part: Part) -> None:
        client = self._client()
        if not part.input_file_id:
            with (self.folder / f"{part.name}.jsonl").open("rb") as handle:
                uploaded = await self._told(client.files.create(file=(f"{part.name}.jsonl", handle), purpose="batch"))
            part.input_file_id = uploaded.id
            self._save()
        else:  # a run may have been cut short between the batch and its id
            listed = await self._told(client.batches.list(limit=100))
            mine = [b for b in listed.data if b.input_file_id == part.input_file_id and b.status != "failed"]
            part.batch_id = mine[0].id if mine else ""
        if not part.batch_id:
            batch = await self._told(
                client.batches.create(input_file_id=part.input_file_id, endpoint=_ENDPOINT, completion_window="24h")
            )
            part.batch_id = batch.id
        self._save()
        log.info("%s: %d requests are in batch %s", part.name, part.num_requests, part.batch_id)

    async def _end(self, part: Part, batch: Batch) -> None:
        """Import what a batch that has ended brought, and close its part."""
        if batch.status == "failed":
            first = batch.errors.data[0] if batch.errors and batch.errors.data else None
            part.batch_id = ""
            self._save()
            if first is not None and first.code == _QUEUE_FULL and any(p.batch_id for p in self.state.parts):
                return  # again, when another one has ended
            said = first.message if first else "no reason given"
            raise UserError(f"{self.backend.base_url} refused the batch of {part.name}: {said}")
        places = self._places(part)
        answered: set[str] = set()
        gone: set[str] = set()
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                await self._import(part, file_id, places, answered, gone)
        self._requeue(places.keys() - answered - gone, batch.status)
        self.state.parts.remove(part)
        self._save()
        for path in self.folder.glob(f"{part.name}.*"):
            path.unlink()
        log.info("%s: %d of %d requests have their reply", part.name, len(answered), part.num_requests)
        if self._fatal:
            raise UserError(f"{self._fatal}; what was answered is stored, mend this and run the same command again.")

    def _requeue(self, keys: set[str], status: str) -> None:
        name = "batch_expired" if status == "expired" else "batch_missing"
        for key in keys:
            self.counts[name] += 1
            self.state.times[key] = self.state.times.get(key, 0) + 1
            if self.state.times[key] >= _MAX_TIMES:
                self.state.failed[key] = (FailureReason.SERVER, f"no reply in {_MAX_TIMES} batches")

    def _places(self, part: Part) -> dict[str, int]:
        """By key, where its line begins in the part's file of requests."""
        places, place = {}, 0
        with (self.folder / f"{part.name}.requests.jsonl").open("rb") as handle:
            for line in handle:
                places[json.loads(line)["custom_id"]] = place
                place += len(line)
        return places

    async def _import(
        self, part: Part, file_id: str, places: Mapping[str, int], answered: set[str], gone: set[str]
    ) -> None:
        """Read one result file into the store; `answered` and `gone` (given up) grow."""
        entries: list[Entry] = []
        spent_usd = 0.0
        path = self.folder / f"{part.name}.{len(answered)}.results.jsonl"
        await self._told(self._download(file_id, path))
        with path.open("rb") as results, (self.folder / f"{part.name}.requests.jsonl").open("rb") as requests:
            for text in results:
                line = self._line(text)
                key = str(line.get("custom_id"))
                if key not in places:
                    self.counts["batch_unknown"] += 1
                    log.warning("%s: a reply for the id %.80r, which was never sent; left out", part.name, key)
                    continue
                if key in answered:
                    self.counts["batch_duplicate"] += 1
                    continue
                reply, tokens = self._reply(line)
                spent_usd += self._cost_usd(tokens)
                if isinstance(reply, RawReply):
                    requests.seek(places[key])
                    known = json.loads(requests.readline())
                    entries.append(
                        Entry(key, known["kind"], self.state.identity, known["request"], storable(reply),
                              known["instruction"])
                    )  # fmt: skip
                    answered.add(key)
                    self.counts["answered"] += 1
                elif reply is not None:
                    gone.add(key)
                    self.state.failed[key] = (reply.reason, reply.detail)
                    self.counts[reply.reason] += 1
                if len(entries) >= _CHUNK:
                    await self.store.put(entries)
                    entries = []
        await self.store.put(entries)
        self.state.spent_usd += spent_usd

    async def _download(self, file_id: str, path: Path) -> None:
        async with self._client().files.with_streaming_response.content(file_id) as response:
            await response.stream_to_file(path)

    @staticmethod
    def _line(text: bytes) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError:
            return {}
        return line if isinstance(line, dict) else {}

    def _reply(self, line: Mapping[str, Any]) -> tuple[RawReply | Failure | None, Tokens]:
        """A line's reply, or why there is none for good; None: again in another batch."""
        response = line.get("response")
        response = response if isinstance(response, Mapping) else {}
        status, body = response.get("status_code"), response.get("body")
        body = body if isinstance(body, Mapping) else {}
        if status == 200:
            reply = read_completion(body)
            return (reply if isinstance(reply, RawReply) else None), billed(body)
        error = body.get("error") or line.get("error")
        error = error if isinstance(error, Mapping) else {}
        said = self.backend.plain(f"{error.get('message') or error.get('code') or 'no reason given'}")
        if status in _FATAL:
            self._fatal = f"{self.backend.base_url} refused a request of a batch ({status}): {said}"
            return None, Tokens()
        if isinstance(status, int) and 400 <= status < 500 and status not in (408, 409, 429):
            reasons = {"content_filter": FailureReason.CONTENT_FILTER,
                       "context_length_exceeded": FailureReason.TOO_LONG}  # fmt: skip
            return Failure(reasons.get(str(error.get("code")), FailureReason.BAD_REQUEST), said), Tokens()
        return None, Tokens()

    def _cost_usd(self, tokens: Tokens) -> float:
        price = self.backend.ledger.price
        return price.cost_usd(tokens) * BATCH_SHARE if price else 0.0
