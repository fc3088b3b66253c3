"""The figures of a study: scores per question, their means and intervals, the paper's tables, and the goals reached.

Everything is taken in the order of the questions, so the order of the traces changes nothing, and a seed fixes every
resampling: equal studies give equal figures, to the last byte of `metrics.json`.

A question without a trace scores 0 and is counted as missing; an empty list of answers scores 0. What an answer cost
(calls, tokens, documents) is a mean over the questions that have a trace: a run that never took place has no cost.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from samrag.errors import UserError
from samrag.files import read_json, read_records, within
from samrag.metrics.answers import mmqa_list_em, mmqa_list_f1, squad_em, squad_f1, squad_join
from samrag.metrics.retrieval import mean_arn, mean_arn_answered, mean_documents_examined
from samrag.metrics.significance import bootstrap_interval, paired_permutation_test
from samrag.report.confidence import bin_rows, failing_row, misled_rows
from samrag.schema import Document, ExitReason, Modality, Question, Trace

TUNED = ("R*", "M*")
"""Retriever and student of the system the paper proposes."""
MIN_EM = 70.0
"""Exact match that SAM-RAG(R*+M*) should reach, x 100."""
MIN_LEAD_OVER_RAG = 5.0
"""Points of EM it should lie above RAG(R*+M*)."""
MIN_LEAD_OVER_UNTUNED = 20.0
"""Points of EM it should lie above RAG(R+M)."""
MAX_ARN_DEVIATION = 0.25
"""Share by which its ARN may differ from the gold one."""

log = logging.getLogger(__name__)
Row = dict[str, Any]
"""A line of a table in `metrics.json`: plain values under names, as they are written."""


class Method(StrEnum):
    """Which program made a cell's traces."""

    RAG = "rag"
    SAM_RAG = "sam_rag"
    CLIMB = "climb"

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        return self.upper().replace("_", "-")


class Checks(StrEnum):
    """Which verifications, and which steps of CLIMB, were on."""

    RAG = "rag"
    IS_REL = "is_rel"
    NO_IS_SUP = "no_is_sup"
    NO_IS_USE = "no_is_use"
    ALL = "all"
    CLIMB = "climb"
    NO_POOL = "no_pool"
    NO_CRITIC = "no_critic"
    NO_ITERATION = "no_iteration"
    NO_FACET = "no_facet"

    @property
    def label(self) -> str:
        """Name in the ablation table."""
        return _CHECK_LABELS[self]


_CHECK_LABELS = {
    Checks.RAG: "RAG",
    Checks.IS_REL: "with is_rel",
    Checks.NO_IS_SUP: "without is_sup",
    Checks.NO_IS_USE: "without is_use",
    Checks.ALL: "all",
    Checks.CLIMB: "full",
    Checks.NO_POOL: "without pool",
    Checks.NO_CRITIC: "without critic",
    Checks.NO_ITERATION: "without iteration",
    Checks.NO_FACET: "without facet diagnosis",
}
SAM_RAG_CHECKS = (Checks.RAG, Checks.IS_REL, Checks.NO_IS_SUP, Checks.NO_IS_USE, Checks.ALL)
"""The rows of SAM-RAG's Table 3."""
CLIMB_CHECKS = (Checks.CLIMB, Checks.NO_POOL, Checks.NO_CRITIC, Checks.NO_ITERATION, Checks.NO_FACET)
"""The rows of CLIMB's Table 2."""


@dataclass(frozen=True, slots=True)
class CellKey:
    """What was run in a cell."""

    name: str
    method: Method
    retriever: str
    student: str
    checks: Checks

    @property
    def label(self) -> str:
        """The paper's notation, such as SAM-RAG(R*+M*)."""
        return f"{self.method.label}({self.retriever}+{self.student})"


@dataclass(frozen=True, slots=True)
class Cell:
    """One system of the study and its traces, in any order."""

    key: CellKey
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """A study folder, read."""

    cells: tuple[Cell, ...]
    questions: tuple[Question, ...]
    documents: Mapping[str, Document]
    image_root: Path
    retrieval: tuple[Row, ...] = ()
    teacher_is_simulated: bool = False


