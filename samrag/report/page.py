"""The HTML page of a study: one file, no network, readable on a phone.

Every text of a trace goes through the template's escaping; pictures are data URIs, each held once. What a page shows
is decided here, how it looks in `page.html.jinja`. Left out: traces of the other cells, which the JSONL files hold.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samrag.programs.steps import spoken
from samrag.report.pages import Pictures, Thumbnails, environment
from samrag.report.scores import TUNED, Checks, Method, QuestionScore, Study, modality_of, score_cell
from samrag.report.tables import EXIT_MEANINGS, readable, study_tables
from samrag.schema import Document, Draft, ExaminedDocument, Modality, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PAGE_BYTES = 9_500_000
"""Traces are left out until the page is smaller than this: mail programs and phones take it."""
MAIN_LABEL = f"{Method.SAM_RAG.label}({TUNED[0]}+{TUNED[1]})"
"""The system the page is about."""

PLOT_TITLES = {
    "recall": "Strict recall of the rankers",
    "accuracy": "Exact match by system, with 95 % intervals",
    "cost": "Exact match against model calls",
    "confidence": "CLIMB's confidence and how often it was right (numbers: answers in the bin)",
    "training": "Training losses",
}

PAPER_TABLE_2 = (
    ("MuRAG", "56.10 / 49.70", "56.50 / 56.50", "51.40"),
    ("RAG(R+M)", "35.47 / 32.44", "33.56 / 30.95", "32.12"),
    ("RAG(R*+M)", "40.82 / 38.85", "36.20 / 33.81", "37.75"),
    ("RAG(R+M*)", "42.86 / 41.66", "39.26 / 37.62", "40.77"),
    ("RAG(R*+M*)", "52.31 / 51.18", "46.20 / 44.29", "47.97"),
    ("SAM-RAG(R*+M)", "40.49 / 39.25", "39.54 / 38.57", "39.10"),
    ("SAM-RAG(R*+M*)", "54.35 / 52.74", "54.13 / 52.38", "52.66"),
    ("RAG(R+G)", "60.92 / 58.88", "54.11 / 50.47", "57.04"),
    ("RAG(R*+G)", "66.64 / 65.49", "59.09 / 57.62", "63.92"),
    ("SAM-RAG(R*+G)", "71.03 / 70.10", "80.51 / 79.98", "72.26"),
)
"""The paper's Table 2 as printed (arXiv 2410.11321): system, text F1 / EM, image F1 / EM, EM of all."""


# --- what the template is given ---


@dataclass(frozen=True, slots=True)
class DocumentView:
    """One examined document."""

    title: str
    text: str
    thumbnail: int | None
    """Place in the page's list of pictures."""
    is_image: bool
    verdict: str
    """True, False, "failed", or "" when relevance was not asked."""
    probability: str
    score: str
    """The critic's score (CLIMB)."""
    reasoning: str
    failure: str
    kept: bool
    is_support: bool


@dataclass(frozen=True, slots=True)
class BatchView:
    """The documents judged together, and what was drafted after them."""

    number: int
    documents: tuple[DocumentView, ...]
    drafts: tuple[DraftView, ...]

    @property
    def num_kept(self) -> int:
        """How many entered the context."""
        return sum(document.kept for document in self.documents)


@dataclass(frozen=True, slots=True)
class DraftView:
    """One draft and its verdicts."""

    answer: str
    draft: Draft
    num_documents: int


@dataclass(frozen=True, slots=True)
class TraceView:
    """What one system did on a question."""

    system: str
    state: str
    """right, wrong, abstained, failed or missing."""
    answer: str
    exit_reason: str
    num_examined: int
    num_context: int
    calls: int
    batches: tuple[BatchView, ...]
    last_drafts: tuple[DraftView, ...]
    """Drafts made after the last batch."""


@dataclass(frozen=True, slots=True)
class QuestionView:
    """A question with the traces shown for it, the main system first."""

    question_id: str
    question: str
    gold: str
    modality: str
    traces: tuple[TraceView, ...]

    @property
    def state(self) -> str:
        """The main system's outcome, which the buttons filter by."""
        return self.traces[0].state

    @property
    def differs(self) -> bool:
        """Whether exactly one of the systems is right."""
        return len({trace.state == "right" for trace in self.traces}) > 1


# --- from scores to views ---


def _main_cells(study: Study) -> list[tuple[str, tuple[QuestionScore, ...]]]:
    """The cells whose traces are shown: SAM-RAG(R*+M*), then RAG(R*+M*) and CLIMB(R*+M*)."""
    wanted = [(Method.SAM_RAG, Checks.ALL), (Method.RAG, Checks.RAG), (Method.CLIMB, Checks.CLIMB)]
    return [
        (cell.key.label, score_cell(study.questions, cell))
        for method, checks in wanted
        for cell in study.cells
        if (cell.key.method, cell.key.checks, cell.key.retriever, cell.key.student) == (method, checks, *TUNED)
    ]


