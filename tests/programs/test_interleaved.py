"""Interleaved answers with scripted replies: numbers, verification, bad references, and every way to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from samrag.calls import Answer, Call, CallKind, Composition, Failure, FailureReason, Passage
from samrag.engines.base import Engine, RawReply, Request
from samrag.files import read_records, write_records
from samrag.interleaved import BadReference, structure
from samrag.programs.interleaved import InterleavedOptions, interleaved
from samrag.prompts import PromptStyle, template_hash
from samrag.replies import write, write_composition
from samrag.report.interleaved import answer_page
from samrag.schedule import Schedule, run_all
from samrag.schema import Document, ExitReason, InterleavedQuestion, InterleavedTrace, Language, Verdict
from tests.programs.scripted import (
    BROKEN,
    Played,
    ScriptedEngine,
    by_rules,
    hashed,
    image,
    mixed,
    play,
    relevant,
    shown_titles,
    text,
)

COMPOSE, SUP = CallKind.INTERLEAVED_EN, CallKind.IS_SUP
DOCUMENTS = [text(1), image(1), image(2), text(2), image(3)]
GOOD = "One.<sup>[2](DOC#2)</sup>\n\n![third](IMG#3)\n\n![first](IMG#1)"


def asked(documents: list[Document], language: Language = Language.EN) -> InterleavedQuestion:
    return InterleavedQuestion("q", "How?", tuple(documents), language)


def solve(rules: dict[str, Any], documents: list[Document] = DOCUMENTS, **options: Any) -> Played[InterleavedTrace]:
    return play(interleaved(asked(documents), InterleavedOptions(**options)), by_rules(**({"compose": GOOD} | rules)))


CUT = '{"answer": "' + GOOD


# --- numbers ---


def test_texts_and_images_are_numbered_over_all_documents_and_images_stand_as_words() -> None:
    played = solve({})
    assert [[call.kind for call in step] for step in played.steps] == [
        [
            CallKind.IS_REL_TEXT,
            CallKind.IS_REL_IMAGE,
            CallKind.IS_REL_IMAGE,
            CallKind.IS_REL_TEXT,
            CallKind.IS_REL_IMAGE,
        ],
        [COMPOSE],
        [SUP],
    ]
    (call,) = played.of(COMPOSE)
    assert shown_titles(call) == ["DOC#1 t1", "IMG#1 i1", "IMG#2 i2", "DOC#2 t2", "IMG#3 i3"]
    assert call.passages[0] == Passage("DOC#1 t1", "text 1")
    assert call.passages[1].text == "is_rel_image of i1: True"
    assert call.sampling.max_tokens == 2048
    (support,) = played.of(SUP)
    assert (support.passages, support.answer) == (call.passages, GOOD)
    trace = played.value
    assert (trace.markdown, trace.exit_reason, trace.problems) == (GOOD, ExitReason.VERIFIED, ())
    assert (trace.texts, trace.images) == (("t1", "t2"), ("i1", "i2", "i3"))
    assert trace.context_ids == ("t1", "i1", "i2", "t2", "i3")


def test_a_refused_document_is_not_shown_and_the_numbers_of_the_others_stay() -> None:
    played = solve({"rel": relevant("t2", "i1", "i3")})
    (call,) = played.of(COMPOSE)
    assert shown_titles(call) == ["IMG#1 i1", "DOC#2 t2", "IMG#3 i3"]
    assert played.value.markdown == GOOD
    assert [d.kept for d in played.value.documents] == [False, True, False, True, True]
    assert played.value.images == ("i1", "i2", "i3")


def test_without_is_rel_images_are_captioned_and_nothing_is_left_out() -> None:
    played = solve({"rel": Verdict.FALSE}, is_rel=False, is_sup=False)
    assert [[call.kind for call in step] for step in played.steps] == [[CallKind.CAPTION_QUERY] * 3, [COMPOSE]]
    assert played.value.exit_reason is ExitReason.ANSWERED


@pytest.mark.parametrize(("language", "kind"), [(Language.EN, COMPOSE), (Language.ZH, CallKind.INTERLEAVED_ZH)])
def test_the_language_of_the_question_decides_the_prompt(language: Language, kind: CallKind) -> None:
    played = play(interleaved(asked(DOCUMENTS, language), InterleavedOptions()), by_rules(compose=GOOD))
    assert len(played.of(kind)) == 1


def test_an_untitled_document_is_headed_by_its_number_alone() -> None:
    (call,) = solve({"compose": "One."}, [replace(text(1), title="")], is_rel=False).of(COMPOSE)
    assert call.passages == (Passage("DOC#1", "text 1"),)


# --- references ---


@pytest.mark.parametrize(
    ("policy", "markdown"),
    [
        (BadReference.DROP, "A ![x](IMG#1)  B"),
        (BadReference.FLAG, "A ![x](IMG#1) ![y](IMG#9)![x](IMG#1)<sup>[7](DOC#7)</sup> B"),
    ],
)
def test_bad_references_are_criticised_once_then_dropped_or_left_and_named(policy: BadReference, markdown: str) -> None:
    written = "A ![x](IMG#1) ![y](IMG#9)![x](IMG#1)<sup>[7](DOC#7)</sup> B"
    played = solve({"compose": written}, bad_reference=policy)
    first, second = played.of(COMPOSE)
    assert (first.critique, first.sampling.temperature, first.sample_index) == ("", 0.0, 0)
    assert second.critique == (
        "![y](IMG#9): there is no IMG#9\n![x](IMG#1): it comes again\n<sup>[7](DOC#7)</sup>: there is no DOC#7"
    )
    assert (second.sampling.temperature, second.sample_index) == (0.7, 1)
    assert played.value.markdown == markdown
    assert len(played.value.problems) == 3


def test_an_answer_of_bad_references_alone_is_asked_again_and_ends_as_none_with_its_problems() -> None:
    trace = solve({"compose": "![x](IMG#9)"}).value
    assert (trace.markdown, trace.exit_reason, len(trace.drafts)) == ("", ExitReason.NO_EVIDENCE, 2)
    assert trace.problems == ("![x](IMG#9): there is no IMG#9",)


def test_an_image_that_was_refused_cannot_be_shown() -> None:
    played = solve({"rel": relevant("t2", "i1"), "compose": GOOD}, max_regenerations=0)
    assert played.value.problems == ("![third](IMG#3): there is no IMG#3",)
    assert "IMG#3" not in played.value.markdown


def test_a_clean_draft_is_preferred_to_an_earlier_one_with_bad_references() -> None:
    played = solve({"compose": ["A ![x](IMG#8)", GOOD, "unused"]})
    assert (played.value.markdown, played.value.problems) == (GOOD, ())
    assert [draft.regeneration for draft in played.value.drafts] == [0, 1]


# --- support ---


@pytest.mark.parametrize(
    ("verdicts", "drafts", "reason", "answer"),
    [
        ([Verdict.TRUE], 1, ExitReason.VERIFIED, "first"),
        ([Verdict.PARTIAL, Verdict.TRUE], 2, ExitReason.VERIFIED, "second"),
        ([Verdict.FALSE, Verdict.PARTIAL], 2, ExitReason.BEST_EFFORT, "second"),
        ([Verdict.PARTIAL, Verdict.FALSE], 2, ExitReason.BEST_EFFORT, "first"),
        ([Verdict.PARTIAL, BROKEN], 2, ExitReason.BEST_EFFORT, "first"),
        ([Verdict.FALSE, BROKEN], 2, ExitReason.UNVERIFIED, "second"),
        ([BROKEN], 1, ExitReason.UNVERIFIED, "first"),
        ([Verdict.FALSE], 2, ExitReason.NO_EVIDENCE, ""),
    ],
)
def test_support_decides_which_draft_is_returned_and_as_what(
    verdicts: list[Any], drafts: int, reason: ExitReason, answer: str
) -> None:
    trace = solve({"compose": ["first", "second"], "sup": list(verdicts)}).value
    assert (trace.exit_reason, trace.markdown, len(trace.drafts)) == (reason, answer, drafts)


def test_the_judges_reasoning_is_the_critique() -> None:
    played = solve({"sup": [Verdict.PARTIAL, Verdict.TRUE]})
    assert played.of(COMPOSE)[1].critique == f"is_sup of {GOOD}: Partial"


# --- other ends ---


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"compose": BROKEN}, ExitReason.ENGINE_FAILURE),
        ({"compose": Composition("", "nothing on it")}, ExitReason.NO_EVIDENCE),
        ({"compose": "![x](IMG#9)"}, ExitReason.NO_EVIDENCE),
        ({"rel": Verdict.FALSE}, ExitReason.NO_EVIDENCE),
        ({"rel": BROKEN}, ExitReason.ENGINE_FAILURE),
    ],
)
def test_without_an_answer_the_reason_is_told(rules: dict[str, Any], reason: ExitReason) -> None:
    trace = solve(rules).value
    assert (trace.markdown, trace.exit_reason) == ("", reason)


def test_a_failed_second_draft_leaves_the_first() -> None:
    trace = solve({"compose": [Composition("first ![x](IMG#9)", ""), BROKEN]}).value
    assert (trace.markdown, trace.exit_reason) == ("first", ExitReason.VERIFIED)
    assert [draft.failure for draft in trace.drafts] == ["", "server"]


def test_no_documents_ask_nothing() -> None:
    played = solve({}, [])
    assert (played.calls, played.value.exit_reason) == ([], ExitReason.NO_DOCUMENTS)


def test_an_image_that_cannot_be_seen_is_recorded_and_left_out() -> None:
    def rel(call: Call) -> object:
        return Failure(FailureReason.BAD_IMAGE) if call.title == "i1" else Verdict.TRUE

    trace = solve({"rel": rel}).value
    assert [(d.doc_id, d.failure) for d in trace.documents if not d.kept] == [("i1", "bad_image")]
    assert trace.problems == ("![first](IMG#1): there is no IMG#1",)


def test_a_reply_of_another_kind_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="interleaved call got Answer"):
        solve({"compose": Answer(("a",), "")})


def test_negative_regenerations_are_refused() -> None:
    with pytest.raises(ValueError, match="max_regenerations is -1"):
        InterleavedOptions(max_regenerations=-1)


# --- properties ---


@given(st.integers(0, 10**6), st.integers(0, 9), st.booleans(), st.booleans(), st.sampled_from(BadReference))
@settings(max_examples=150)
def test_whatever_is_replied_the_answer_refers_to_the_context_alone(
    seed: int, count: int, is_rel: bool, is_sup: bool, policy: BadReference
) -> None:
    options = InterleavedOptions(is_rel=is_rel, is_sup=is_sup, bad_reference=policy, max_regenerations=2)
    played = play(interleaved(asked(mixed(count)), options), hashed(seed))
    trace = played.value
    images, texts = (
        {number for number, doc_id in enumerate(ids, 1) if doc_id in trace.context_ids}
        for ids in (trace.images, trace.texts)
    )
    if trace.markdown:
        left = structure(trace.markdown, images, texts).problems
        assert left == (trace.problems if policy is BadReference.FLAG else ())
    answered = (ExitReason.ANSWERED, ExitReason.VERIFIED, ExitReason.BEST_EFFORT, ExitReason.UNVERIFIED)
    assert bool(trace.markdown) == (trace.exit_reason in answered)
    assert len(played.of(COMPOSE)) <= 3


@pytest.mark.parametrize("schedule", Schedule)
def test_the_schedule_changes_nothing(schedule: Schedule) -> None:
    def programs() -> list[Any]:
        return [interleaved(asked(mixed(i % 7)), InterleavedOptions()) for i in range(20)]

    alone = [play(program, hashed(3)).value for program in programs()]
    assert [result.value for result in run_all(programs(), ScriptedEngine(hashed(3)), schedule)] == alone


class Writer:
    """A backend that writes what its script says to each kind of request."""

    identity = "writer"

    def __init__(self, compose: str) -> None:
        self.texts = {COMPOSE: compose}
        self.requests: list[Request] = []

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        self.requests += requests
        return [RawReply(self.texts.get(request.kind, write("seen", "True")), "stop") for request in requests]

    async def close(self) -> None: ...


@pytest.mark.parametrize("style", PromptStyle)
@pytest.mark.parametrize("text", [write_composition("r", "how-to", GOOD), GOOD, CUT])
def test_an_engine_puts_the_prompt_and_reads_the_reply(style: PromptStyle, text: str) -> None:
    writer = Writer(text)
    (result,) = run_all([interleaved(asked(DOCUMENTS), InterleavedOptions())], Engine(writer, style), Schedule.LOCKSTEP)
    assert (result.value.markdown, result.value.exit_reason) == (GOOD, ExitReason.VERIFIED)
    assert (result.usage.calls, result.usage.failures) == (7, 0)
    (request,) = [request for request in writer.requests if request.kind is COMPOSE]
    assert "IMG#3 i3\nseen" in request.prompt.body
    assert all(request.template == template_hash(style, request.kind) for request in writer.requests)


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    traces = [play(interleaved(asked(mixed(5)), InterleavedOptions()), hashed(seed)).value for seed in range(10)]
    write_records(tmp_path / "traces.jsonl", traces)
    assert read_records(tmp_path / "traces.jsonl", InterleavedTrace) == traces


# --- the page ---


def test_the_page_holds_the_pictures_of_the_answer_and_names_what_it_cannot_show(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), "red").save(tmp_path / "i1.png")
    trace = solve({}).value
    page = answer_page(trace, "How? <b>", {d.doc_id: d for d in DOCUMENTS}, tmp_path)
    assert page.count('<img src="data:image/jpeg;base64,') == 1
    assert "image 3 could not be read" in page
    assert '<a href="#doc-2">[2]</a>' in page
    assert '<li id="doc-1">t1</li><li id="doc-2">t2</li>' in page
    assert "<title>How? &lt;b&gt;</title>" in page