@dataclass(frozen=True, slots=True)
class _StudyFile:
    """`study.json`."""

    cells: tuple[CellKey, ...]
    questions: str
    documents: str
    image_root: str
    teacher_is_simulated: bool


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """How one system did on one question; every score is between 0 and 1."""

    question: Question
    trace: Trace | None
    """None: the study has no trace of it."""
    em: float = 0.0
    """Official MultiModalQA list EM."""
    f1: float = 0.0
    """Official MultiModalQA list F1."""
    squad_em: float = 0.0
    squad_f1: float = 0.0

    @property
    def abstained(self) -> bool:
        """Whether the program gave no answer of its own will; an engine's failure is no abstention."""
        trace = self.trace
        return trace is not None and not trace.answers and trace.exit_reason is not ExitReason.ENGINE_FAILURE


# --- reading ---


def study_inputs(folder: Path) -> list[Path]:
    """The files and folders that a study's figures are made from: the folder itself, questions and documents."""
    folder = Path(folder)
    described = _study_file(folder)
    return [folder, _located(folder, described.questions), _located(folder, described.documents)]


def read_study(folder: Path) -> Study:
    """Read a study folder. A cell whose traces are not there yet is left out with a warning.

    Raises:
        UserError: a file is missing or broken, two cells are the same, or a figure is not finite.
    """
    folder = Path(folder)
    described = _study_file(folder)
    cells = []
    for key in described.cells:
        path = within(folder / "cells", key.name) / "traces.jsonl"
        if path.is_file():
            cells.append(Cell(key, tuple(read_records(path, Trace))))
        else:
            log.warning("cell %s has no traces (%s is not there): it gets no row.", key.name, path)
    documents = read_records(_located(folder, described.documents), Document)
    return Study(
        cells=tuple(cells),
        questions=tuple(read_records(_located(folder, described.questions), Question)),
        documents={document.doc_id: document for document in documents},
        image_root=_located(folder, described.image_root),
        retrieval=_read_retrieval(folder / "retrieval.json"),
        teacher_is_simulated=described.teacher_is_simulated,
    )


def _study_file(folder: Path) -> _StudyFile:
    path = folder / "study.json"
    try:
        described = TypeAdapter(_StudyFile).validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}, {where}: {first['msg']}.") from error
    for what in ([key.name for key in described.cells], [_system(key) for key in described.cells]):
        repeated = next((item for item, count in Counter(what).items() if count > 1), None)
        if repeated is not None:
            raise UserError(f"{path}: the cell {repeated!r} occurs twice; remove one of them.")
    return described


def _system(key: CellKey) -> tuple[str, ...]:
    return (key.method, key.retriever, key.student, key.checks)


def _located(folder: Path, path: str) -> Path:
    """A path named in `study.json`: as given, or else from the study folder."""
    return Path(path) if Path(path).exists() or not (folder / path).exists() else folder / path


def _read_retrieval(path: Path) -> tuple[Row, ...]:
    if not path.is_file():
        log.warning("%s is not there: the report has no recall figures.", path)
        return ()
    content = read_json(path)
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise UserError(f'{path}: an object with a list "rows" is wanted; run the retrieval stage again.')
    for number, row in enumerate(rows):
        _check_retrieval_row(f"{path}, rows.{number}", row)
    return tuple(rows)


def _check_retrieval_row(where: str, row: object) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("ranker"), str) or type(row.get("n")) is not int:
        raise UserError(f"{where}: an object with ranker (text), n (integer) and recall (number) is wanted.")
    interval = row.get("recall_ci")
    if interval is not None and (not isinstance(interval, list) or len(interval) != 2):
        raise UserError(f"{where}, recall_ci: {interval!r} is no pair of numbers.")
    for value in (row.get("recall"), *(interval or ())):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{where}, recall: {value!r} is no finite number; run the retrieval stage again.")


# --- scores per question ---


def score_cell(questions: Sequence[Question], cell: Cell) -> tuple[QuestionScore, ...]:
    """Score a cell's traces, one record a question, in the order of the questions.

    Raises:
        UserError: there are no questions, one has no gold answers, or a trace is of an unknown question or the second
            of its question.
    """
    if not questions:
        raise UserError("the study has no questions; there is nothing to score.")
    known = {question.question_id for question in questions}
    traces: dict[str, Trace] = {}
    for trace in cell.traces:
        if trace.question_id not in known:
            raise UserError(
                f"cell {cell.key.name}: a trace answers question {trace.question_id!r}, which is not in the study's "
                "question file; the traces are of another one."
            )
        if trace.question_id in traces:
            raise UserError(f"cell {cell.key.name}: question {trace.question_id!r} has two traces; remove one of them.")
        traces[trace.question_id] = trace
    return tuple(_score(question, traces.get(question.question_id)) for question in questions)


