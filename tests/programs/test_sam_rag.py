"""SAM-RAG's loop with scripted replies: the action table, its bounds, and what a failure may not become."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samrag.calls import Answer, Call, CallKind, Failure, FailureReason, Judgement, Passage
from samrag.programs.sam_rag import Exhausted, ImageJudgement, SamRagOptions, sam_rag
from samrag.programs.steps import spoken
from samrag.schedule import Schedule, run_all
from samrag.schema import Document, Draft, ExitReason, Question, Trace, Verdict
from tests.programs.scripted import (
    BROKEN,
    Played,
    ScriptedEngine,
    about,
    by_rules,
    hashed,
    image,
    mixed,
    play,
    relevant,
    shown_titles,
    text,
    texts,
)
from tests.programs.test_climb import CLIMB_EXITS

QUESTION = Question("q", "Who?", ("a",), "TextQ", "dev")
TRUE, PARTIAL, FALSE = Verdict.TRUE, Verdict.PARTIAL, Verdict.FALSE
IS_REL = (CallKind.IS_REL_TEXT, CallKind.IS_REL_IMAGE)


def solve(documents: list[Document], rules: dict[str, Any] | None = None, **options: Any) -> Played[Trace]:
    return play(sam_rag(QUESTION, documents, SamRagOptions(**options)), by_rules(**(rules or {})))


def kinds(played: Played[Trace]) -> list[str]:
    return [str(call.kind) for call in played.calls]


def contexts(played: Played[Trace]) -> list[list[str]]:
    return [shown_titles(call) for call in played.of(CallKind.ANSWER)]


# --- the action table ---


def test_is_rel_true_adds_to_the_context_and_false_drops() -> None:
    played = solve(texts(4), {"rel": relevant("t1", "t3")}, batch_size=4)
    assert contexts(played) == [["t1", "t3"]]
    assert [(d.doc_id, d.kept, d.verdict) for d in played.value.documents] == [
        ("t0", False, FALSE), ("t1", True, TRUE), ("t2", False, FALSE), ("t3", True, TRUE),
    ]  # fmt: skip
    assert played.value.context_ids == ("t1", "t3")


def test_a_batch_without_new_evidence_leads_to_the_next_without_an_answer() -> None:
    played = solve(texts(6), {"rel": relevant("t5")}, batch_size=2)
    assert kinds(played) == ["is_rel_text"] * 6 + ["answer", "is_use", "is_sup"]


def test_old_evidence_is_not_answered_from_again_when_a_batch_adds_nothing() -> None:
    played = solve(texts(6), {"rel": relevant("t0", "t4"), "sup": [PARTIAL, TRUE]}, batch_size=2)
    assert contexts(played) == [["t0"], ["t0", "t4"]]


def test_is_use_false_draws_another_answer_with_the_critique() -> None:
    played = solve(texts(1), {"answer": ["x", "y"], "use": [FALSE, TRUE]})
    first, second = played.of(CallKind.ANSWER)
    assert (first.sample_index, first.sampling.temperature, first.critique) == (0, 0.0, "")
    assert second.sample_index == 1
    assert second.sampling.temperature > 0
    assert "x" in second.critique
    assert "is_use of x: False" in second.critique
    assert played.value.answers == ("y",)
    played = solve(texts(1), {"answer": ["x", "y"], "use": [FALSE, TRUE]}, critique=False)
    assert [call.critique for call in played.of(CallKind.ANSWER)] == ["", ""]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_regeneration_is_bounded_and_then_goes_on_to_is_sup(most: int) -> None:
    played = solve(texts(1), {"use": FALSE}, max_regenerations=most)
    assert kinds(played) == ["is_rel_text", *["answer", "is_use"] * (most + 1), "is_sup"]
    assert [call.sample_index for call in played.of(CallKind.ANSWER)] == list(range(most + 1))
    last = played.value.drafts[-1]
    assert (last.regeneration, last.is_use, last.is_sup) == (most, FALSE, TRUE)
    assert played.value.exit_reason is ExitReason.VERIFIED


def test_verdicts_belong_to_the_draft_that_they_judged() -> None:
    played = solve(texts(2), {"answer": ["x", "y", "z"], "use": [FALSE, TRUE], "sup": [FALSE, TRUE]}, batch_size=1)
    assert [call.answer for call in played.of(CallKind.IS_USE)] == ["x", "y", "z"]
    assert [call.answer for call in played.of(CallKind.IS_SUP)] == ["y", "z"]
    assert [(d.answers, d.is_use, d.is_sup) for d in played.value.drafts] == [
        (("x",), FALSE, None), (("y",), TRUE, FALSE), (("z",), TRUE, TRUE),
    ]  # fmt: skip


def test_is_sup_true_returns_the_answer_and_stops() -> None:
    played = solve(texts(20), {"answer": ("x", "y")})
    assert (played.value.answers, played.value.exit_reason) == (("x", "y"), ExitReason.VERIFIED)
    assert kinds(played) == ["is_rel_text"] * 7 + ["answer", "is_use", "is_sup"]


@pytest.mark.parametrize(("verdict", "second"), [(PARTIAL, ["t0", "t1", "t2", "t3"]), (FALSE, ["t2", "t3"])])
def test_is_sup_partial_keeps_the_context_and_false_clears_it(verdict: Verdict, second: list[str]) -> None:
    played = solve(texts(4), {"sup": [verdict, TRUE]}, batch_size=2)
    assert contexts(played) == [["t0", "t1"], second]
    assert [shown_titles(call) for call in played.of(CallKind.IS_SUP)] == contexts(played)
    assert list(played.value.context_ids) == second


def test_an_abstention_is_not_judged_and_keeps_the_context() -> None:
    played = solve(texts(2), {"answer": [(), "x"]}, batch_size=1)
    assert contexts(played) == [["t0"], ["t0", "t1"]]
    assert [call.answer for call in played.of(CallKind.IS_USE, CallKind.IS_SUP)] == ["x", "x"]
    assert played.value.exit_reason is ExitReason.VERIFIED


# --- bounds ---


@given(st.integers(0, 30), st.integers(1, 8), st.integers(1, 4))
def test_batches_are_ceiling_division_within_the_bounds(count: int, batch_size: int, max_batches: int) -> None:
    played = solve(texts(count), {"rel": FALSE}, batch_size=batch_size, max_batches=max_batches)
    sizes = [len(step) for step in played.steps]
    assert len(sizes) == min(max_batches, math.ceil(count / batch_size))
    assert sum(sizes) == min(count, batch_size * max_batches)
    assert all(sizes)
    assert [(d.doc_id, d.batch) for d in played.value.documents] == [
        (f"t{i}", i // batch_size) for i in range(sum(sizes))
    ]


def test_an_empty_ranking_asks_nothing() -> None:
    played = solve([], on_exhausted=Exhausted.CLOSED_BOOK)
    assert (played.calls, played.value.exit_reason, played.value.answers) == ([], ExitReason.NO_DOCUMENTS, ())


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"num_votes": 3, "vote_temperature": 0.0}, "vote_temperature"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_batches": 0}, "max_batches is 0"),
        ({"num_votes": 0}, "num_votes is 0"),
        ({"max_regenerations": -1}, "max_regenerations is -1"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SamRagOptions(**wrong)


# --- ablations and variants ---


def test_without_is_rel_every_document_is_kept_unjudged() -> None:
    played = solve(mixed(4), is_rel=False, batch_size=4)
    assert kinds(played) == ["caption_query", "caption_query", "answer", "is_use", "is_sup"]
    assert contexts(played) == [["t0", "i1", "t2", "i3"]]
    assert played.of(CallKind.ANSWER)[0].passages[1] == Passage("i1", "caption of i1")
    assert {(d.kept, d.verdict) for d in played.value.documents} == {(True, None)}


def test_without_is_use_no_answer_is_redrawn() -> None:
    played = solve(texts(2), {"use": FALSE}, is_use=False)
    assert kinds(played) == ["is_rel_text", "is_rel_text", "answer", "is_sup"]
    assert played.value.drafts[0].is_use is None


def test_without_is_sup_the_first_answer_ends_the_loop() -> None:
    played = solve(texts(2), {"answer": [(), "x"]}, is_sup=False, batch_size=1)
    assert kinds(played) == ["is_rel_text", "answer", "is_rel_text", "answer", "is_use"]
    assert (played.value.answers, played.value.exit_reason) == (("x",), ExitReason.ANSWERED)


def test_merged_image_judgement_shows_the_reasoning_as_caption() -> None:
    played = solve([image(0)], {"rel": Judgement(TRUE, "A red bear.")})
    assert kinds(played) == ["is_rel_image", "answer", "is_use", "is_sup"]
    assert played.of(CallKind.ANSWER)[0].passages == (Passage("i0", "A red bear."),)


def test_two_step_image_judgement_judges_the_query_caption() -> None:
    played = solve([image(0), text(1)], image_judgement=ImageJudgement.TWO_STEP)
    assert [str(call.kind) for call in played.calls[:3]] == ["caption_query", "is_rel_text", "is_rel_text"]
    assert played.calls[0].image == "i0.png"
    assert played.calls[1].passages == (Passage("i0", "caption of i0"),)
    assert played.of(CallKind.ANSWER)[0].passages == (Passage("i0", "caption of i0"), Passage("t1", "text 1"))


def test_two_step_image_judgement_records_which_call_failed() -> None:
    captionless = {"caption": Failure(FailureReason.BAD_IMAGE)}
    played = solve([image(0), text(1)], captionless, image_judgement=ImageJudgement.TWO_STEP)
    first, second = played.value.documents
    assert (first.kept, first.verdict, first.failure) == (False, None, "bad_image")
    assert (second.kept, second.failure) == (True, "")
    assert contexts(played) == [["t1"]]
    played = solve([image(0)], {"rel": BROKEN}, image_judgement=ImageJudgement.TWO_STEP)
    assert [(d.kept, d.verdict, d.failure) for d in played.value.documents] == [(False, None, "server")]


@pytest.mark.parametrize(("shown", "expected"), [(True, [["t0", "t1"]]), (False, [[""]])])
def test_is_use_sees_the_content_only_when_told(shown: bool, expected: list[list[str]]) -> None:
    played = solve(texts(2), is_use_content=shown)
    assert [shown_titles(call) for call in played.of(CallKind.IS_USE)] == expected
    assert played.of(CallKind.IS_SUP)[0].passages


# --- failures ---


def test_a_failed_is_rel_is_recorded_and_its_document_not_kept() -> None:
    played = solve(texts(2), {"rel": [BROKEN, TRUE]})
    first, second = played.value.documents
    assert (first.kept, first.verdict, first.failure) == (False, None, "server")
    assert (second.kept, second.verdict, second.failure) == (True, TRUE, "")
    assert contexts(played) == [["t1"]]


@pytest.mark.parametrize("answers", [[BROKEN], ["x", BROKEN]])
def test_a_failed_answer_ends_in_engine_failure(answers: list[object]) -> None:
    played = solve(texts(2), {"answer": answers, "use": FALSE})
    assert (played.value.exit_reason, played.value.answers) == (ExitReason.ENGINE_FAILURE, ())
    assert played.value.drafts[-1].failure == "server"
    assert not played.of(CallKind.IS_SUP)


def test_a_failed_is_use_is_no_verdict_and_the_draft_goes_on() -> None:
    played = solve(texts(2), {"use": BROKEN})
    assert kinds(played)[-3:] == ["answer", "is_use", "is_sup"]
    assert [(d.is_use, d.is_sup) for d in played.value.drafts] == [(None, TRUE)]


def test_a_failed_is_sup_verifies_nothing_and_keeps_the_context() -> None:
    played = solve(texts(2), {"sup": [BROKEN, TRUE]}, batch_size=1)
    assert contexts(played) == [["t0"], ["t0", "t1"]]
    assert [d.is_sup for d in played.value.drafts] == [None, TRUE]
    played = solve(texts(2), {"sup": BROKEN})
    assert (played.value.answers, played.value.exit_reason) == ((), ExitReason.NO_EVIDENCE)


# --- exhausted ---


@pytest.mark.parametrize(
    ("policy", "sup", "answers", "reason"),
    [
        (Exhausted.BEST, PARTIAL, ("a1",), ExitReason.BEST_EFFORT),
        (Exhausted.BEST, FALSE, (), ExitReason.NO_EVIDENCE),
        (Exhausted.ABSTAIN, PARTIAL, (), ExitReason.NO_EVIDENCE),
        (Exhausted.CONTEXT, FALSE, ("a1",), ExitReason.UNVERIFIED),
        (Exhausted.CONTEXT, BROKEN, ("a1",), ExitReason.UNVERIFIED),
        (Exhausted.CONTEXT, PARTIAL, ("a1",), ExitReason.BEST_EFFORT),
        (Exhausted.CLOSED_BOOK, PARTIAL, ("a1",), ExitReason.BEST_EFFORT),
        (Exhausted.CLOSED_BOOK, FALSE, ("closed",), ExitReason.UNVERIFIED),
    ],
)
def test_what_is_returned_when_documents_run_out(
    policy: Exhausted, sup: Verdict, answers: tuple[str, ...], reason: ExitReason
) -> None:
    def answer(call: Call) -> str:
        return f"a{call.passages[-1].title[1:]}" if call.passages else "closed"

    played = solve(texts(2), {"answer": answer, "sup": sup}, batch_size=1, on_exhausted=policy)
    assert (played.value.answers, played.value.exit_reason) == (answers, reason)
    assert len(played.of(CallKind.ANSWER)) == (3 if answers == ("closed",) else 2)


def test_best_effort_returns_the_last_partly_supported_draft_with_its_own_context() -> None:
    rules = {"answer": ["x", "y"], "sup": [PARTIAL, FALSE]}
    trace = solve(texts(2), rules, batch_size=1).value
    assert (trace.answers, trace.context_ids, trace.exit_reason) == (("x",), ("t0",), ExitReason.BEST_EFFORT)


def test_context_policy_without_a_draft_answers_once_more_from_what_was_kept() -> None:
    played = solve(texts(2), {"answer": [(), "x"]}, on_exhausted=Exhausted.CONTEXT)
    assert contexts(played) == [["t0", "t1"]] * 2
    assert (played.value.answers, played.value.exit_reason) == (("x",), ExitReason.UNVERIFIED)
    assert solve(texts(2), {"rel": FALSE}, on_exhausted=Exhausted.CONTEXT).value.answers == ()


@pytest.mark.parametrize("policy", [Exhausted.CLOSED_BOOK, Exhausted.CONTEXT])
def test_a_failed_last_answer_is_an_engine_failure_not_an_abstention(policy: Exhausted) -> None:
    played = solve(texts(1), {"answer": [(), BROKEN]}, on_exhausted=policy)
    assert played.value.exit_reason is ExitReason.ENGINE_FAILURE


def test_an_answer_drawn_after_the_documents_ran_out_is_in_the_trace() -> None:
    played = solve(texts(1), {"rel": FALSE}, on_exhausted=Exhausted.CLOSED_BOOK)
    assert [draft.answers for draft in played.value.drafts] == [("a",)]


def test_an_answer_that_is_use_refused_to_the_end_is_unverified_without_is_sup() -> None:
    played = solve(texts(1), {"use": FALSE}, is_sup=False)
    assert played.value.drafts[-1].is_use is FALSE
    assert played.value.exit_reason is ExitReason.UNVERIFIED


# --- votes ---


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        (["x", "y", "y"], ("y",)),
        (["x", "Y", "y"], ("Y",)),
        (["x", "y", "z"], ("x",)),
        (["y", ("a", "b"), ("B", "a")], ("a", "b")),
        ([BROKEN, BROKEN, "x"], ("x",)),
        ([(), "x", ()], ()),
    ],
)
def test_the_majority_of_normalised_votes_wins_and_ties_go_to_the_first(votes: list[Any], winner: object) -> None:
    played = solve(texts(1), {"answer": votes}, num_votes=3)
    assert played.value.drafts[0].answers == winner
    assert [call.sample_index for call in played.of(CallKind.ANSWER)] == [0, 1, 2]
    assert all(call.sampling.temperature > 0 for call in played.of(CallKind.ANSWER))


def test_when_all_votes_fail_there_is_no_answer() -> None:
    assert solve(texts(1), {"answer": BROKEN}, num_votes=3).value.exit_reason is ExitReason.ENGINE_FAILURE


def test_redrawn_votes_are_new_draws() -> None:
    played = solve(texts(1), {"use": [FALSE, TRUE]}, num_votes=3)
    assert [call.sample_index for call in played.of(CallKind.ANSWER)] == [0, 1, 2, 3, 4, 5]


# --- any replies ---


OPTIONS = st.builds(
    SamRagOptions,
    batch_size=st.integers(1, 4),
    max_batches=st.integers(1, 4),
    max_regenerations=st.integers(0, 2),
    num_votes=st.sampled_from([1, 1, 3]),
    is_rel=st.booleans(),
    is_use=st.booleans(),
    is_sup=st.booleans(),
    is_use_content=st.booleans(),
    critique=st.booleans(),
    image_judgement=st.sampled_from(ImageJudgement),
    on_exhausted=st.sampled_from(Exhausted),
)


def most_calls(options: SamRagOptions, count: int) -> int:
    batches = min(options.max_batches, math.ceil(count / options.batch_size))
    documents = min(count, options.batch_size * options.max_batches)
    drafts = (options.max_regenerations + 1) * (options.num_votes + options.is_use)
    return 2 * documents + batches * (drafts + options.is_sup) + options.num_votes * (batches > 0)


def expected_contexts(trace: Trace) -> list[tuple[str, ...]]:
    """The context of each draft by the action table, from the trace's verdicts alone."""
    context: list[str] = []
    expected: list[tuple[str, ...]] = []
    for batch in sorted({document.batch for document in trace.documents}):
        context += [d.doc_id for d in trace.documents if d.batch == batch and d.kept]
        drafts = [draft for draft in trace.drafts if draft.batch == batch]
        expected += [tuple(context)] * len(drafts)
        if drafts and drafts[-1].is_sup is FALSE:
            context = []
    return expected


