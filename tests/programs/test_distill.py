"""The teacher's recipe, with the mini world's oracle as teacher: what becomes a row, and what never may."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import Counter

import pytest

from samrag.calls import JUDGEMENTS, Answer, Call, CallKind, Caption, Failure, FailureReason, Judgement, Passage, Reply
from samrag.miniworld import oracle
from samrag.miniworld.dataset import gold, supports
from samrag.miniworld.language import (
    BRIDGE_RELATIONS,
    EMBLEM,
    IMAGE_RELATIONS,
    VALUES,
    Relation,
    ask,
    club_text,
    describe,
    founder_text,
    understand,
)
from samrag.miniworld.world import Club, Split, draw_clubs, draw_emblem_facts
from samrag.programs.distill import Distilled, DistillOptions, Material, Passed, distill, planned_calls
from samrag.programs.steps import spoken
from samrag.replies import NOT_STATED, parse, write
from samrag.schema import Document, Modality, Question, Verdict
from tests.programs.scripted import BROKEN, Played, Script, hashed, play

CLUBS = draw_clubs(Split.TRAIN, 24, 3)
EMBLEMS = {club.name + EMBLEM: club.emblem for club in CLUBS}
PAPER = {"multi_document": False, "refusals": False, "num_samples": 1, "wrong_forms": False}


def _documents() -> dict[str, Document]:
    found = []
    for club in CLUBS:
        found.append(Document(club.name, Modality.TEXT, club.name, club_text(club)))
        found.append(Document(club.name + EMBLEM, Modality.IMAGE, club.name + EMBLEM, image="x.png"))
        if club.has_founder_text:
            found.append(Document(club.founder.name, Modality.TEXT, club.founder.name, founder_text(club)))
    return {document.doc_id: document for document in found}


DOCUMENTS = _documents()


def question_of(club: Club, relation: Relation) -> Question:
    ids = tuple(title for title, _ in supports(club, relation))
    kind = "ImageQ" if relation in IMAGE_RELATIONS else "TextQ"
    text = ask(relation, club.name, len(club.name))
    return Question(text, text, (gold(club, relation),), kind, "train", ids, ids[-1:])


QUESTIONS = [
    (club, relation, question_of(club, relation))
    for i, club in enumerate(CLUBS)
    for j, relation in enumerate(Relation)
    if (i + j) % 4 == 0 and (club.has_founder_text or relation not in BRIDGE_RELATIONS)
]
BRIDGED = [item for item in QUESTIONS if item[1] in BRIDGE_RELATIONS]


def truth(call: Call, doc_ids: tuple[str, ...] = ()) -> Reply:
    """The oracle's reply; given documents, on what they truly say, not on the captions that were shown."""
    passages = call.passages
    if doc_ids and passages:
        passages = tuple(Passage(i, DOCUMENTS[i].text or describe(EMBLEMS[i])) for i in doc_ids)
    right = oracle.reply(call.kind, call.question, passages, call.title, EMBLEMS.get(call.title), call.answer)
    return parse(call.kind, write(right.reasoning, right.response))


def wrong_teacher(error_rate: float, seed: int = 0) -> Script:
    """The oracle, but a share of the replies fails, or has another verdict, another answer, or another picture."""

    def script(call: Call) -> Reply:
        rng = random.Random(hashlib.sha256(f"{seed}{call!r}".encode()).digest())
        right = truth(call)
        if rng.random() >= error_rate:
            return right
        if rng.random() < 0.3:
            return Failure(FailureReason.INVALID_REPLY, "spoilt")
        if isinstance(right, Judgement):
            other = [verdict for verdict in JUDGEMENTS[call.kind] if verdict is not right.verdict]
            return Judgement(rng.choice(other), right.reasoning)
        if isinstance(right, Answer):
            understood = understand(call.question)
            assert understood is not None
            others = [(), *((value,) for value in VALUES[understood[0]])]
            return Answer(rng.choice([values for values in others if values != right.values]), right.reasoning)
        return Caption(describe(draw_emblem_facts(rng)))

    return script


