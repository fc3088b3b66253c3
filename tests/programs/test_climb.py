"""CLIMB with scripted replies: its rounds, its bounds, its ablations, and what a failure may not become."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samrag.calls import (
    JUDGEMENTS,
    Answer,
    Call,
    CallKind,
    Facet,
    Failure,
    FailureReason,
    Judgement,
    Passage,
    Rating,
    Reply,
)
from samrag.programs.climb import Assessment, ClimbOptions, Rejection, climb, graded
from samrag.retrieval.lexical import word_overlap
from samrag.schedule import Schedule, run_all
from samrag.schema import Document, ExitReason, Question, Trace, Verdict
from tests.programs.scripted import (
    BROKEN,
    Played,
    Script,
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
CLIMB_EXITS = {
    ExitReason.TARGET,
    ExitReason.MAX_ITERATIONS,
    ExitReason.NO_FACET,
    ExitReason.NO_NEW_EVIDENCE,
    ExitReason.REJECTED,
}
CRITIC = (CallKind.CRITIC_TEXT, CallKind.CRITIC_IMAGE)


def run(documents: Sequence[Document], script: Script, **options: Any) -> Played[Trace]:
    return play(climb(QUESTION, documents, ClimbOptions(**options), word_overlap), script)


def solve(documents: Sequence[Document], rules: dict[str, Any] | None = None, **options: Any) -> Played[Trace]:
    return run(documents, by_rules(**(rules or {})), **options)


def kinds(played: Played[Trace]) -> list[str]:
    return [str(call.kind) for call in played.calls]


def contexts(played: Played[Trace]) -> list[list[str]]:
    return [shown_titles(call) for call in played.of(CallKind.ANSWER)]


def scores(**by_title: float) -> Any:
    """A rule for `critic`: each document's number; 0 for those that are not named."""
    return lambda call: by_title.get(shown_titles(call)[0], 0.0)


def facets(*titles: str) -> list[str]:
    """A rule for `facet`: each names the document it is about, which bears its title in its text too."""
    return [title.replace("t", "text ") for title in titles]


# --- the steps ---


def test_every_passage_is_rated_and_the_best_are_answered_from() -> None:
    played = solve(texts(5), {"critic": scores(t1=0.4, t3=0.9, t4=0.9)}, evidence_size=3)
    assert [len(step) for step in played.steps if step] == [5, 1, 1]
    assert kinds(played) == ["critic_text"] * 5 + ["answer", "confidence"]
    assert contexts(played) == [["t3", "t4", "t1"]]
    trace = played.value
    assert (trace.method, trace.answers, trace.exit_reason) == ("climb", ("a",), ExitReason.TARGET)
    assert (trace.confidence, trace.context_ids) == (1.0, ("t3", "t4", "t1"))
    assert [(d.doc_id, d.kept, d.score) for d in trace.documents] == [
        ("t0", False, 0.0), ("t1", True, 0.4), ("t2", False, 0.0), ("t3", True, 0.9), ("t4", True, 0.9),
    ]  # fmt: skip


def test_an_image_is_captioned_and_rated_by_its_caption_beside_the_image() -> None:
    played = solve([image(0), text(1)], {"critic": lambda call: (1.0, 0.5, 0.0) if call.image else (0.4, 0.6)})
    assert kinds(played) == ["caption_query", "critic_image", "critic_text", "answer", "confidence"]
    critic = played.calls[1]
    assert (critic.image, critic.title, critic.passages) == ("i0.png", "i0", (Passage("i0", "caption of i0"),))
    first, second = played.value.documents
    assert (first.scores, first.score) == ((1.0, 0.5, 0.0), 0.5)
    assert first.reasoning.startswith("caption of i0 critic_image")
    assert second.reasoning.startswith("critic_text")
    assert (second.scores, second.score) == ((0.4, 0.6), 0.5)


@pytest.mark.parametrize(("weights", "score"), [((1, 1, 2), 0.65), ((0, 1, 0), 0.5), ((3, 1, 0), 0.2)])
def test_the_critic_weighs_its_numbers(weights: tuple[float, ...], score: float) -> None:
    played = solve([image(0)], {"critic": (0.1, 0.5, 1.0)}, critic_weights=weights)
    assert played.value.documents[0].score == pytest.approx(score)


