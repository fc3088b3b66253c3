"""The figures of a study: what is missing scores 0, order does not matter, equal studies give equal bytes."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluate import evaluate as run_evaluation
from samrag.calls import Answer, Call, CallKind, Caption, Completion, Judgement
from samrag.errors import UserError
from samrag.files import write_json, write_records
from samrag.miniworld import language, oracle, world
from samrag.programs.rag import RagOptions, rag
from samrag.programs.sam_rag import SamRagOptions, sam_rag
from samrag.replies import NOT_STATED
from samrag.report import tables
from samrag.report.arguments import EvaluateArguments
from samrag.report.plots import draw_plots, read_curves
from samrag.report.scores import Cell, CellKey, Checks, Method, Study, evaluate, goals, read_study, score_cell
from samrag.schedule import Schedule, run_all
from samrag.schema import (
    Document,
    Draft,
    ExaminedDocument,
    ExitReason,
    Modality,
    Question,
    Trace,
    Usage,
    Verdict,
)

CLUBS = world.draw_clubs(world.Split.TEST, 12, seed=1)
EMBLEMS = {f"images/{i}.png": club.emblem for i, club in enumerate(CLUBS)}
MAIN = CellKey("sam_rag-Rstar-Mstar", Method.SAM_RAG, "R*", "M*", Checks.ALL)
KEYS = (
    MAIN,
    CellKey("rag-Rstar-Mstar", Method.RAG, "R*", "M*", Checks.RAG),
    CellKey("rag-R-M", Method.RAG, "R", "M", Checks.RAG),
    CellKey("is_rel", Method.SAM_RAG, "R*", "M*", Checks.IS_REL),
    CellKey("no_is_sup", Method.SAM_RAG, "R*", "M*", Checks.NO_IS_SUP),
    CellKey("no_is_use", Method.SAM_RAG, "R*", "M*", Checks.NO_IS_USE),
)
RECALL = tuple(
    {"ranker": r, "n": n, "recall": v + n, "recall_ci": [v, v + 20.0]}
    for r, v in (("R", 50.0), ("R*", 60.0))
    for n in (1, 8)
)


def _world() -> tuple[list[Document], list[Question]]:
    documents, questions = [], []
    for i, club in enumerate(CLUBS):
        documents += [
            Document(f"c{i}", Modality.TEXT, club.name, language.club_text(club)),
            Document(f"f{i}", Modality.TEXT, club.founder.name, language.founder_text(club)),
            Document(f"e{i}", Modality.IMAGE, club.name + language.EMBLEM, image=f"images/{i}.png"),
        ]
        asked = (
            (language.Relation.TOWN, club.town, (f"c{i}",), Modality.TEXT),
            (language.Relation.JOB, club.founder.job, (f"c{i}", f"f{i}"), Modality.TEXT),
            (language.Relation.COLOUR, club.emblem.colour, (f"e{i}",), Modality.IMAGE),
        )
        for relation, value, supports, modality in asked:
            text = language.ask(relation, club.name, 0)
            questions.append(
                Question(f"q{i}-{relation}", text, (value,), "", "test", supports, supports[-1:], (), (modality,))
            )
    return documents, questions


class Oracle:
    """Answers calls as the oracle does; a share of its answers is wrong."""

    def __init__(self, error_rate: float, seed: str) -> None:
        self.error_rate = error_rate
        self.rng = random.Random(seed)

    async def complete(self, calls: Sequence[Call]) -> list[Completion]:
        return [self._one(call) for call in calls]

    def _one(self, call: Call) -> Completion:
        right = oracle.reply(call.kind, call.question, call.passages, call.title, EMBLEMS.get(call.image), call.answer)
        usage = Usage(1, 0, 0, 10, 5)
        if call.kind is CallKind.CAPTION_QUERY:
            return Completion(Caption(right.response), usage)
        if call.kind is not CallKind.ANSWER:
            return Completion(Judgement(Verdict(right.response), right.reasoning), usage)
        values = () if right.response == NOT_STATED else (right.response,)
        wrong = values and self.rng.random() < self.error_rate
        return Completion(Answer(("nonsense",) if wrong else values, right.reasoning), usage)


def _traces(key: CellKey, documents: list[Document], questions: list[Question], error_rate: float) -> tuple[Trace, ...]:
    options = SamRagOptions(is_use=key.checks is Checks.ALL, is_sup=key.checks is not Checks.NO_IS_SUP)
    programs = []
    for question in questions:
        ranking = sorted(documents, key=lambda d: (d.doc_id not in question.support_ids, d.doc_id))[:10]
        sam = key.method is Method.SAM_RAG
        programs.append(sam_rag(question, ranking, options) if sam else rag(question, ranking, RagOptions()))
    results = run_all(programs, Oracle(error_rate, key.name), Schedule.LOCKSTEP)
    return tuple(replace(result.value, usage=result.usage) for result in results)


@pytest.fixture(scope="module")
def study() -> Study:
    documents, questions = _world()
    rates = {MAIN: 0.1}
    cells = tuple(Cell(key, _traces(key, documents, questions, rates.get(key, 0.4))) for key in KEYS)
    return Study(cells, tuple(questions), {d.doc_id: d for d in documents}, Path(), RECALL, teacher_is_simulated=True)


def _write(study: Study, folder: Path, shuffle: int = 0) -> Path:
    """Write a study folder, traces in an order of their own."""
    write_records(folder / "questions.jsonl", study.questions)
    write_records(folder / "documents.jsonl", study.documents.values())
    for cell in study.cells:
        traces = list(cell.traces)
        random.Random(shuffle).shuffle(traces)
        write_records(folder / "cells" / cell.key.name / "traces.jsonl", traces)
    write_json(folder / "retrieval.json", {"rows": list(study.retrieval)})
    cells = [
        {f: getattr(cell.key, f) for f in ("name", "method", "retriever", "student", "checks")} for cell in study.cells
    ]
    places = {"questions": "questions.jsonl", "documents": "documents.jsonl", "image_root": "."}
    write_json(folder / "study.json", {"cells": cells, **places, "teacher_is_simulated": True})
    return folder


def _with_main(study: Study, change: Callable[[tuple[Trace, ...]], tuple[Trace, ...]]) -> Study:
    """The study with other traces in the main cell."""
    first, *others = study.cells
    return replace(study, cells=(Cell(first.key, change(first.traces)), *others))


def test_missing_predictions_score_zero_and_are_counted(study: Study) -> None:
    scores = score_cell(study.questions, study.cells[0])
    dropped = [score.question.question_id for score in scores if score.em == 1][:5]
    row = evaluate(_with_main(study, lambda t: tuple(x for x in t if x.question_id not in dropped)))["table2"][0]
    before = evaluate(study)["table2"][0]
    assert before["em"] - row["em"] == pytest.approx(100 * 5 / len(study.questions), abs=1e-3)
    assert (before["missing"], row["missing"], row["n"]) == (0, 5, len(study.questions))
    assert row["abstained"] == before["abstained"]


def test_a_cell_without_any_trace_scores_zero_and_has_no_cost(study: Study) -> None:
    row = evaluate(_with_main(study, lambda _: ()))["table2"][0]
    assert row["em"] == row["f1"] == row["squad_em"] == 0
    assert row["arn"] is None and row["calls"] is None


def test_the_order_of_traces_changes_nothing(study: Study) -> None:
    assert evaluate(_with_main(study, lambda traces: traces[::-1])) == evaluate(study)


def test_an_abstention_scores_zero_even_where_gold_normalises_to_nothing() -> None:
    question = Question("q", "Which article?", ("the",), "", "test")
    trace = Trace("q", "sam_rag", (), ExitReason.NO_EVIDENCE, ())
    (score,) = score_cell([question], Cell(MAIN, (trace,)))
    assert (score.em, score.f1, score.squad_em, score.squad_f1) == (0, 0, 0, 0)
    assert score.abstained


def test_an_engine_failure_is_no_abstention() -> None:
    question = Question("q", "Which?", ("x",), "", "test")
    (score,) = score_cell([question], Cell(MAIN, (Trace("q", "sam_rag", (), ExitReason.ENGINE_FAILURE, ()),)))
    assert not score.abstained


def test_traces_of_unknown_or_repeated_questions_are_refused(study: Study) -> None:
    with pytest.raises(UserError, match="'stranger'"):
        evaluate(_with_main(study, lambda t: (replace(t[0], question_id="stranger"), *t[1:])))
    with pytest.raises(UserError, match=f"'{study.questions[0].question_id}' has two traces"):
        evaluate(_with_main(study, lambda t: (*t, t[0])))
    with pytest.raises(UserError, match="no gold answers"):
        score_cell([Question("q", "?", (), "", "test")], Cell(MAIN, ()))


def test_right_answers_alone_give_100_without_spread_and_gold_arn_is_the_mean_support(study: Study) -> None:
    perfect = {q.question_id: q for q in study.questions}
    metrics = evaluate(
        _with_main(
            study,
            lambda traces: tuple(
                replace(t, answers=perfect[t.question_id].answers, context_ids=perfect[t.question_id].support_ids)
                for t in traces
            ),
        )
    )
    row = metrics["table2"][0]
    assert row["em"] == row["f1"] == row["squad_em"] == row["squad_f1"] == 100
    assert row["em_ci"] == [100, 100]
    arns = {(r["system"], r["modality"]): r["arn"] for r in metrics["table4"]}
    assert arns["gold", "text"] == 1.5 and arns["gold", "image"] == 1
    assert all(arns["sam_rag", modality] == arns["gold", modality] for modality in ("all", "text", "image"))


CLIMB_KEYS = tuple(
    CellKey(f"{checks}-{student}", Method.CLIMB, "R*", student, checks)
    for student in ("M*", "G")
    for checks in (Checks.NO_CRITIC, Checks.CLIMB)
)


def test_climb_stands_beside_its_ablations_and_beside_sam_rag_of_the_same_generator(study: Study) -> None:
    traces = study.cells[0].traces
    abstained = tuple(replace(trace, answers=()) for trace in traces)
    cells = tuple(Cell(key, traces if key.checks is Checks.CLIMB else abstained) for key in CLIMB_KEYS)
    figures = evaluate(replace(study, cells=(*study.cells, *cells)))
    rows = figures["climb"]
    assert [(row["student"], row["checks"]) for row in rows] == [
        ("M*", "full"), ("M*", "without critic"), ("M*", "SAM-RAG"), ("G", "full"), ("G", "without critic"),
    ]  # fmt: skip
    full, without, sam_rag = rows[:3]
    assert (full["delta_em"], full["p_value"], full["calls"]) == (0.0, None, sam_rag["calls"])
    assert (without["em"], without["delta_em"]) == (0.0, -full["em"])
    assert (sam_rag["em"], sam_rag["delta_em"], sam_rag["p_value"]) == (full["em"], 0.0, 1.0)
    assert [row["method"] for row in figures["table2"]].count("climb") == 2
    assert evaluate(study)["climb"] == []
    for name in ("table3", "goals"):
        assert figures[name] == evaluate(study)[name]


def _climb_trace(question: Question, right: bool, first: float, last: float, seen: Sequence[str]) -> Trace:
    answers = question.answers if right else ("something else",)
    drafts = tuple(Draft(answers, "", tuple(seen), 0, confidence=u) for u in (first, last))
    examined = tuple(ExaminedDocument(doc_id, 0, True) for doc_id in seen)
    return Trace(
        question.question_id,
        "climb",
        answers,
        ExitReason.MAX_ITERATIONS,
        tuple(seen[:1]),
        examined,
        drafts,
        confidence=last,
    )


def test_confidence_stands_by_bins_and_wrong_answers_by_the_step_that_failed(study: Study) -> None:
    """Right answers at U = 0.95, wrong ones at 0.6: AUROC is 1, and each wrong answer has one place."""
    questions = study.questions[:4]
    single = [question for question in study.questions if len(set(question.support_ids)) == 1][:1]
    asked = tuple({q.question_id: q for q in (*questions, *single)}.values())
    traces = [
        _climb_trace(question, right=i > 1, first=0.5, last=0.95 if i > 1 else 0.6, seen=("nowhere",))
        for i, question in enumerate(asked)
    ]
    wrong = _climb_trace(single[0], False, 0.6, 0.6, single[0].support_ids)
    traces = [wrong if trace.question_id == wrong.question_id else trace for trace in traces]
    key = next(key for key in CLIMB_KEYS if key.checks is Checks.CLIMB)
    figures = evaluate(replace(study, questions=asked, cells=(Cell(key, tuple(traces)),), retrieval=()))
    *bins, every = figures["confidence"]
    assert [row["confidence"] for row in bins] == ["0.00 to 0.70", "0.70 to 0.80", "0.80 to 0.90", "0.90 to 1.00"]
    num_wrong = len([trace for trace in traces if trace.answers == ("something else",)])
    assert [row["n"] for row in bins] == [num_wrong, 0, 0, len(asked) - num_wrong]
    assert [row["accuracy"] for row in bins] == [0, None, None, 100]
    assert (every["auroc"], every["n"]) == (100, len(asked))
    (failing,) = figures["climb_failing"]
    assert failing["wrong"] == num_wrong == failing["not_in_pool"] + failing["with_evidence"]
    assert (failing["with_evidence"], failing["not_in_context"]) == (1, 0)
    misled = figures["climb_misled"]
    assert len(misled) == failing["rose"] == failing["not_in_pool"]
    assert all((row["first"], row["last"], row["place"]) == (0.5, 0.6, "not_in_pool") for row in misled)
    assert {"confidence", "climb_failing", "climb_misled"} <= {table.name for table in tables.study_tables(figures)}
    assert "confidence" in draw_plots(figures)
    assert evaluate(study)["confidence"] == [] and "confidence" not in draw_plots(evaluate(study))


def test_an_ablation_with_the_same_answers_differs_by_nothing(study: Study) -> None:
    cells = tuple(Cell(cell.key, study.cells[0].traces) for cell in study.cells)
    rows = evaluate(replace(study, cells=cells))["table3"]
    assert [row["checks"] for row in rows] == ["RAG", "with is_rel", "without is_sup", "without is_use", "all"]
    assert all(row["delta_em"] == 0 for row in rows)
    assert [row["p_value"] for row in rows] == [1, 1, 1, 1, None]


@pytest.mark.parametrize(
    ("ems", "reached"), [((75, 65, 50), (True, True, True)), ((69.9, 65, 50), (False, False, False))]
)
def test_accuracy_goals_follow_the_rows(ems: tuple[float, ...], reached: tuple[bool, ...]) -> None:
    systems = [("sam_rag", "R*", "M*"), ("rag", "R*", "M*"), ("rag", "R", "M")]
    rows = [{"method": m, "retriever": r, "student": s, "em": em} for (m, r, s), em in zip(systems, ems, strict=True)]
    result = goals({"table2": rows, "table3": [], "table4": [], "retrieval": []})
    assert tuple(goal["reached"] for goal in result[:3]) == reached
    assert all(goal["measured"] == "not measured" and goal["reached"] is None for goal in result[3:])


@pytest.mark.parametrize(("arn", "reached"), [(1.0, True), (1.25, True), (0.75, True), (1.26, False), (0.7, False)])
def test_the_arn_goal_is_a_band_around_gold(arn: float, reached: bool) -> None:
    rows = [{"system": s, "modality": "image", "arn": v} for s, v in (("gold", 1.0), ("sam_rag", arn))]
    result = goals({"table2": [], "table3": [], "table4": rows, "retrieval": []})
    assert [goal["reached"] for goal in result[4:7]] == [None, None, reached]


def test_one_n_where_the_tuned_retriever_is_worse_misses_the_goal() -> None:
    rows = [dict(row) for row in RECALL]
    tables_of = {"table2": [], "table3": [], "table4": []}
    assert goals({**tables_of, "retrieval": rows})[-1]["reached"] is True
    rows[-1]["recall"] = 1.0
    assert goals({**tables_of, "retrieval": rows})[-1]["reached"] is False


@pytest.mark.parametrize(("best_other", "reached"), [(70.0, True), (76.0, True), (76.1, False)])
def test_the_ablation_goal_takes_ties_within_the_interval(best_other: float, reached: bool) -> None:
    rows = [{"checks": checks.label, "em": 40.0, "em_ci": [30.0, 50.0]} for checks in Checks]
    rows[2]["em"] = best_other
    rows[4] |= {"em": 71.0, "em_ci": [66.0, 76.0]}
    result = goals({"table2": [], "table3": rows, "table4": [], "retrieval": []})
    assert result[3]["reached"] is reached


def test_equal_studies_give_equal_bytes_and_every_file_is_written(study: Study, tmp_path: Path) -> None:
    outputs = []
    for run in range(2):
        folder, output = _write(study, tmp_path / f"study{run}", shuffle=run), tmp_path / f"out{run}"
        run_evaluation(EvaluateArguments(str(folder), str(output), max_traces=5))
        outputs.append(output)
    first, second = outputs
    names = {str(p.relative_to(first)) for p in first.rglob("*") if p.is_file()}
    assert names >= {"metrics.json", "tables.md", "tables/table2.csv", "plots/accuracy.svg", "report.html", "run.json"}
    for name in names - {"run.json"}:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert json.loads((first / "metrics.json").read_text()) == evaluate(study)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"83"'])
def test_a_recall_that_is_no_finite_number_is_refused(study: Study, tmp_path: Path, value: str) -> None:
    folder = _write(study, tmp_path)
    (folder / "retrieval.json").write_text(f'{{"rows": [{{"ranker": "R", "n": 1, "recall": {value}}}]}}')
    with pytest.raises(UserError, match="finite number"):
        read_study(folder)


def test_a_cell_without_its_file_gets_no_row_and_a_twin_is_refused(study: Study, tmp_path: Path) -> None:
    folder = _write(study, tmp_path)
    (folder / "cells" / MAIN.name / "traces.jsonl").unlink()
    metrics = evaluate(read_study(folder))
    assert all(row["method"] == "rag" for row in metrics["table2"])
    assert metrics["goals"][0]["reached"] is None
    described = json.loads((folder / "study.json").read_text())
    twin = {**described["cells"][0], "name": "b"}
    write_json(folder / "study.json", {**described, "cells": [*described["cells"], twin]})
    with pytest.raises(UserError, match="occurs twice"):
        read_study(folder)


def test_csv_holds_the_numbers_of_the_rows_and_markdown_one_line_a_row(study: Study) -> None:
    metrics = evaluate(study)
    table = next(t for t in tables.study_tables(metrics) if t.name == "table2")
    for read, row in zip(csv.DictReader(io.StringIO(tables.to_csv(table))), metrics["table2"], strict=True):
        wanted = [row["em"], *row["em_ci"], row["calls"]]
        assert [float(read[key]) for key in ("em", "em_low", "em_high", "calls")] == wanted
    (shown,) = tables.readable([table])
    lines = [line for line in tables.to_markdown(shown).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(metrics["table2"])
    assert len({line.count("|") for line in lines}) == 1
    assert "SAM-RAG(R\\*+M\\*)" in lines[2]
    assert tables.with_interval(71, (66.06, 75.94)) == "71.0 [66.1, 75.9]"


def test_curves_are_named_by_their_run_and_need_losses(tmp_path: Path) -> None:
    path = tmp_path / "sft" / "checkpoint-3" / "trainer_state.json"
    write_json(path, {"log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "train_runtime": 1.0}]})
    assert read_curves([path]) == {"sft": ({"step": 1, "loss": 2.0},)}
    write_json(path, {"log_history": []})
    with pytest.raises(UserError, match="no log_history"):
        read_curves([path])