def material(item: tuple[Club, Relation, Question], wrong_answers: bool = True) -> Material:
    club, relation, question = item
    rng = random.Random(question.question_id)
    alike = [d for i, d in DOCUMENTS.items() if i not in question.support_ids and set(i.split()) & {*club.name.split()}]
    others = [document for i, document in DOCUMENTS.items() if i not in question.support_ids]
    negatives = list({d.doc_id: d for d in [*alike[:2], *rng.sample(others, 2)]}.values())
    wrong = [value for value in (*rng.sample(VALUES[relation], 3), "Nobody") if value not in question.answers][:3]
    return Material(question, [DOCUMENTS[i] for i in question.support_ids], negatives, wrong if wrong_answers else [])


def distilled(item: tuple[Club, Relation, Question], script: Script, **options: object) -> Played[Distilled]:
    given = DistillOptions(**options)  # type: ignore[arg-type]
    return play(distill(material(item, wrong_answers=options != PAPER), given), script)


def is_right(passed: Passed) -> bool:
    right = truth(passed.call, passed.doc_ids)
    if isinstance(passed.reply, Judgement):
        return isinstance(right, Judgement) and right.verdict is passed.reply.verdict
    return isinstance(right, Answer) and isinstance(passed.reply, Answer) and right.values == passed.reply.values


def test_with_a_teacher_that_is_always_right_everything_passes() -> None:
    labels: Counter[tuple[str, str]] = Counter()
    for item in QUESTIONS:
        played = distilled(item, truth)
        assert played.value.dropped == ()
        assert {call.sample_index for call in played.calls} == {0}
        for passed in played.value.passed:
            assert isinstance(passed.reply, Caption) or is_right(passed)
            labels[passed.call.kind, passed.label] += 1
    assert {label for kind, label in labels if kind == CallKind.IS_SUP} == {"True", "Partial", "False"}
    assert {label for kind, label in labels if kind == CallKind.ANSWER} == {"answer", "abstain"}
    for kind in (CallKind.IS_REL_TEXT, CallKind.IS_REL_IMAGE, CallKind.IS_USE):
        assert {label for k, label in labels if k == kind} == {"True", "False"}
    assert labels[CallKind.CAPTION_QUERY, "caption"] == sum(q.question_type == "ImageQ" for _, _, q in QUESTIONS)


@pytest.mark.parametrize("options", [{}, PAPER], ids=["ours", "paper"])
def test_no_wrong_verdict_or_answer_of_a_teacher_that_errs_passes(options: dict[str, object]) -> None:
    checked, dropped, captions, misleading = 0, 0, 0, 0
    for item in QUESTIONS:
        result = distilled(item, wrong_teacher(0.3), **options).value
        dropped += len(result.dropped)
        for passed in result.passed:
            if isinstance(passed.reply, Caption):
                captions += 1
                misleading += spoken(item[2].answers) not in passed.reply.text
                continue
            of_gold = passed.call.answer == spoken(item[2].answers) and set(passed.doc_ids) <= set(item[2].support_ids)
            if options and passed.call.kind is CallKind.IS_SUP and of_gold:
                assert passed.label in ("True", "Partial")  # all that a single positive's gold label can tell
                continue
            assert is_right(passed), passed
            checked += 1
    assert checked > 200
    assert dropped > 20
    assert captions > 5
    assert misleading <= 1  # that needs a wrong probe answer that is the gold one by chance


def test_a_failure_never_becomes_a_row() -> None:
    for item in QUESTIONS:
        result = distilled(item, hashed(7, failure_rate=0.5)).value
        assert all(isinstance(passed.reply, (Judgement, Answer, Caption)) for passed in result.passed)
    result = distilled(QUESTIONS[0], lambda _: BROKEN).value
    assert result.passed == ()
    assert {item.reason for item in result.dropped} == {"server", "positives_filtered_out"}