@pytest.mark.parametrize(("weights", "confidence"), [((1, 1, 1), 0.6), ((1, 0, 1), 0.5), ((2, 1, 0), 0.6)])
def test_confidence_is_the_weighted_mean_of_its_terms(weights: tuple[float, ...], confidence: float) -> None:
    played = solve(texts(1), {"confidence": (0.5, 0.8, 0.5)}, confidence_weights=weights, t_max=0)
    assert played.value.confidence == pytest.approx(confidence)
    assert played.value.drafts[0].confidence_scores == (0.5, 0.8, 0.5)


def test_a_facet_brings_the_passage_that_is_about_it_and_a_higher_confidence_is_accepted() -> None:
    critic = scores(t0=1.0, t1=0.9, t2=0.8, t3=0.7, t4=0.6)
    rules = {"critic": critic, "facet": facets("t4"), "answer": ["x", "y"], "confidence": [0.5, 0.95]}
    played = solve(texts(5), rules, evidence_size=2)
    assert contexts(played) == [["t0", "t1"], ["t4", "t0"]]
    assert kinds(played)[-3:] == ["facet", "answer", "confidence"]
    (diagnosis,) = played.of(CallKind.FACET)
    assert (shown_titles(diagnosis), diagnosis.answer, diagnosis.critique) == (["t0", "t1"], "x", "")
    trace = played.value
    assert (trace.answers, trace.confidence, trace.exit_reason) == (("y",), 0.95, ExitReason.TARGET)
    assert [(d.facet, d.accepted, d.confidence, d.batch) for d in trace.drafts] == [
        ("", True, 0.5, 0), ("text 4", True, 0.95, 1),
    ]  # fmt: skip
    assert {d.doc_id for d in trace.documents if d.kept} == {"t0", "t1", "t4"}


@pytest.mark.parametrize("second", [0.5, 0.2, BROKEN])
def test_what_does_not_raise_the_confidence_changes_nothing_but_the_trace(second: object) -> None:
    rules = {"answer": ["x", "y"], "facet": facets("t5"), "confidence": [0.5, second]}
    trace = solve(texts(6), rules).value
    assert (trace.answers, trace.confidence, trace.exit_reason) == (("x",), 0.5, ExitReason.REJECTED)
    assert trace.context_ids == trace.drafts[0].context_ids
    assert [(d.answers, d.accepted) for d in trace.drafts] == [(("x",), True), (("y",), False)]


def test_a_gain_may_be_asked_for() -> None:
    rules = {"answer": ["x", "y"], "facet": facets("t5"), "confidence": [0.5, 0.55]}
    assert solve(texts(6), rules).value.answers == ("y",)
    assert solve(texts(6), rules, min_gain=0.05).value.answers == ("x",)


@pytest.mark.parametrize(("u_star", "rounds"), [(0.8, 1), (0.81, 2)])
def test_a_confidence_equal_to_the_target_is_enough(u_star: float, rounds: int) -> None:
    trace = solve(texts(6), {"confidence": 0.8, "facet": facets("t5")}, u_star=u_star).value
    assert (len(trace.drafts), trace.exit_reason is ExitReason.TARGET) == (rounds, rounds == 1)


def test_it_stops_when_nothing_is_missing_and_when_the_pool_has_nothing_else() -> None:
    low = {"confidence": 0.5}
    assert solve(texts(6), {**low, "facet": ""}).value.exit_reason is ExitReason.NO_FACET
    assert solve(texts(4), {**low, "facet": "unheard of"}).value.exit_reason is ExitReason.NO_NEW_EVIDENCE
    assert solve(texts(3), {**low, "facet": facets("t2")}).value.exit_reason is ExitReason.NO_NEW_EVIDENCE