def _spread(total: int, most: int) -> list[int]:
    """At most `most` of `total` positions, evenly spread, the first among them."""
    count = min(total, most)
    return [i * total // count for i in range(count)]


def _state(score: QuestionScore) -> str:
    if score.trace is None:
        return "missing"
    if score.trace.answers:
        return "right" if score.em == 1 else "wrong"
    return "abstained" if score.abstained else "failed"


def _document_view(
    seen: ExaminedDocument, supports: Sequence[str], documents: Mapping[str, Document], pictures: Pictures
) -> DocumentView:
    document = documents.get(seen.doc_id)
    probability = seen.probability
    return DocumentView(
        title=document.title if document else seen.doc_id,
        text=document.text if document else "This document is not in the documents file.",
        thumbnail=pictures.place(document) if document else None,
        is_image=document is not None and document.modality is Modality.IMAGE,
        verdict="failed" if seen.failure else str(seen.verdict or ""),
        probability="" if probability is None or not math.isfinite(probability) else f"{probability:.2f}",
        score=f"{seen.score:.2f}" if seen.scores and seen.score is not None else "",
        reasoning=seen.reasoning,
        failure=seen.failure,
        kept=seen.kept,
        is_support=seen.doc_id in supports,
    )


def _draft_views(trace: Trace, batch: int) -> tuple[DraftView, ...]:
    return tuple(
        DraftView(spoken(draft.answers), draft, len(set(draft.context_ids)))
        for draft in trace.drafts
        if draft.batch == batch
    )


def _trace_view(system: str, score: QuestionScore, documents: Mapping[str, Document], pictures: Pictures) -> TraceView:
    trace = score.trace
    if trace is None:
        return TraceView(system, "missing", "", "no trace of this question", 0, 0, 0, (), ())
    numbers = sorted({seen.batch for seen in trace.documents})
    supports = score.question.support_ids
    batches = tuple(
        BatchView(
            number,
            tuple(_document_view(s, supports, documents, pictures) for s in trace.documents if s.batch == number),
            _draft_views(trace, number),
        )
        for number in numbers
    )
    others = sorted({draft.batch for draft in trace.drafts} - set(numbers))
    return TraceView(
        system=system,
        state=_state(score),
        answer=spoken(trace.answers),
        exit_reason=EXIT_MEANINGS[trace.exit_reason],
        num_examined=len({seen.doc_id for seen in trace.documents}),
        num_context=len(set(trace.context_ids)),
        calls=trace.usage.calls,
        batches=batches,
        last_drafts=tuple(view for number in others for view in _draft_views(trace, number)),
    )


def _question_views(study: Study, thumbnails: Thumbnails, most: int) -> tuple[list[QuestionView], list[str]]:
    """The questions shown, and the pictures they need."""
    cells = _main_cells(study)
    if not cells:
        return [], []
    pictures = Pictures(thumbnails)
    views = []
    for i in _spread(len(study.questions), most):
        question = study.questions[i]
        traces = tuple(_trace_view(system, scores[i], study.documents, pictures) for system, scores in cells)
        views.append(
            QuestionView(
                question.question_id, question.question, spoken(question.answers), modality_of(question), traces
            )
        )
    return views, pictures.uris


# --- the page ---


def plot_uri(figure: Figure) -> str:
    """A figure as an SVG data URI."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "samrag"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


def _headline(metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of the proposed system."""
    wanted = (str(Method.SAM_RAG), *TUNED)
    return next((r for r in metrics["table2"] if (r["method"], r["retriever"], r["student"]) == wanted), None)


def render_page(
    study: Study,
    metrics: Mapping[str, Any],
    plots: Mapping[str, str],
    max_traces: int = 300,
    max_bytes: int = MAX_PAGE_BYTES,
) -> str:
    """The whole page.

    Args:
        study: questions, documents and traces.
        metrics: what `samrag.report.scores.evaluate` gives for the same study.
        plots: picture URIs by name (see `plot_uri`), shown in this order.
        max_traces: questions whose traces are shown at most, spread evenly over the file.
        max_bytes: size of the page; traces are left out until it fits.
    """
    tables = {table.name: table for table in readable(study_tables(metrics))}
    thumbnails = Thumbnails(study.image_root)
    shown = max_traces
    while True:
        questions, pictures = _question_views(study, thumbnails, shown)
        page = (
            environment()
            .get_template("page.html.jinja")
            .render(
                study=study,
                metrics=metrics,
                headline=_headline(metrics),
                main_label=MAIN_LABEL,
                goals=metrics["goals"],
                num_reached=sum(goal["reached"] is True for goal in metrics["goals"]),
                num_measured=sum(goal["reached"] is not None for goal in metrics["goals"]),
                tables=[table for table in tables.values() if table.name != "goals"],
                plots=[(name, PLOT_TITLES.get(name, name), uri) for name, uri in plots.items()],
                paper_rows=PAPER_TABLE_2,
                questions=questions,
                pictures=pictures,
            )
        )
        size = len(page.encode("utf-8"))
        if size <= max_bytes or not questions:
            return page
        shown = min(len(questions) - 1, int(len(questions) * 0.95 * max_bytes / size))


def figure_uris(figures: Mapping[str, Figure]) -> dict[str, str]:
    """All figures as data URIs."""
    return {name: plot_uri(figure) for name, figure in figures.items()}
