"""Rows of `metrics.json` as Markdown, CSV, terminal tables and plain cells for the HTML page.

Markdown, terminal and page show the same text (`Table.cells`). CSV holds the numbers themselves, an interval as two
columns, because a spreadsheet or a plot script reads it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from samrag.report.scores import Method

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ABSENT = "-"
"""What stands in a cell without a value."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: where its value lies in a row, its heading, and how a value is written."""

    key: str
    heading: str
    write: Callable[[Any], str] = str
    is_number: bool = False
    interval: str = ""
    """Key of the interval that is written behind the value."""

    def cell(self, row: Row) -> str:
        """The value of a row as text."""
        value = row.get(self.key)
        if value is None:
            return ABSENT
        interval = row.get(self.interval)
        return with_interval(value, interval) if interval else self.write(value)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with what is needed to show them."""

    name: str
    """File name of the CSV, key of the W&B table."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def cells(self) -> list[list[str]]:
        """All cells as text."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]


# --- how values are written ---


def with_interval(value: float, interval: Sequence[float]) -> str:
    """A value with its interval: `71.0 [66.1, 75.9]`."""
    low, high = interval
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _one(value: float) -> str:
    return f"{value:.1f}"


def _two(value: float) -> str:
    return f"{value:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _reached(value: bool) -> str:
    return "yes" if value else "no"


def _score(key: str, heading: str) -> Column:
    return Column(key, heading, _one, is_number=True, interval=f"{key}_ci")


# --- the tables of a study ---

_SYSTEMS = (
    Column("method", "Method", lambda name: Method(name).label),
    Column("retriever", "Retriever"),
    Column("student", "Generator"),
    _score("em", "EM"),
    _score("f1", "F1"),
    Column("squad_em", "SQuAD EM", _one, is_number=True),
    Column("squad_f1", "SQuAD F1", _one, is_number=True),
    Column("arn", "ARN", _two, is_number=True),
    Column("arn_answered", "ARN (answered)", _two, is_number=True),
    Column("documents_examined", "Examined", _one, is_number=True),
    Column("calls", "Calls", _one, is_number=True),
    Column("abstained", "Abstained", _whole, is_number=True),
    Column("engine_failures", "Failed", _whole, is_number=True),
    Column("missing", "Missing", _whole, is_number=True),
    Column("failures", "Failed calls", _two, is_number=True),
    Column("input_tokens", "Tokens in", _whole, is_number=True),
    Column("output_tokens", "Tokens out", _whole, is_number=True),
    Column("n", "Questions", _whole, is_number=True),
)
_ABLATION = (
    Column("checks", "Checks"),
    _score("em", "EM"),
    Column("f1", "F1", _one, is_number=True),
    Column("delta_em", "EM against all", _signed, is_number=True),
    Column("p_value", "p", _p_value, is_number=True),
)
_CLIMB = (
    Column("retriever", "Retriever"),
    Column("student", "Generator"),
    Column("checks", "CLIMB"),
    *_ABLATION[1:3],
    Column("delta_em", "EM against full", _signed, is_number=True),
    *_ABLATION[4:],
    Column("calls", "Calls", _one, is_number=True),
)
_CONFIDENCE = (
    *_CLIMB[:2],
    Column("confidence", "U"),
    Column("n", "Answers", _whole, is_number=True),
    Column("mean_confidence", "Mean U x 100", _one, is_number=True),
    Column("accuracy", "Right, %", _one, is_number=True),
    Column("ece", "ECE x 100", _one, is_number=True),
    Column("auroc", "AUROC x 100", _one, is_number=True),
)
_FAILING = {"not_in_pool": "Support not in pool", "not_in_context": "Not chosen", "with_evidence": "With all supports"}
_CLIMB_FAILING = (
    *_CLIMB[:2],
    Column("wrong", "Wrong answers", _whole, is_number=True),
    *(Column(key, heading, _whole, is_number=True) for key, heading in _FAILING.items()),
    Column("rose", "U had risen", _whole, is_number=True),
)
_CLIMB_MISLED = (
    *_CLIMB[:2],
    Column("question", "Question"),
    Column("answer", "Answer"),
    Column("gold", "Gold"),
    Column("first", "First U", _two, is_number=True),
    Column("last", "Last U", _two, is_number=True),
    Column("place", "Where it failed", lambda place: _FAILING[place].lower()),
)
_SYSTEM_NAMES = {"gold": "Gold", **{str(method): f"{method.label}(R*+M*)" for method in Method}}
_CONTEXT = (
    Column("system", "System", lambda name: _SYSTEM_NAMES.get(name, name)),
    Column("modality", "Questions of"),
    _score("em", "EM"),
    Column("arn", "ARN", _two, is_number=True),
    Column("n", "Questions", _whole, is_number=True),
)
_RETRIEVAL = (
    Column("ranker", "Ranker"),
    Column("n", "N", str, is_number=True),
    _score("recall", "Recall"),
)
_GOALS = (Column("goal", "Goal"), Column("measured", "Measured"), Column("reached", "Reached", _reached))
EXIT_MEANINGS = {
    "answered": "answered",
    "verified": "verified",
    "best_effort": "partly supported",
    "unverified": "unverified",
    "no_evidence": "abstained",
    "no_documents": "nothing retrieved",
    "target": "confident",
    "max_iter": "last round",
    "no_facet": "nothing missing",
    "no_new_evidence": "pool exhausted",
    "rejected": "no gain",
    "engine_failure": "failed",
}
"""Exit reasons in words, short enough for a heading."""


def study_tables(metrics: Mapping[str, Any]) -> list[Table]:
    """The tables of a study, in the order of the report; one without rows is left out.

    Args:
        metrics: what `samrag.report.scores.evaluate` gives.
    """
    tables = [
        Table("goals", "Goals", _GOALS, tuple(metrics["goals"])),
        Table(
            "table2",
            "Answers by method, retriever and generator",
            _SYSTEMS,
            tuple(metrics["table2"]),
            "EM and F1 are MultiModalQA's list scores x 100 with 95 % bootstrap intervals; a missing answer scores 0. "
            "ARN is the mean number of documents in the final context. Examined, calls and tokens are means per "
            "question.",
        ),
        Table(
            "table3",
            "Ablation of the checks, R*+M*",
            _ABLATION,
            tuple(metrics["table3"]),
            "p: two-sided paired permutation test of EM against all checks, on the same questions.",
        ),
        Table(
            "table4",
            "Documents in the final context, by modality",
            _CONTEXT,
            tuple(metrics["table4"]),
            "Gold: mean number of distinct supporting documents.",
        ),
        Table(
            "climb",
            "Ablation of CLIMB, beside SAM-RAG with the same retriever and generator",
            _CLIMB,
            tuple(metrics["climb"]),
            "p: two-sided paired permutation test of EM against the full method, on the same questions. Calls: per "
            "question, stored ones included.",
        ),
        Table(
            "confidence",
            "CLIMB's confidence and how often it was right",
            _CONFIDENCE,
            tuple(metrics["confidence"]),
            "U of the final answers, in the paper's bins. U orders answers (AUROC) and is no probability (ECE).",
        ),
        Table(
            "climb_failing",
            "Where CLIMB's wrong answers went wrong",
            _CLIMB_FAILING,
            tuple(metrics["climb_failing"]),
            "By the first step that lost a supporting document: the pool, the choice of the evidence, or none of them.",
        ),
        Table(
            "climb_misled",
            "Wrong answers whose confidence rose",
            _CLIMB_MISLED,
            tuple(metrics["climb_misled"]),
            "At most ten of each generator, the largest rise first.",
        ),
        retrieval_table(metrics["retrieval"]),
        _exit_table(metrics["exit_reasons"]),
    ]
    return [table for table in tables if table.rows]


def retrieval_table(rows: Sequence[Row]) -> Table:
    """The rankers' strict recall, one row a ranker and N."""
    note = "Share of questions with all supporting documents among the first N, x 100."
    return Table("retrieval", "Strict recall of the rankers", _RETRIEVAL, tuple(rows), note)