def test_evidence_that_was_tried_gives_its_last_place_to_the_nearest_passage_unseen() -> None:
    critic = scores(t0=1.0, t1=0.9, t2=0.5, t3=0.3, t4=0.4)
    rules = {"critic": critic, "confidence": [0.1, 0.2, 0.3, 0.4], "facet": ["text 3", "text 1", "unheard of"]}
    assert contexts(solve(texts(5), rules, evidence_size=2, facet_weight=0.5)) == [
        ["t0", "t1"], ["t0", "t3"], ["t1", "t2"], ["t0", "t4"],
    ]  # fmt: skip


def test_it_stops_after_the_last_round() -> None:
    rules = {"facet": facets("t4", "t5", "t6", "t7"), "confidence": [0.1, 0.2, 0.3, 0.4, 0.5]}
    trace = solve(texts(9), rules, t_max=2, facet_weight=5.0).value
    assert (trace.exit_reason, trace.confidence, len(trace.drafts)) == (ExitReason.MAX_ITERATIONS, 0.3, 3)


def test_after_a_rejection_it_may_go_on_with_another_facet() -> None:
    rules = {"facet": facets("t4", "t5", "t6"), "confidence": [0.5, 0.4, 0.7, 0.6]}
    played = solve(texts(9), rules, on_rejection=Rejection.CONTINUE, facet_weight=5.0)
    assert [call.critique for call in played.of(CallKind.FACET)] == ["", "text 4", ""]
    assert [draft.accepted for draft in played.value.drafts] == [True, False, True, False]
    assert (played.value.confidence, played.value.exit_reason) == (0.7, ExitReason.MAX_ITERATIONS)
    stubborn = solve(texts(9), {**rules, "facet": facets("t4")}, on_rejection=Rejection.CONTINUE)
    assert stubborn.value.exit_reason is ExitReason.NO_FACET


def test_an_abstention_has_no_confidence_to_ask_for_and_any_answer_is_better() -> None:
    rules = {"answer": [(), "y"], "facet": facets("t5"), "confidence": 0.1}
    played = solve(texts(6), rules, t_max=1)
    assert [call.answer for call in played.of(CallKind.FACET, CallKind.CONFIDENCE)] == ["not stated", "y"]
    assert [draft.confidence for draft in played.value.drafts] == [0.0, 0.1]
    assert played.value.answers == ("y",)
    silent = solve(texts(6), {**rules, "answer": ()}).value
    assert (silent.answers, silent.exit_reason, silent.confidence) == ((), ExitReason.NO_EVIDENCE, 0.0)


def test_agreement_of_further_draws_is_a_term_of_the_confidence() -> None:
    answers = ["x", "X", "z", BROKEN, BROKEN]
    played = solve(texts(2), {"answer": answers, "confidence": 0.8}, num_agreement_draws=4, t_max=0)
    assert played.value.confidence == pytest.approx((3 * 0.8 + 0.25) / 4)
    calls = played.of(CallKind.ANSWER)
    assert [call.sample_index for call in calls] == [0, 1, 2, 3, 4]
    assert [call.sampling.temperature > 0 for call in calls] == [False, True, True, True, True]


@pytest.mark.parametrize(("probability", "confidence"), [(0.2, 0.65), (None, 0.8)])
def test_the_answers_token_probability_counts_where_it_is_measured(
    probability: float | None, confidence: float
) -> None:
    rules = {"answer": Answer(("x",), "r", probability), "confidence": 0.8}
    assert solve(texts(1), rules, probability_weight=1.0, t_max=0).value.confidence == pytest.approx(confidence)
    assert solve(texts(1), rules, t_max=0).value.confidence == pytest.approx(0.8)