@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_draws_are_bounded_and_stop_when_one_passes(num_samples: int) -> None:
    for item in QUESTIONS[:12]:
        for script in (hashed(1), wrong_teacher(0.5), lambda _: BROKEN):
            played = distilled(item, script, num_samples=num_samples)
            own = [call for step in played.steps[::2] for call in step]  # every second step puts the probes
            assert {call.sample_index for call in own} <= set(range(num_samples))
            assert len(own) <= num_samples * sum(call.sample_index == 0 for call in own)
            for passed in played.value.passed:
                later = dataclasses.replace(passed.call, sample_index=passed.call.sample_index + 1)
                assert own.count(later) < own.count(passed.call)


def test_every_item_passes_or_is_dropped_with_a_reason() -> None:
    mismatches = {"label_mismatch", "caption_misses_answer", "positives_filtered_out"}
    seen = set()
    for number, item in enumerate(QUESTIONS):
        played = distilled(item, wrong_teacher(0.6, number), num_samples=2)
        result = played.value
        asked = sum(call.sample_index == 0 for step in played.steps[::2] for call in step)
        items = [drop for drop in result.dropped if drop.reason != "positives_filtered_out"]
        assert len(result.passed) + len(items) == asked
        for drop in result.dropped:
            assert drop.reason in mismatches | set(FailureReason)
            assert drop.question_id == item[2].question_id
            assert len(drop.detail) <= 600
            seen.add(drop.reason)
    assert seen == mismatches | {"invalid_reply"}


@pytest.mark.parametrize("position", [0, 1])
def test_nothing_is_answered_or_judged_when_a_positive_was_refused(position: int) -> None:
    refused = BRIDGED[0][2].support_ids[position]

    def script(call: Call) -> Reply:
        return Judgement(Verdict.FALSE, "") if refused in {p.title for p in call.passages} else truth(call)

    played = distilled(BRIDGED[0], script)
    assert {call.kind for call in played.calls} <= {CallKind.IS_REL_TEXT, CallKind.IS_REL_IMAGE}
    assert {(drop.doc_ids, drop.reason) for drop in played.value.dropped} == {
        ((refused,), "label_mismatch"), (BRIDGED[0][2].support_ids, "positives_filtered_out"),
    }  # fmt: skip


def test_judges_are_not_asked_when_no_answer_passed() -> None:
    played = distilled(QUESTIONS[0], lambda call: BROKEN if call.kind is CallKind.ANSWER else truth(call))
    assert not played.of(CallKind.IS_USE, CallKind.IS_SUP)


def test_bridges_are_is_rel_true_and_is_sup_partial_and_can_be_left_out() -> None:
    for item in BRIDGED:
        bridge = item[2].bridge_ids
        kept = [p for p in distilled(item, truth).value.passed if p.doc_ids == bridge]
        assert {(p.call.kind, p.label) for p in kept} == {
            (CallKind.IS_REL_TEXT, "True"), (CallKind.IS_SUP, "Partial"), (CallKind.ANSWER, "abstain"),
        }  # fmt: skip
        played = distilled(item, truth, bridge_positives=False)
        used = {i for p in (*played.value.passed, *played.value.dropped) for i in p.doc_ids}
        assert not used & set(bridge)
        assert not any(passage.title in bridge for call in played.calls for passage in call.passages)


def test_paper_mode_judges_single_documents_once_and_asks_for_no_refusal() -> None:
    for item in QUESTIONS:
        played = distilled(item, truth, **PAPER)
        judged = played.of(CallKind.IS_USE, CallKind.IS_SUP, CallKind.ANSWER)
        assert {len(call.passages) for call in judged} <= {1}
        assert {call.answer for call in played.of(CallKind.IS_USE, CallKind.IS_SUP)} <= {spoken(item[2].answers)}
        assert {call.sample_index for call in played.calls} == {0}
        assert not any(passed.label == "abstain" for passed in played.value.passed)


def test_contexts_of_several_documents_and_refusals_are_switches() -> None:
    item = BRIDGED[0]
    ours = distilled(item, truth).value.passed
    assert max(len(p.doc_ids) for p in ours) > len(item[2].support_ids)
    silent = distilled(item, truth, refusals=False).value.passed
    assert {p.doc_ids for p in silent if p.label == "abstain"} == {item[2].bridge_ids}
    assert len({p.doc_ids for p in ours if p.label == "abstain"}) > 1