def _score(question: Question, trace: Trace | None) -> QuestionScore:
    if not question.answers:
        raise UserError(f"question {question.question_id!r} has no gold answers; score a split that has labels.")
    if trace is None or not trace.answers:
        return QuestionScore(question, trace)
    said, gold = squad_join(trace.answers), [squad_join(question.answers)]
    return QuestionScore(
        question,
        trace,
        em=mmqa_list_em(trace.answers, question.answers),
        f1=mmqa_list_f1(trace.answers, question.answers),
        squad_em=squad_em(said, gold),
        squad_f1=squad_f1(said, gold),
    )


def modality_of(question: Question) -> str:
    """`text` or `image` when all supports are, else `mixed`."""
    kinds = set(question.modalities)
    return str(next(iter(kinds))) if len(kinds) == 1 else "mixed"


# --- tables ---


def evaluate(study: Study, seed: int = 0) -> Row:
    """All figures of a study, ready for `metrics.json`.

    Raises:
        UserError: see `score_cell`.
    """
    scored = [(cell.key, score_cell(study.questions, cell)) for cell in study.cells]
    retrieval = [dict(row) for row in study.retrieval]
    tables = {
        "table2": [_system_row(k, s, seed) for k, s in scored if k.checks is _full_checks(k.method)],
        "table3": _ablation_rows(scored, seed),
        "table4": _context_rows(study.questions, scored, seed),
        "climb": _climb_rows(scored, seed),
        **_confidence_tables(scored),
        "retrieval": retrieval,
    }
    return {
        "num_questions": len(study.questions),
        "teacher_is_simulated": study.teacher_is_simulated,
        "goals": goals(tables),
        **tables,
        "exit_reasons": {key.name: _exit_reasons(scores) for key, scores in scored},
    }


Scored = Sequence[tuple[CellKey, tuple[QuestionScore, ...]]]


def _full_checks(method: Method) -> Checks:
    """The checks of a method's own row; the others are its ablations."""
    return {Method.RAG: Checks.RAG, Method.SAM_RAG: Checks.ALL, Method.CLIMB: Checks.CLIMB}[method]


def _tuned(scored: Scored, method: Method, checks: Checks) -> tuple[QuestionScore, ...] | None:
    """Scores of an R*+M* cell."""
    for key, scores in scored:
        if (key.method, key.checks, key.retriever, key.student) == (method, checks, *TUNED):
            return scores
    return None


def _system_row(key: CellKey, scores: Sequence[QuestionScore], seed: int) -> Row:
    traces = [score.trace for score in scores if score.trace is not None]
    usages = [trace.usage for trace in traces]
    return {
        "method": str(key.method),
        "retriever": key.retriever,
        "student": key.student,
        **_with_interval("em", [score.em for score in scores], seed),
        **_with_interval("f1", [score.f1 for score in scores], seed),
        "squad_em": _percent([score.squad_em for score in scores]),
        "squad_f1": _percent([score.squad_f1 for score in scores]),
        "arn": _rounded(mean_arn(traces)) if traces else None,
        "arn_answered": _rounded(mean_arn_answered(traces)) if traces else None,
        "documents_examined": _rounded(mean_documents_examined(traces)) if traces else None,
        "calls": _mean([usage.calls for usage in usages]),
        "input_tokens": _mean([usage.input_tokens for usage in usages]),
        "output_tokens": _mean([usage.output_tokens for usage in usages]),
        "failures": _mean([usage.failures for usage in usages]),
        "abstained": sum(score.abstained for score in scores),
        "engine_failures": sum(trace.exit_reason is ExitReason.ENGINE_FAILURE for trace in traces),
        "missing": len(scores) - len(traces),
        "n": len(scores),
    }


