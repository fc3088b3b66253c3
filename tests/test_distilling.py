"""Replies that passed become rows: forms, balance, caps, provenance, and what the quarantine says."""

from __future__ import annotations

from collections import Counter

import pytest

from samrag.arguments import DistillArguments, TeacherArguments
from samrag.calls import Answer, Call, CallKind, Caption, FailureReason, Judgement, Passage
from samrag.distilling import draw_wrong_answers, options_of, quarantined, rows_of
from samrag.programs.distill import Distilled, Passed
from samrag.prompts import PromptStyle, template_hash
from samrag.replies import parse
from samrag.report.data_card import SWITCHES, data_card
from samrag.schema import DroppedItem, Question, Usage, Verdict


def arguments(**given: object) -> DistillArguments:
    paths = ("questions_file", "documents_file", "image_root", "index_dir", "embedder", "output_dir")
    return DistillArguments(**{**dict.fromkeys(paths, "x"), **given})  # type: ignore[arg-type]


def judged(number: int, verdict: Verdict, kind: CallKind = CallKind.IS_REL_TEXT) -> Passed:
    call = Call(kind, f"Question {number}?", (Passage("T", f"text {number}"),))
    return Passed(call, (f"d{number}",), Judgement(verdict, f"because {number}"), ("verdict",))


RESULTS = [
    Distilled(
        f"q{i}",
        (
            judged(i, Verdict.TRUE if i % 5 == 0 else Verdict.FALSE),
            judged(i, (Verdict.TRUE, Verdict.PARTIAL, Verdict.FALSE)[i % 3], CallKind.IS_SUP),
            Passed(Call(CallKind.ANSWER, f"Question {i}?", (Passage("T", "x"),)), ("d",), Answer(("a",), "because")),
            Passed(Call(CallKind.CAPTION_QUERY, "?", title="T", image="i.png"), ("d",), Caption("a picture")),
        ),
        (),
    )
    for i in range(30)
]


def rows(**given: object):
    return rows_of(RESULTS, arguments(**given), "teacher", lambda call: f"key of {call.question}")


def test_direct_rows_teach_the_verdict_alone_beside_every_reasoned_one() -> None:
    made = rows(max_class_ratio=None)
    direct, reasoned = [r for r in made if r.direct], [r for r in made if not r.direct and r.kind.startswith("is_")]
    assert [(r.kind, r.question_id, r.label) for r in direct] == [(r.kind, r.question_id, r.label) for r in reasoned]
    for one, other in zip(direct, reasoned, strict=True):
        assert parse(CallKind(one.kind), one.messages[1].content) == Judgement(Verdict(one.label), "")
        assert parse(CallKind(other.kind), other.messages[1].content).reasoning  # type: ignore[union-attr]
        assert one.messages[0] != other.messages[0]
    assert not any(r.direct for r in rows(direct_verdicts=False))


def test_no_class_is_larger_than_the_ratio_times_the_smallest_of_its_kind_and_form() -> None:
    counts = Counter((r.kind, r.direct, r.label) for r in rows(max_class_ratio=2.0))
    for direct in (False, True):
        assert counts[CallKind.IS_REL_TEXT, direct, "True"] == 6
        assert counts[CallKind.IS_REL_TEXT, direct, "False"] == 12
        assert {counts[CallKind.IS_SUP, direct, v] for v in ("True", "Partial", "False")} == {10}
    assert counts[CallKind.ANSWER, False, "answer"] == 30


def test_caps_and_balance_keep_the_order_and_depend_on_the_seed() -> None:
    everything = rows(max_class_ratio=None)
    capped = rows(max_class_ratio=2.0, max_per_kind=8)
    assert max(Counter(r.kind for r in capped).values()) == 8
    positions = [everything.index(r) for r in capped]
    assert positions == sorted(positions)
    assert capped == rows(max_class_ratio=2.0, max_per_kind=8)
    assert capped != rows(max_class_ratio=2.0, max_per_kind=8, seed=1)


def test_every_row_knows_where_it_comes_from() -> None:
    for row in rows():
        assert row.call_key.startswith("key of")
        assert row.teacher == "teacher"
        assert row.teacher_template == template_hash(PromptStyle.TEACHER, CallKind(row.kind))
        assert row.template == template_hash(PromptStyle.STUDENT, CallKind(row.kind))


def test_quarantine_holds_what_had_no_usable_reply_with_a_command_that_tries_again() -> None:
    dropped = [
        DroppedItem("q1", "answer", ("d",), str(FailureReason.INVALID_REPLY)),
        DroppedItem("q2", "answer", ("d",), "label_mismatch"),
    ]
    (item,) = quarantined(dropped, "python data_gen/distill.py --config c.yaml")
    assert item.question_id == "q1"
    assert item.replay == ("python data_gen/distill.py --config c.yaml --question_ids q1 --output_dir replay/q1")


def test_the_card_counts_rows_yield_and_reasons_and_explains_every_switch() -> None:
    made = rows()
    dropped = [DroppedItem("q", "answer", (), "label_mismatch")] * 2
    refused = {("answer", "label_mismatch"): 10}
    usage, teacher = Usage(40, 0, 1, 100, 50), TeacherArguments(store="s")
    card = data_card(made, Counter({"answer": 30}), dropped, refused, usage, arguments(), teacher, 30)
    assert "| answer | 30 | 2 | 93.8 | 10 | 25.0 |" in card
    assert "| answer | label_mismatch | 10 |" in card
    assert "| answer | label_mismatch | 2 |" in card
    for name in SWITCHES:
        assert f"| `{name}` | {getattr(arguments(), name)} |" in card


def test_options_reach_the_recipe_by_their_names() -> None:
    options = options_of(arguments(num_samples=7, min_f1=0.5, wrong_forms=False))
    assert (options.num_samples, options.min_f1, options.wrong_forms) == (7, 0.5, False)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_answers_are_never_gold_and_prefer_questions_that_begin_alike(count: int) -> None:
    questions = [Question(f"q{i}", f"Which sport {i}?", (f"a{i}",), "TextQ", "train") for i in range(6)]
    drawn = draw_wrong_answers(questions[0], questions, count, 0)
    assert len(drawn) == len(set(drawn)) == count
    assert "a0" not in drawn