def _exit_table(counts_by_cell: Mapping[str, Mapping[str, int]]) -> Table:
    reasons = [reason for reason in EXIT_MEANINGS if any(reason in counts for counts in counts_by_cell.values())]
    columns = (
        Column("cell", "Cell"),
        *(Column(reason, EXIT_MEANINGS[reason].capitalize(), _whole, is_number=True) for reason in reasons),
    )
    rows = tuple({"cell": cell, **counts} for cell, counts in counts_by_cell.items())
    note = "Answered: without a last check by is_sup. Failed: no usable reply of the model where one was needed."
    return Table("exit_reasons", "How the questions ended", columns, rows, note)


def _by_system(table: Table) -> Table:
    """Table 2 with method, retriever and generator in one column, in the paper's notation."""
    rows = tuple(
        {**row, "system": f"{Method(row['method']).label}({row['retriever']}+{row['student']})"} for row in table.rows
    )
    return Table(table.name, table.title, (Column("system", "System"), *table.columns[3:]), rows, table.note)


def _by_ranker(table: Table) -> Table:
    """The retrieval table with one row a ranker and one column an N."""
    sizes = sorted({row["n"] for row in table.rows})
    by_ranker: dict[str, dict[str, Any]] = {}
    for row in table.rows:
        wide = by_ranker.setdefault(row["ranker"], {"ranker": row["ranker"]})
        wide |= {f"recall_{row['n']}": row["recall"], f"recall_{row['n']}_ci": row.get("recall_ci")}
    columns = (table.columns[0], *(_score(f"recall_{n}", f"R@{n}") for n in sizes))
    return Table(table.name, table.title, columns, tuple(by_ranker.values()), table.note)