def _ablation_rows(scored: Scored, seed: int) -> list[Row]:
    """Table 3: what each check is worth, against all of them, on the same questions."""
    cells = {
        checks: _tuned(scored, Method.RAG if checks is Checks.RAG else Method.SAM_RAG, checks)
        for checks in SAM_RAG_CHECKS
    }
    return [
        _ablation_row(checks, scores, cells[Checks.ALL], seed) for checks, scores in cells.items() if scores is not None
    ]


def _ablation_row(
    checks: Checks, scores: Sequence[QuestionScore], full: Sequence[QuestionScore] | None, seed: int
) -> Row:
    """A variant of a method beside the whole of it."""
    ems = [score.em for score in scores]
    delta = None if full is None else _percent(ems, [score.em for score in full])
    tested = full is not None and full is not scores
    p_value = paired_permutation_test(ems, [score.em for score in full or ()], seed) if tested else None
    return {
        "checks": checks.label,
        **_with_interval("em", ems, seed),
        "f1": _percent([score.f1 for score in scores]),
        "delta_em": delta,
        "p_value": None if p_value is None else round(p_value, 6),
    }


def _climb_rows(scored: Scored, seed: int) -> list[Row]:
    """What each step of CLIMB is worth, by retriever and generator, beside SAM-RAG with the same ones."""
    cells = {(key.retriever, key.student, key.checks): scores for key, scores in scored}
    rows = []
    for retriever, student in dict.fromkeys((k.retriever, k.student) for k, _ in scored if k.method is Method.CLIMB):
        full = cells.get((retriever, student, Checks.CLIMB))
        for checks in (*CLIMB_CHECKS, Checks.ALL):
            scores = cells.get((retriever, student, checks))
            if scores is None:
                continue
            calls = [score.trace.usage.calls for score in scores if score.trace is not None]
            row = _ablation_row(checks, scores, full, seed)
            if checks is Checks.ALL:
                row["checks"] = Method.SAM_RAG.label
            rows.append({"retriever": retriever, "student": student, **row, "calls": _mean(calls)})
    return rows


def _confidence_tables(scored: Scored) -> dict[str, list[Row]]:
    """What U is worth in the full CLIMB, by retriever and generator."""
    cells = [(k, s) for k, s in scored if k.checks is Checks.CLIMB]
    systems = [({"retriever": key.retriever, "student": key.student}, scores) for key, scores in cells]
    return {
        "confidence": [{**system, **row} for system, scores in systems for row in bin_rows(scores)],
        "climb_failing": [{**system, **failing_row(scores)} for system, scores in systems],
        "climb_misled": [{**system, **row} for system, scores in systems for row in misled_rows(scores)],
    }


def _context_rows(questions: Sequence[Question], scored: Scored, seed: int) -> list[Row]:
    """Table 4: EM and the size of the final context by modality, beside the gold number of supports."""
    modalities = ("all", *Modality)
    rows: list[Row] = []
    for modality in modalities:
        supports = [len(set(q.support_ids)) for q in questions if modality in ("all", modality_of(q))]
        if supports:
            gold = {"system": "gold", "modality": str(modality), "em": None, "em_ci": None}
            rows.append({**gold, "arn": _mean(supports), "n": len(supports)})
    for method in Method:
        for modality in modalities:
            scores = [
                score
                for score in _tuned(scored, method, _full_checks(method)) or ()
                if modality in ("all", modality_of(score.question))
            ]
            traces = [score.trace for score in scores if score.trace is not None]
            if scores:
                rows.append(
                    {
                        "system": str(method),
                        "modality": str(modality),
                        **_with_interval("em", [score.em for score in scores], seed),
                        "arn": _rounded(mean_arn(traces)) if traces else None,
                        "n": len(scores),
                    }
                )
    return rows


def _exit_reasons(scores: Sequence[QuestionScore]) -> dict[str, int]:
    """How many questions ended for which reason; reasons that did not occur are left out."""
    counts = Counter(score.trace.exit_reason for score in scores if score.trace is not None)
    return {str(reason): counts[reason] for reason in ExitReason if counts[reason]}


# --- goals ---


