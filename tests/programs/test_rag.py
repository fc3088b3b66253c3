"""Conventional RAG with scripted replies."""

from __future__ import annotations

from typing import Any

import pytest

from samrag.calls import CallKind, Failure, FailureReason, Passage
from samrag.programs.rag import RagOptions, rag
from samrag.schedule import Schedule, run_all
from samrag.schema import Document, ExitReason, Question, Trace
from tests.programs.scripted import (
    BROKEN,
    Played,
    ScriptedEngine,
    by_rules,
    hashed,
    image,
    mixed,
    play,
    shown_titles,
    text,
    texts,
)

QUESTION = Question("q", "Who?", ("a",), "TextQ", "dev")


def solve(documents: list[Document], rules: dict[str, Any] | None = None, **options: Any) -> Played[Trace]:
    return play(rag(QUESTION, documents, RagOptions(**options)), by_rules(**(rules or {})))


@pytest.mark.parametrize(("count", "k"), [(12, 8), (3, 8), (8, 8), (5, 1)])
def test_one_answer_from_the_k_best_documents(count: int, k: int) -> None:
    played = solve(texts(count), k=k)
    (call,) = played.calls
    assert call.kind is CallKind.ANSWER
    assert shown_titles(call) == [f"t{i}" for i in range(min(count, k))]
    trace = played.value
    assert (trace.answers, trace.exit_reason, trace.method) == (("a",), ExitReason.ANSWERED, "rag")
    assert list(trace.context_ids) == shown_titles(call)
    assert {(d.batch, d.kept, d.verdict) for d in trace.documents} == {(0, True, None)}


def test_images_become_query_captions_in_their_place() -> None:
    played = solve([image(0), text(1), image(2)])
    assert [[call.kind for call in step] for step in played.steps] == [[CallKind.CAPTION_QUERY] * 2, [CallKind.ANSWER]]
    assert played.steps[1][0].passages == (
        Passage("i0", "caption of i0"), Passage("t1", "text 1"), Passage("i2", "caption of i2"),
    )  # fmt: skip


def test_an_image_without_a_caption_is_left_out_and_recorded() -> None:
    played = solve([image(0), text(1)], {"caption": Failure(FailureReason.BAD_IMAGE)})
    assert [(d.doc_id, d.kept, d.failure) for d in played.value.documents] == [
        ("i0", False, "bad_image"), ("t1", True, ""),
    ]  # fmt: skip
    assert played.value.context_ids == ("t1",)


def test_without_any_usable_document_nothing_is_answered() -> None:
    played = solve([image(0)], {"caption": BROKEN})
    assert not played.of(CallKind.ANSWER)
    assert (played.value.exit_reason, played.value.answers) == (ExitReason.ENGINE_FAILURE, ())


@pytest.mark.parametrize(("answer", "reason"), [(BROKEN, ExitReason.ENGINE_FAILURE), ((), ExitReason.NO_EVIDENCE)])
def test_a_failure_and_an_abstention_end_differently(answer: object, reason: ExitReason) -> None:
    trace = solve(texts(2), {"answer": answer}).value
    assert (trace.answers, trace.exit_reason) == ((), reason)
    assert [draft.failure for draft in trace.drafts] == ["server" if answer is BROKEN else ""]


def test_an_empty_ranking_asks_nothing() -> None:
    played = solve([])
    assert (played.calls, played.value.exit_reason) == ([], ExitReason.NO_DOCUMENTS)


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        RagOptions(k=0)


@pytest.mark.parametrize("seed", range(5))
def test_the_traces_do_not_depend_on_the_schedule(seed: int) -> None:
    def traces(schedule: Schedule) -> list[object]:
        programs = [rag(QUESTION, mixed(count), RagOptions()) for count in (0, 1, 5, 12)]
        return list(run_all(programs, ScriptedEngine(hashed(seed)), schedule))

    assert traces(Schedule.LOCKSTEP) == traces(Schedule.CONCURRENT) == traces(Schedule.SEQUENTIAL)