def readable(tables: Sequence[Table]) -> list[Table]:
    """The tables as people are shown them: systems in one column, one row a ranker; CSV files keep the long form."""
    forms = {"table2": _by_system, "retrieval": _by_ranker}
    return [forms[table.name](table) if table.name in forms else table for table in tables]


# --- forms ---


def to_markdown(table: Table) -> str:
    """A Markdown section: title, table, note."""
    lines = [
        f"## {_markdown(table.title)}",
        "",
        _markdown_line([column.heading for column in table.columns]),
        _markdown_line(["---:" if column.is_number else "---" for column in table.columns], escape=False),
        *(_markdown_line(cells) for cells in table.cells),
        "",
    ]
    return "\n".join([*lines, f"{_markdown(table.note)}\n"] if table.note else lines)


def _markdown_line(cells: Sequence[str], escape: bool = True) -> str:
    return "| " + " | ".join(_markdown(cell) if escape else cell for cell in cells) + " |"


def _markdown(text: str) -> str:
    """Text without a meaning in Markdown: `R*` and `M*` would turn what lies between them into italics."""
    for mark in "\\|*_<`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def to_csv(table: Table) -> str:
    """Comma-separated values: the numbers as they are, an interval as `<key>_low` and `<key>_high`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = []
    for column in table.columns:
        header += [column.key, *([f"{column.key}_low", f"{column.key}_high"] if column.interval else [])]
    writer.writerow(header)
    for row in table.rows:
        cells = []
        for column in table.columns:
            cells.append(row.get(column.key))
            if column.interval:
                cells += row.get(column.interval) or (None, None)
        writer.writerow(cells)
    return out.getvalue()


_NARROW = {"table2": ("system", "em", "f1", "arn", "documents_examined", "calls", "abstained")}
"""Columns of a wide table that fit a terminal."""


def to_rich(table: Table) -> RichTable:
    """A table for the terminal; wide ones lose the columns and intervals that only the files need."""
    from rich.table import Table as RichTable
    from rich.text import Text

    columns = [column for column in table.columns if column.key in _NARROW.get(table.name, (column.key,))]
    if len([column for column in columns if column.interval]) > 1:
        columns = [replace(column, interval="") for column in columns]
    result = RichTable(title=Text(table.title), title_justify="left")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        longest_word = max(len(word) for word in column.heading.split())
        result.add_column(Text(column.heading), justify=justify, min_width=longest_word, overflow="fold")
    for row in table.rows:
        result.add_row(*(Text(column.cell(row)) for column in columns))
    return result
