"""A teacher that misbehaves: faults are counted under their names and never stored as replies; money and batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from samrag.calls import Answer, Call, CallKind, Completion, Failure, FailureReason, Passage, Program, Reply
from samrag.engines.api import ApiBackend
from samrag.engines.base import Engine
from samrag.engines.batch import BatchRun
from samrag.engines.costs import Ledger, Price, Tokens
from samrag.engines.pending import Layer, PendingBackend
from samrag.engines.recorded import RecordedBackend, Store
from samrag.errors import UserError
from samrag.prompts import PromptStyle, render
from tests.faulty_server import Fault, FaultyServer, always, first_time, serving

CALLS = [Call(CallKind.ANSWER, f"Question {i}?", (Passage("T", f"text {i}"),)) for i in range(60)]
TEXTS = [render(call, PromptStyle.TEACHER).body for call in CALLS]
PRICE = Price(1.0, 2.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setattr("samrag.engines.api._FIRST_DELAY_S", 0.01)


def with_engine(server: FaultyServer, store: Path, work: Callable[[Engine], Any], **options: Any) -> tuple[Any, Engine]:
    """Run some work on an engine behind a store, against the served server."""

    async def run() -> tuple[Any, Engine]:
        backend = ApiBackend("m", server.url, image_root=store.parent, **options)
        kept = Store(store)
        engine = Engine(
            RecordedBackend(backend, kept, store.parent), PromptStyle.TEACHER, repairs=True, meter=backend.meter
        )
        try:
            return await work(engine), engine
        finally:
            await engine.close()
            kept.close()

    return asyncio.run(run())


def ask_all(server: FaultyServer, store: Path, **options: Any) -> tuple[list[Completion], Engine]:
    return with_engine(server, store, lambda engine: engine.complete(CALLS), **options)


def num_stored(path: Path) -> int:
    store = Store(path)
    try:
        return len(store)
    finally:
        store.close()


PASSING = [Fault.RATE_LIMITED, Fault.SERVER_ERROR, Fault.CUT_BODY, Fault.DROPPED, Fault.NOT_JSON, Fault.SLOW]
USABLE_AFTER_A_SECOND_TRY = [Fault.INVALID, Fault.LENGTH]


def test_a_third_of_the_replies_faulty_once_changes_no_reply_and_counts_each_fault(tmp_path: Path) -> None:
    rng = random.Random(0)
    faulty = rng.sample(TEXTS, 20)
    kinds = [*PASSING, *USABLE_AFTER_A_SECOND_TRY]
    faults = {text: kinds[i % len(kinds)] for i, text in enumerate(faulty)}
    with serving(FaultyServer()) as calm:
        undisturbed, _ = ask_all(calm, tmp_path / "calm.sqlite")
    with serving(FaultyServer(first_time(faults), slow_s=2.0)) as server:
        disturbed, engine = ask_all(server, tmp_path / "store.sqlite", timeout_s=1.0)
    for text, one, other in zip(TEXTS, undisturbed, disturbed, strict=True):
        assert isinstance(other.reply, Answer)
        if faults.get(text) not in USABLE_AFTER_A_SECOND_TRY:
            assert one.reply == other.reply
    counts = {fault: list(faults.values()).count(fault) for fault in kinds}
    assert engine.meter.second_tries == {
        FailureReason.INVALID_REPLY: counts[Fault.INVALID],
        FailureReason.LENGTH: counts[Fault.LENGTH],
    }
    assert sum(engine.meter.troubles.values()) == sum(counts[fault] for fault in PASSING)
    assert engine.meter.troubles["rate_limited"] == counts[Fault.RATE_LIMITED]
    assert engine.meter.troubles["server"] == counts[Fault.SERVER_ERROR]
    assert not engine.meter.failures


def test_what_stays_faulty_fails_under_its_name_and_a_second_run_asks_only_for_that(tmp_path: Path) -> None:
    faults = {
        TEXTS[0]: Fault.INVALID, TEXTS[1]: Fault.LENGTH, TEXTS[2]: Fault.REFUSAL, TEXTS[3]: Fault.SERVER_ERROR,
        TEXTS[4]: Fault.BAD_REQUEST,
    }  # fmt: skip
    path = tmp_path / "store.sqlite"
    with serving(FaultyServer(always(faults))) as server:
        done, engine = ask_all(server, path, max_attempts=2)
        reasons = [c.reply.reason for c in done[:5] if isinstance(c.reply, Failure)]
        assert reasons == [
            FailureReason.INVALID_REPLY, FailureReason.LENGTH, FailureReason.CONTENT_FILTER, FailureReason.SERVER,
            FailureReason.BAD_REQUEST,
        ]  # fmt: skip
        assert all(isinstance(c.reply, Answer) for c in done[5:])
        assert dict(engine.meter.failures) == dict.fromkeys(reasons, 1)
        asked = dict(server.asked)
        again, second = ask_all(server, path, max_attempts=2)
        assert [c.reply for c in again] == [c.reply for c in done]
        fresh = {text for text, count in server.asked.items() if count != asked.get(text, 0)}
        assert fresh <= {TEXTS[3], TEXTS[4]}  # a stored reply that cannot be used is not bought again
        assert second.meter.asked == 0


def test_the_key_is_nowhere_in_the_store(tmp_path: Path) -> None:
    with serving(FaultyServer()) as server:
        ask_all(server, tmp_path / "store.sqlite")
    assert all(b"sk-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_budget_stops_before_it_is_passed_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with serving(FaultyServer()) as server:
        each_usd = PRICE.cost_usd(Tokens(100, 20))
        budget = 0.006
        ledger = Ledger(PRICE, budget)
        with pytest.raises(UserError, match="budget_usd of"):
            ask_all(server, path, ledger=ledger, concurrency=4)
        answered = sum(server.answered.values())
        assert 0 < answered < len(CALLS)
        assert ledger.spent_usd == pytest.approx(answered * each_usd)
        assert ledger.spent_usd <= budget
        assert num_stored(path) == answered
        rest = Ledger(PRICE, 10.0)
        done, engine = ask_all(server, path, ledger=rest)
        assert all(isinstance(c.reply, Answer) for c in done)
        assert engine.meter.stored == answered
        assert max(server.answered.values()) == 1  # nothing was paid twice


def chain(number: int) -> Program[tuple[Reply, ...]]:
    """Two calls, the second made from the first one's reply, as a recipe's stages are."""
    (first,) = yield [CALLS[number]]
    if not isinstance(first, Answer):
        return (first,)
    (second,) = yield [Call(CallKind.ANSWER, f"And then, after {first.values[0]}?", (Passage("T", "x"),))]
    return (first, second)


def by_batches(
    server: FaultyServer, store_path: Path, num_programs: int, ledger: Ledger | None = None, **options: Any
) -> BatchRun:
    """Rounds of export, submit and import until nothing is left to ask."""

    async def run() -> BatchRun:
        backend = ApiBackend("m", server.url, image_root=store_path.parent, ledger=ledger)
        store = Store(store_path)
        batches = BatchRun(store_path.parent / "batches", backend, store, poll_s=0.01, **options)
        try:
            while await batches.settle():
                given_up = batches.failures
                pending = PendingBackend(backend.identity, store, store_path.parent, given_up)
                layer = Layer(pending, PromptStyle.TEACHER, backend.repairs)
                programs: Iterable[Program[Any]] = map(chain, range(num_programs))
                count = await batches.export(layer.wanted(programs))
                if not count and batches.failures == given_up:
                    return batches
            raise AssertionError("settle waits until all batches have ended")
        finally:
            await backend.close()
            store.close()

    return asyncio.run(run())


def online(server: FaultyServer, store_path: Path, num_programs: int) -> list[tuple[Reply, ...]]:
    async def work(engine: Engine) -> list[tuple[Reply, ...]]:
        results = []
        for number in range(num_programs):
            program, replies = chain(number), None
            while True:
                try:
                    calls = program.send(replies)  # type: ignore[arg-type]
                except StopIteration as end:
                    results.append(end.value)
                    break
                replies = [completion.reply for completion in await engine.complete(calls)]
        return results

    results, _ = with_engine(server, store_path, work)
    return list(results)


def test_batches_fill_the_store_so_that_the_online_run_asks_nothing(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    with serving(FaultyServer()) as server:
        expected = online(server, tmp_path / "calm" / "store.sqlite", 10)
    with serving(FaultyServer()) as server:
        by_batches(server, tmp_path / "store.sqlite", 10)
        assert len(server.batches) == 2  # one a layer
        assert not server.bodies
        assert online(server, tmp_path / "store.sqlite", 10) == expected
        assert not server.bodies


def test_batch_files_are_split_by_count_and_by_bytes(tmp_path: Path) -> None:
    with serving(FaultyServer()) as server:
        by_batches(server, tmp_path / "store.sqlite", 10, max_requests=4)
        assert [len(server.files[b["input_file_id"]].splitlines()) for b in server.batches.values()] == [4, 4, 2] * 2
    (tmp_path / "small").mkdir()
    with serving(FaultyServer()) as server:
        by_batches(server, tmp_path / "small" / "store.sqlite", 10, max_bytes=9000)
        sizes = [len(server.files[b["input_file_id"]]) for b in server.batches.values()]
        assert len(sizes) > 4
        assert max(sizes) <= 9000


def test_missing_duplicate_unknown_and_expired_lines_lose_and_double_nothing(tmp_path: Path) -> None:
    faults = {TEXTS[0]: Fault.MISSING, TEXTS[1]: Fault.DUPLICATE, TEXTS[2]: Fault.UNKNOWN, TEXTS[3]: Fault.SERVER_ERROR}
    with serving(FaultyServer(first_time(faults), expire=True)) as server:
        batches = by_batches(server, tmp_path / "store.sqlite", 8)
        assert num_stored(tmp_path / "store.sqlite") == 16
        assert batches.counts["answered"] == 16
        assert batches.counts["batch_expired"] >= 4
        assert batches.counts["batch_unknown"] + batches.counts["batch_duplicate"] >= 1
        assert not batches.failures
        online(server, tmp_path / "store.sqlite", 8)
        assert not server.bodies


def test_a_request_that_no_batch_answers_is_given_up_after_three_and_its_program_ends(tmp_path: Path) -> None:
    with serving(FaultyServer(always({TEXTS[0]: Fault.MISSING, TEXTS[1]: Fault.BAD_REQUEST}))) as server:
        batches = by_batches(server, tmp_path / "store.sqlite", 4)
        assert server.asked[TEXTS[0]] == 3
        assert server.asked[TEXTS[1]] == 1
        assert sorted(failure.reason for failure in batches.failures.values()) == ["bad_request", "server"]
        assert num_stored(tmp_path / "store.sqlite") == 4


def test_a_run_cut_short_after_submitting_goes_on_with_the_same_batch(tmp_path: Path) -> None:
    with serving(FaultyServer(polls=3)) as server:

        async def begin() -> None:
            backend = ApiBackend("m", server.url, image_root=tmp_path)
            store = Store(tmp_path / "store.sqlite")
            batches = BatchRun(tmp_path / "batches", backend, store, poll_s=0.01)
            pending = PendingBackend(backend.identity, store, tmp_path)
            await batches.export(Layer(pending, PromptStyle.TEACHER).wanted(map(chain, range(3))))
            assert not await batches.settle(wait=False)
            await backend.close()
            store.close()

        asyncio.run(begin())
        assert len(server.batches) == 1
        by_batches(server, tmp_path / "store.sqlite", 3)
        assert len(server.batches) == 2  # the first layer's was not submitted again
        assert num_stored(tmp_path / "store.sqlite") == 6


def test_a_run_cut_short_between_a_batch_and_its_id_adopts_the_batch(tmp_path: Path) -> None:
    with serving(FaultyServer()) as server:

        async def begin() -> None:
            backend = ApiBackend("m", server.url, image_root=tmp_path)
            store = Store(tmp_path / "store.sqlite")
            batches = BatchRun(tmp_path / "batches", backend, store)
            pending = PendingBackend(backend.identity, store, tmp_path)
            await batches.export(Layer(pending, PromptStyle.TEACHER).wanted(map(chain, range(3))))
            await batches.settle(wait=False)
            batches.state.parts[0].batch_id = ""
            batches._save()
            await backend.close()
            store.close()

        server.polls = 2
        asyncio.run(begin())
        by_batches(server, tmp_path / "store.sqlite", 3)
        assert len(server.batches) == 2  # one a layer


def test_a_refused_key_in_a_batch_stops_after_its_replies_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with serving(FaultyServer(first_time({TEXTS[1]: Fault.BAD_KEY}))) as server:
        with pytest.raises(UserError, match=r"401.*run the same command again"):
            by_batches(server, path, 4)
        assert num_stored(path) == 3
        by_batches(server, path, 4)
        assert num_stored(path) == 8
        assert max(server.answered.values()) == 1


def test_a_batch_that_may_pass_the_budget_is_not_submitted(tmp_path: Path) -> None:
    with serving(FaultyServer()) as server:
        ledger = Ledger(PRICE, 0.006)  # a file of two requests may cost about half of it
        with pytest.raises(UserError, match=r"budget_usd of.*in a batch"):
            by_batches(server, tmp_path / "store.sqlite", 40, ledger=ledger, max_requests=2)
        answered = sum(server.answered.values())
        spent = 0.5 * answered * PRICE.cost_usd(Tokens(100, 20))
        assert 0 < answered < 80  # two calls a program
        assert spent <= 0.006
        assert num_stored(tmp_path / "store.sqlite") == answered


def test_a_folder_of_another_models_batches_is_refused(tmp_path: Path) -> None:
    with serving(FaultyServer()) as server:
        by_batches(server, tmp_path / "store.sqlite", 1)
    store = Store(tmp_path / "other.sqlite")
    try:
        with pytest.raises(UserError, match="give another batch_dir"):
            BatchRun(tmp_path / "batches", ApiBackend("other", "http://x/v1", image_root=tmp_path), store)
    finally:
        store.close()
