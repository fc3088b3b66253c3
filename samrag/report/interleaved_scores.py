"""Scores of interleaved answers as tables: systems by modes, with counts; and by category."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from samrag.metrics.interleaved import Mode
from samrag.metrics.rag_igbench import Comparison, Metric, SampleScore, Summary, compare
from samrag.report.tables import Column, Row, Table

HEADINGS = {
    Metric.ROUGE1: "ROUGE-1",
    Metric.EDIT: "Edit",
    Metric.KENDALL: "Kendall",
    Metric.ALIGNMENT: "Alignment",
    Metric.CLIP: "CLIP",
    Metric.MEAN: "Mean",
    Metric.IMAGE_PRECISION: "Image P",
    Metric.IMAGE_RECALL: "Image R",
    Metric.IMAGE_F1: "Image F1",
}
COUNTS = {
    "n_total": "Answers",
    "n_scored": "Scored",
    "n_invalid": "Invalid",
    "n_hallucinated": "Hallucinated",
    "n_error": "Errors",
}
RULES = {
    Mode.PAPER: "The paper's formulas. Answers that cannot be scored are in no mean.",
    Mode.RELEASED: "As the released code computes, mistakes included, to compare with figures made by it.",
    Mode.STRICT: "The paper's formulas. Answers that cannot be scored count 0.",
}

Summaries = Mapping[str, Mapping[Mode, Summary]]
"""Figures by system and mode."""


def summary_json(summary: Summary) -> dict[str, Any]:
    """Figures as plain values, for `metrics.json`."""
    return dataclasses.asdict(summary)


def compared(scores: Mapping[str, Sequence[SampleScore]], seed: int) -> list[dict[str, Any]]:
    """Each later system against the first, by every metric that both have: rows of `metrics.json`."""
    (first, ours), *others = scores.items()
    rows = []
    for name, theirs in others:
        for metric in Metric:
            if all(any(metric in score.values for score in side) for side in (ours, theirs)):
                result: Comparison = compare(ours, theirs, metric, seed)
                rows.append({"first": first, "second": name, "metric": metric, **dataclasses.asdict(result)})
    return rows


def score_tables(summaries: Summaries, comparisons: Sequence[Row] = ()) -> list[Table]:
    """A table for each mode, one by category for each, and the paired tests."""
    modes = list(next(iter(summaries.values())))
    tables = []
    for mode in modes:
        rows = [_row(system, "", by_mode[mode]) for system, by_mode in summaries.items()]
        tables.append(Table(str(mode), f"Mode {mode}", _columns(rows, "system"), tuple(rows), RULES[mode]))
    for mode in modes:
        rows = [
            _row(system, name, summary)
            for system, by_mode in summaries.items()
            for name, summary in by_mode[mode].categories.items()
        ]
        if rows:
            columns = _columns(rows, "system", "category")
            tables.append(Table(f"{mode}_categories", f"Mode {mode}, by topic and type", columns, tuple(rows)))
    if comparisons:
        tables.append(_comparison_table(comparisons))
    return tables


def _row(system: str, category: str, summary: Summary) -> dict[str, Any]:
    """One line: counts, and means in per cent with their intervals."""
    row: dict[str, Any] = {"system": system, "category": category}
    row |= {name: getattr(summary, name) for name in COUNTS}
    for metric, estimate in summary.means.items():
        row[metric] = 100 * estimate.value
        row[f"{metric}_interval"] = (100 * estimate.low, 100 * estimate.high)
    return row


def _columns(rows: Sequence[Row], *names: str) -> tuple[Column, ...]:
    """Columns of what the rows have."""
    shown = [metric for metric in Metric if any(metric in row for row in rows)]
    return (
        *(Column(name, name.capitalize()) for name in names),
        *(Column(name, heading, is_number=True) for name, heading in COUNTS.items()),
        *(Column(m, HEADINGS[m], "{:.1f}".format, True, f"{m}_interval") for m in shown),
    )


def _comparison_table(rows: Sequence[Row]) -> Table:
    written = [{**row, "metric": HEADINGS[row["metric"]], "difference": 100 * row["difference"]} for row in rows]
    columns = (
        Column("second", "System"),
        Column("first", "Against"),
        Column("metric", "Metric"),
        Column("n", "Answers", is_number=True),
        Column("difference", "Difference", "{:+.1f}".format, is_number=True),
        Column("p_value", "p", "{:.4f}".format, is_number=True),
    )
    note = (
        "Two-sided paired permutation tests in mode strict, where every answer has a score; not corrected for number."
    )
    return Table("comparisons", "Against the first system", columns, tuple(written), note)