def test_an_empty_pool_asks_nothing() -> None:
    played = solve([])
    assert (played.calls, played.value.exit_reason, played.value.confidence) == ([], ExitReason.NO_DOCUMENTS, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pool_size": 0}, "pool_size is 0"),
        ({"evidence_size": 0}, "evidence_size is 0"),
        ({"t_max": -1}, "t_max is -1"),
        ({"u_star": 1.2}, "u_star is 1.2"),
        ({"min_gain": -0.1}, "min_gain is -0.1"),
        ({"facet_weight": float("nan")}, "facet_weight is nan"),
        ({"critic_weights": (0, 0, 1)}, "critic_weights is"),
        ({"confidence_weights": (1, 1)}, "confidence_weights is"),
        ({"confidence_weights": (1, 1, -1)}, "confidence_weights is"),
        ({"num_agreement_draws": 2, "vote_temperature": 0.0}, "vote_temperature"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClimbOptions(**wrong)


# --- ablations and variants ---


def test_without_the_critic_the_pool_keeps_its_order() -> None:
    played = solve(mixed(6), critic=False)
    assert kinds(played) == ["caption_query"] * 3 + ["answer", "confidence"]
    assert contexts(played) == [["t0", "i1", "t2", "i3"]]
    refined = solve(texts(6), {"facet": facets("t5"), "confidence": [0.5, 1.0]}, critic=False, facet_weight=2.0)
    assert contexts(refined) == [["t0", "t1", "t2", "t3"], ["t5", "t0", "t1", "t2"]]


def test_without_diagnosis_the_next_best_passage_unseen_takes_the_last_place() -> None:
    played = solve(texts(6), {"confidence": [0.1, 0.2, 0.3]}, facet_diagnosis=False, evidence_size=3, t_max=5)
    assert not played.of(CallKind.FACET)
    assert contexts(played)[:4] == [["t0", "t1", "t2"], ["t0", "t1", "t3"], ["t0", "t1", "t4"], ["t0", "t1", "t5"]]
    rising = solve(texts(4), {"confidence": [0.1, 0.2, 0.3]}, facet_diagnosis=False, evidence_size=3, t_max=5)
    assert (rising.value.exit_reason, rising.value.confidence) == (ExitReason.NO_NEW_EVIDENCE, 0.2)


def test_by_verdicts_a_tuned_student_is_asked_only_what_it_has_learnt() -> None:
    rules = {
        "rel": [Verdict.FALSE, Judgement(Verdict.TRUE, "r", 0.8), Verdict.TRUE],
        "sup": [Judgement(Verdict.PARTIAL, "t0"), Verdict.TRUE],
        "answer": ["x", "y"],
    }
    played = solve([text(0), image(1), text(2)], rules, assessment=Assessment.VERDICTS, evidence_size=2, facet_weight=2)
    assert {call.kind for call in played.calls} <= {
        CallKind.IS_REL_TEXT, CallKind.IS_REL_IMAGE, CallKind.ANSWER, CallKind.IS_SUP, CallKind.IS_USE,
    }  # fmt: skip
    assert [d.score for d in played.value.documents] == [0.0, 0.8, 1.0]
    assert contexts(played) == [["t2", "i1"], ["t0", "t2"]]
    assert [(d.confidence, d.is_sup) for d in played.value.drafts] == [(0.75, Verdict.PARTIAL), (1.0, Verdict.TRUE)]
    assert played.value.answers == ("y",)


def test_verdicts_as_numbers() -> None:
    binary, ternary = JUDGEMENTS[CallKind.IS_REL_TEXT], JUDGEMENTS[CallKind.IS_SUP]
    assert [graded(verdict, None, ternary) for verdict in ternary] == [1.0, 0.5, 0.0]
    assert [graded(verdict, 0.7, binary) for verdict in binary] == pytest.approx([0.7, 0.3])
    assert [graded(verdict, 1.0, ternary) for verdict in ternary] == [1.0, 0.5, 0.0]
    assert graded(Verdict.FALSE, 0.6, ternary) == pytest.approx(0.4 * 0.75)


# --- failures ---


def test_a_passage_without_rating_or_caption_is_no_evidence() -> None:
    played = solve(texts(3), {"critic": [1.0, BROKEN, 1.0]})
    assert contexts(played) == [["t0", "t2"]]
    assert [(d.score, d.failure, d.kept) for d in played.value.documents] == [
        (1.0, "", True), (None, "server", False), (1.0, "", True),
    ]  # fmt: skip
    blind = {"caption": Failure(FailureReason.BAD_IMAGE)}
    played = solve([image(0), text(1)], blind)
    assert contexts(played) == [["t1"]]
    assert [d.failure for d in played.value.documents] == ["bad_image", ""]


@pytest.mark.parametrize("rules", [{"critic": BROKEN}, {"answer": BROKEN}])
def test_without_any_evidence_or_answer_it_is_the_engines_failure(rules: dict[str, Any]) -> None:
    trace = solve(texts(3), rules).value
    assert (trace.exit_reason, trace.answers, trace.confidence) == (ExitReason.ENGINE_FAILURE, (), None)
    assert [(d.failure, d.accepted) for d in trace.drafts] == ([("server", False)] if "answer" in rules else [])


def test_a_failed_later_answer_leaves_the_first() -> None:
    trace = solve(texts(6), {"answer": ["x", BROKEN], "facet": facets("t5"), "confidence": 0.5}).value
    assert (trace.answers, trace.confidence, trace.exit_reason) == (("x",), 0.5, ExitReason.REJECTED)
    assert trace.drafts[1].failure == "server"


def test_a_failed_diagnosis_is_no_facet_found_and_the_search_goes_on_without() -> None:
    played = solve(texts(6), {"facet": BROKEN, "confidence": [0.5, 1.0]})
    assert contexts(played) == [["t0", "t1", "t2", "t3"], ["t0", "t1", "t2", "t4"]]
    assert played.value.exit_reason is ExitReason.TARGET


def test_a_confidence_that_failed_vouches_for_nothing() -> None:
    played = solve(texts(6), {"answer": ["x", "y"], "facet": facets("t5"), "confidence": [BROKEN, 0.3]}, t_max=1)
    assert [draft.confidence for draft in played.value.drafts] == [None, 0.3]
    assert played.value.answers == ("y",)


@pytest.mark.parametrize("broken", ["sup", "use"])
def test_of_two_verdicts_one_is_no_confidence(broken: str) -> None:
    trace = solve(texts(2), {broken: BROKEN}, assessment=Assessment.VERDICTS, t_max=0).value
    assert (trace.answers, trace.confidence, trace.exit_reason) == (("a",), None, ExitReason.MAX_ITERATIONS)
    (draft,) = trace.drafts
    assert (draft.is_sup is None, draft.is_use is None) == (broken == "sup", broken == "use")


# --- any replies ---

OPTIONS = st.builds(
    ClimbOptions,
    pool_size=st.integers(1, 9),
    evidence_size=st.integers(1, 4),
    u_star=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
    t_max=st.integers(0, 4),
    min_gain=st.sampled_from([0.0, 0.1]),
    facet_weight=st.sampled_from([0.0, 0.5, 3.0]),
    on_rejection=st.sampled_from(Rejection),
    assessment=st.sampled_from(Assessment),
    critic=st.booleans(),
    iteration=st.booleans(),
    facet_diagnosis=st.booleans(),
    num_agreement_draws=st.sampled_from([0, 0, 2]),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), OPTIONS)
def test_whatever_is_replied_the_trace_keeps_the_rules(seed: int, count: int, options: ClimbOptions) -> None:
    played = play(climb(QUESTION, mixed(count), options, word_overlap), hashed(seed))
    trace = played.value
    pool = [document.doc_id for document in mixed(count)[: options.pool_size]]
    assert [document.doc_id for document in trace.documents] == pool
    usable = {document.doc_id for document in trace.documents if document.score is not None}
    for document in trace.documents:
        assert (document.score is None) == bool(document.failure)
    for draft in trace.drafts:
        assert set(draft.context_ids) <= usable
        assert len(draft.context_ids) <= options.evidence_size
        assert not (draft.failure and (draft.answers or draft.confidence is not None or draft.accepted))
    assert len(trace.drafts) <= 1 + (options.t_max if options.iteration else 0)
    assert len(played.of(CallKind.ANSWER)) == len(trace.drafts) * (1 + options.num_agreement_draws)
    sets = [frozenset(draft.context_ids) for draft in trace.drafts]
    assert len(set(sets)) == len(sets)
    accepted = [draft for draft in trace.drafts if draft.accepted]
    history = [draft.confidence or 0.0 for draft in accepted]
    assert history == sorted(set(history))
    assert all(draft.confidence is not None for draft in accepted[1:])
    if accepted:
        last = accepted[-1]
        assert (trace.answers, trace.context_ids, trace.confidence) == (
            last.answers,
            last.context_ids,
            last.confidence,
        )
        assert all((draft.confidence or 0.0) <= history[-1] + options.min_gain for draft in trace.drafts)
    else:
        assert trace.exit_reason in (ExitReason.NO_DOCUMENTS, ExitReason.ENGINE_FAILURE)
        assert (trace.answers, trace.confidence) == ((), None)
    if trace.exit_reason is ExitReason.TARGET:
        assert history[-1] >= options.u_star
    assert (trace.exit_reason in CLIMB_EXITS) == bool(trace.answers)
    assert options.critic or not played.of(*CRITIC)
    assert options.facet_diagnosis or not played.of(CallKind.FACET)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), OPTIONS)