def goals(tables: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Hold the tables against the goals: `reached` is None where a goal could not be measured."""
    return [
        *_accuracy_goals(tables["table2"]),
        _ablation_goal(tables["table3"]),
        *(_arn_goal(tables["table4"], modality) for modality in ("all", *(str(m) for m in Modality))),
        _recall_goal(tables["retrieval"]),
    ]


def _goal(goal: str, measured: str | None, reached: bool = False) -> Row:
    if measured is None:
        return {"goal": goal, "measured": "not measured", "reached": None}
    return {"goal": goal, "measured": measured, "reached": reached}


def _accuracy_goals(rows: Sequence[Row]) -> list[Row]:
    ems = {(row["method"], row["retriever"], row["student"]): row["em"] for row in rows}
    ours = ems.get((str(Method.SAM_RAG), *TUNED))
    rag, untuned = ems.get((str(Method.RAG), *TUNED)), ems.get((str(Method.RAG), "R", "M"))
    measured = None if ours is None else f"EM {ours:.1f}"
    result = [_goal(f"SAM-RAG(R*+M*) reaches EM {MIN_EM:g}", measured, ours is not None and ours >= MIN_EM)]
    for name, other, lead in (("R*+M*", rag, MIN_LEAD_OVER_RAG), ("R+M", untuned, MIN_LEAD_OVER_UNTUNED)):
        goal = f"SAM-RAG(R*+M*) is at least {lead:g} EM points above RAG({name})"
        if ours is None or other is None:
            result.append(_goal(goal, None))
        else:
            gain = round(ours - other, 4)
            result.append(_goal(goal, f"{gain:+.1f} points ({ours:.1f} against {other:.1f})", gain >= lead))
    return result


def _ablation_goal(rows: Sequence[Row]) -> Row:
    goal = "Ablation: all checks together are best, or the best lies within their interval"
    if len(rows) < len(SAM_RAG_CHECKS):
        return _goal(goal, None)
    full = next(row for row in rows if row["checks"] == Checks.ALL.label)
    best = max((row for row in rows if row is not full), key=lambda row: row["em"])
    low, high = full["em_ci"]
    measured = f"all: EM {full['em']:.1f} [{low:.1f}, {high:.1f}]; best other ({best['checks']}): {best['em']:.1f}"
    return _goal(goal, measured, best["em"] <= max(high, full["em"]))


def _arn_goal(rows: Sequence[Row], modality: str) -> Row:
    scope = "all questions" if modality == "all" else f"{modality} questions"
    goal = f"ARN of SAM-RAG(R*+M*) lies within {MAX_ARN_DEVIATION:.0%} of gold, {scope}"
    arns = {row["system"]: row["arn"] for row in rows if row["modality"] == modality}
    ours, gold = arns.get(str(Method.SAM_RAG)), arns.get("gold")
    if ours is None or not gold:
        return _goal(goal, None)
    deviation = round(ours / gold - 1, 6)
    measured = f"ARN {ours:.2f} against {gold:.2f} ({deviation:+.0%})"
    return _goal(goal, measured, abs(deviation) <= MAX_ARN_DEVIATION)


def _recall_goal(rows: Sequence[Row]) -> Row:
    goal = "R* finds at least as much as R, at every N"
    recalls: dict[str, dict[int, float]] = {}
    for row in rows:
        recalls.setdefault(row["ranker"], {})[row["n"]] = row["recall"]
    tuned, untuned = recalls.get("R*"), recalls.get("R")
    if not tuned or not untuned or set(tuned) != set(untuned):
        return _goal(goal, None)
    gains = {n: tuned[n] - untuned[n] for n in sorted(tuned)}
    measured = ", ".join(f"N={n}: {gain:+.1f}" for n, gain in gains.items())
    return _goal(goal, measured, min(gains.values()) >= 0)


# --- numbers ---


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _percent(values: Sequence[float], minus: Sequence[float] = ()) -> float:
    """Mean x 100, less that of `minus`."""
    mean = math.fsum(values) / len(values) - (math.fsum(minus) / len(minus) if minus else 0.0)
    return round(100 * mean, 4)


def _with_interval(name: str, values: Sequence[float], seed: int) -> Row:
    """A mean x 100 and its 95 % bootstrap interval, under `name` and `name_ci`."""
    low, high = bootstrap_interval(values, seed=seed)
    return {name: _percent(values), f"{name}_ci": [round(100 * low, 4), round(100 * high, 4)]}