def judged_as(draft: Draft, kind: CallKind, shown: bool) -> str:
    titles = ",".join(draft.context_ids) if shown else ""
    return f"{kind}|{spoken(draft.answers)}|{titles}"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 14), OPTIONS)
def test_whatever_is_replied_the_trace_keeps_the_rules(seed: int, count: int, options: SamRagOptions) -> None:
    script = hashed(seed)
    played = play(sam_rag(QUESTION, mixed(count), options), script)
    trace = played.value
    assert len(played.calls) <= most_calls(options, count)
    for document in trace.documents:
        assert document.kept == (not document.failure and document.verdict is not FALSE)
        assert (document.verdict is None) == (not options.is_rel or bool(document.failure))
    assert [draft.context_ids for draft in trace.drafts if draft.batch >= 0] == expected_contexts(trace)
    for draft in trace.drafts:
        if draft.is_use is not None:
            assert draft.is_use_reasoning == judged_as(draft, CallKind.IS_USE, options.is_use_content)
        if draft.is_sup is not None:
            assert draft.is_sup_reasoning == judged_as(draft, CallKind.IS_SUP, True)
        assert not (draft.failure and (draft.answers or draft.is_use or draft.is_sup))
    for before, after in zip(trace.drafts, trace.drafts[1:], strict=False):
        redrawn = after.batch == before.batch
        assert after.regeneration == (before.regeneration + 1 if redrawn else 0)
        assert not redrawn or before.is_use is FALSE
    verified = bool(trace.drafts) and trace.drafts[-1].is_sup is TRUE
    assert (trace.exit_reason is ExitReason.VERIFIED) == verified
    if verified:
        assert (trace.answers, trace.context_ids) == (trace.drafts[-1].answers, trace.drafts[-1].context_ids)
    asked = {CallKind.IS_USE: options.is_use, CallKind.IS_SUP: options.is_sup}
    assert all(asked.get(call.kind, True) for call in played.calls)
    assert options.is_rel or not played.of(*IS_REL)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), OPTIONS)
def test_the_traces_do_not_depend_on_the_schedule(seed: int, options: SamRagOptions) -> None:
    def traces(schedule: Schedule) -> list[object]:
        programs = [sam_rag(QUESTION, mixed(count), options) for count in (0, 3, 9, 14)]
        return list(run_all(programs, ScriptedEngine(hashed(seed)), schedule, max_in_flight=3))

    expected = traces(Schedule.SEQUENTIAL)
    assert traces(Schedule.LOCKSTEP) == expected
    assert traces(Schedule.CONCURRENT) == expected


def test_the_random_script_reaches_every_exit() -> None:
    """Guards the two properties above: they would hold of a script that never gets anywhere."""
    reasons = {
        play(
            sam_rag(QUESTION, mixed(seed % 15), SamRagOptions(batch_size=2, on_exhausted=policy, is_sup=seed % 5 > 0)),
            hashed(seed),
        ).value.exit_reason
        for seed in range(120)
        for policy in Exhausted
    }
    assert reasons == set(ExitReason) - CLIMB_EXITS
    answer = hashed(1, 0.0)(Call(CallKind.ANSWER, "q"))
    assert isinstance(answer, Answer)
    assert answer.reasoning == about(Call(CallKind.ANSWER, "q"))