def test_no_rounds_are_no_iteration(seed: int, count: int, options: ClimbOptions) -> None:
    def played(**changes: Any) -> Played[Trace]:
        return play(climb(QUESTION, mixed(count), dataclasses.replace(options, **changes), word_overlap), hashed(seed))

    assert played(t_max=0, iteration=True) == played(iteration=False)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), OPTIONS, st.floats(0, 1), st.integers(0, 4))
def test_a_sweep_over_u_star_and_t_max_asks_nothing_new(
    seed: int, count: int, options: ClimbOptions, u_star: float, t_max: int
) -> None:
    """Every smaller setting asks a part of what the largest has asked, so a recorded engine has it all."""

    def calls(u_star: float, t_max: int) -> list[Call]:
        changed = dataclasses.replace(options, u_star=u_star, t_max=t_max)
        return play(climb(QUESTION, mixed(count), changed, word_overlap), hashed(seed)).calls

    largest = calls(1.0, 4)
    smaller = calls(u_star, t_max)
    assert smaller == largest[: len(smaller)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), OPTIONS)
def test_a_failure_never_raises_the_confidence(seed: int, count: int, options: ClimbOptions) -> None:
    """With one draft, whatever fails beside what would have been said can only lower U or leave it unknown."""
    alone = dataclasses.replace(options, t_max=0, critic=False)
    whole = hashed(seed, 0.0)

    def failing(call: Call) -> Reply:
        rated = call.kind in (CallKind.CONFIDENCE, CallKind.IS_SUP) or call.sample_index > 0
        return BROKEN if rated and seed % 3 == call.sample_index else whole(call)

    before = play(climb(QUESTION, mixed(count), alone, word_overlap), whole).value
    after = play(climb(QUESTION, mixed(count), alone, word_overlap), failing).value
    assert (after.confidence or 0.0) <= (before.confidence or 0.0)
    assert after.answers == before.answers


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), OPTIONS)
def test_the_traces_do_not_depend_on_the_schedule(seed: int, options: ClimbOptions) -> None:
    def traces(schedule: Schedule) -> list[object]:
        programs = [climb(QUESTION, mixed(count), options, word_overlap) for count in (0, 3, 9, 14)]
        return list(run_all(programs, ScriptedEngine(hashed(seed)), schedule, max_in_flight=3))

    expected = traces(Schedule.SEQUENTIAL)
    assert traces(Schedule.LOCKSTEP) == expected
    assert traces(Schedule.CONCURRENT) == expected


def test_the_random_script_reaches_every_exit() -> None:
    """Guards the properties above: they would hold of a script that never gets anywhere."""
    reasons = {
        run(mixed(seed % 12), hashed(seed), evidence_size=1 + seed % 3, on_rejection=policy).value.exit_reason
        for seed in range(300)
        for policy in Rejection
    }
    assert reasons == CLIMB_EXITS | {ExitReason.NO_DOCUMENTS, ExitReason.ENGINE_FAILURE, ExitReason.NO_EVIDENCE}
    kinds = {type(hashed(seed, 0.0)(Call(kind, "q"))) for seed in range(3) for kind in (CallKind.FACET, *CRITIC)}
    assert kinds == {Facet, Rating}