def test_without_its_bridge_a_context_is_not_taught_as_full_support() -> None:
    for item in BRIDGED:
        result = distilled(item, wrong_teacher(0.5), bridge_positives=False).value
        assert all(is_right(p) for p in result.passed if p.call.kind is CallKind.IS_SUP)


def test_refusals_do_not_need_multi_document() -> None:
    passed = distilled(QUESTIONS[0], truth, multi_document=False, refusals=True).value.passed
    assert any(p.label == "abstain" for p in passed)


def test_the_contexts_depend_on_the_seed_and_the_question_alone() -> None:
    assert distilled(BRIDGED[0], truth) == distilled(BRIDGED[0], truth)
    orders = {tuple(p.doc_ids for p in distilled(BRIDGED[0], truth, seed=seed).value.passed) for seed in range(6)}
    assert len(orders) > 1


@pytest.mark.parametrize("options", [{}, PAPER, {"bridge_positives": False}], ids=["ours", "paper", "no bridges"])
def test_the_plan_is_what_a_teacher_that_is_always_right_is_asked(options: dict[str, object]) -> None:
    def shape(call: Call) -> tuple[object, ...]:
        return call.kind, call.title, call.answer, tuple(passage.title for passage in call.passages)

    given = DistillOptions(**options)  # type: ignore[arg-type]
    for item in QUESTIONS:
        planned = planned_calls(material(item, wrong_answers=options != PAPER), given)
        assert Counter(map(shape, planned)) == Counter(map(shape, distilled(item, truth, **options).calls))


def test_the_right_answer_in_a_wrong_form_is_taught_as_of_no_use_and_is_not_put_to_is_sup() -> None:
    for item in QUESTIONS:
        gold = spoken(item[2].answers)
        passed = distilled(item, truth).value.passed
        worded = [p for p in passed if gold in p.call.answer and p.call.answer != gold]
        assert [(p.call.kind, p.label) for p in worded] == [(CallKind.IS_USE, "False")]
        plain = distilled(item, truth, wrong_forms=False).value.passed
        assert [p for p in passed if p not in worded] == list(plain)


def test_answers_may_be_matched_by_f1() -> None:
    gold = spoken(QUESTIONS[0][2].answers)

    def wordy(call: Call) -> Reply:
        right = truth(call)
        return Answer((f"{gold} perhaps",), "") if isinstance(right, Answer) and right.values else right

    def labels(min_f1: float) -> set[str]:
        return {p.label for p in distilled(QUESTIONS[0], wordy, min_f1=min_f1).value.passed}

    assert "answer" not in labels(1.0)
    assert "answer" in labels(0.6)  # one of two words: F1 is 2/3
    assert "answer" not in labels(0.7)


def test_every_row_says_which_checks_it_passed() -> None:
    for item in QUESTIONS:
        for p in distilled(item, truth).value.passed:
            checks = set(p.filters)
            assert "the reply's contract" in checks
            assert (p.label == "answer") == ("answer matches gold" in checks)
            assert (p.label == "abstain") == ("says that it is not stated" in checks)
            if p.call.image and p.label in ("True", "caption"):
                assert "what it says leads to gold" in checks


@pytest.mark.parametrize(
    ("wrong", "field"), [({"num_samples": 0}, "num_samples"), ({"min_f1": 0}, "min_f1"), ({"min_f1": 1.1}, "min_f1")]
)
def test_impossible_options_are_refused(wrong: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        DistillOptions(**wrong)  # type: ignore[arg-type]


def test_the_oracle_abstains_by_the_agreed_words() -> None:
    """Guards the teacher of these tests: an abstention is no answer."""
    assert truth(Call(CallKind.ANSWER, QUESTIONS[0][2].question)) == Answer(
        (), oracle.reply(CallKind.ANSWER, QUESTIONS[0][2].question).reasoning
    )
    assert oracle.reply(CallKind.ANSWER, QUESTIONS[0][2].question).response == NOT_STATED
