"""The plots of a study, as SVG or PNG. Colours are Okabe and Ito's, which colour-blind readers tell apart.

Figures are drawn without pyplot, so that nothing global is touched; the same metrics give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samrag.errors import UserError
from samrag.files import read_json, replacing
from samrag.report.scores import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_METHODS = {Method.RAG: 0, Method.SAM_RAG: 1, Method.CLIMB: 2}
"""A method's place in the palette, the same in every plot."""
_STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "samrag",
}
Row = Mapping[str, Any]


def draw_plots(metrics: Mapping[str, Any], curves: Mapping[str, Sequence[Row]] | None = None) -> dict[str, Figure]:
    """All plots that the metrics have figures for, by name.

    Args:
        metrics: what `samrag.report.scores.evaluate` gives.
        curves: log histories of trainings by name (see `read_curves`).
    """
    import matplotlib as mpl

    figures = {}
    with mpl.rc_context(_STYLE):
        if metrics["retrieval"]:
            figures["recall"] = recall_figure(metrics["retrieval"])
        if metrics["table2"]:
            figures["accuracy"] = accuracy_figure(metrics["table2"])
        if any(row["calls"] is not None for row in metrics["table2"]):
            figures["cost"] = cost_figure(metrics["table2"])
        if metrics["confidence"]:
            figures["confidence"] = confidence_figure(metrics["confidence"])
        if curves:
            figures["training"] = training_figure(curves)
    return figures


def write_plot(figure: Figure, path: Path) -> None:
    """Write a figure whole; the suffix of the path says whether as SVG or PNG."""
    import matplotlib as mpl

    kind = path.suffix.removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {}
    with mpl.rc_context(_STYLE), replacing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150, metadata=metadata)


def _new(height: float = 3.9) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, height), layout="constrained")
    return figure, figure.subplots()


def recall_figure(rows: Sequence[Row]) -> Figure:
    """Strict recall against N, one line a ranker, with intervals where there are any."""
    figure, axes = _new()
    rankers = list(dict.fromkeys(row["ranker"] for row in rows))
    sizes = sorted({row["n"] for row in rows})
    for place, ranker in enumerate(rankers):
        own = sorted((row for row in rows if row["ranker"] == ranker), key=lambda row: row["n"])
        xs, ys = [row["n"] for row in own], [row["recall"] for row in own]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        axes.plot(xs, ys, label=ranker, linewidth=2, markersize=6, color=colour, marker=marker)
        if all(row.get("recall_ci") for row in own):
            lows, highs = zip(*(row["recall_ci"] for row in own), strict=True)
            axes.fill_between(xs, lows, highs, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.set_xlabel("N, documents retrieved")
    axes.set_ylabel("strict recall@N, %")
    axes.legend()
    return figure


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """EM of every system with its interval, RAG beside SAM-RAG."""
    figure, axes = _new()
    pairs = list(dict.fromkeys((row["retriever"], row["student"]) for row in rows))
    width = 0.38
    for method, place in _METHODS.items():
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        xs = [pairs.index((row["retriever"], row["student"])) + (place - 0.5) * width for row in own]
        ems = [row["em"] for row in own]
        errors = [
            [max(0.0, row["em"] - row["em_ci"][0]) for row in own],
            [max(0.0, row["em_ci"][1] - row["em"]) for row in own],
        ]
        axes.bar(
            xs, ems, width * 0.94, yerr=errors, color=COLOURS[place], label=method.label, capsize=3, ecolor="#333333"
        )
        for x, em, high in zip(xs, ems, (row["em_ci"][1] for row in own), strict=True):
            axes.annotate(
                f"{em:.1f}", (x, max(em, high)), (0, 3), textcoords="offset points", ha="center", fontsize=9.5
            )
    axes.set_xticks(range(len(pairs)), ["+".join(pair) for pair in pairs])
    axes.set_xlim(-0.6, len(pairs) - 0.4)
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("retriever + generator (*: tuned)")
    axes.set_ylabel("exact match, %")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def cost_figure(rows: Sequence[Row]) -> Figure:
    """EM against calls per question, every system labelled."""
    figure, axes = _new()
    points = [row for row in rows if row["calls"] is not None]
    for method, place in _METHODS.items():
        own = [row for row in points if row["method"] == method]
        if own:
            xs, ys = [row["calls"] for row in own], [row["em"] for row in own]
            axes.scatter(xs, ys, s=52, color=COLOURS[place], marker=MARKERS[place], label=method.label, zorder=3)
    most = max(row["calls"] for row in points)
    axes.set_xlim(0, most * 1.25)
    axes.set_ylim(0, 105)
    axes.set_xlabel("model calls per question")
    axes.set_ylabel("exact match, %")
    for row, height in zip(points, _label_heights(points, gap=6.0), strict=True):
        axes.annotate(
            f"{row['retriever']}+{row['student']}",
            (row["calls"], row["em"]),
            (row["calls"] + most * 0.022, height),
            va="center",
            fontsize=9.5,
        )
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def confidence_figure(rows: Sequence[Row]) -> Figure:
    """Share of right answers against their mean U, one line a system, one point a bin; the sizes are written beside."""
    figure, axes = _new()
    axes.plot((0, 100), (0, 100), color="#999999", linewidth=1, linestyle=":", label="as stated")
    for place, system in enumerate(dict.fromkeys((row["retriever"], row["student"]) for row in rows)):
        own = [r for r in rows if (r["retriever"], r["student"]) == system and r["confidence"] != "all" and r["n"]]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        xs, ys = [row["mean_confidence"] for row in own], [row["accuracy"] for row in own]
        axes.plot(xs, ys, label="+".join(system), linewidth=2, markersize=6, color=colour, marker=marker)
        for row in own:
            point = (row["mean_confidence"], row["accuracy"])
            axes.annotate(f"{row['n']}", point, (5, -11), textcoords="offset points", fontsize=9, color=colour)
    axes.set_xlim(0, 103)
    axes.set_ylim(0, 108)
    axes.set_xlabel("mean confidence U of the bin x 100")
    axes.set_ylabel("right answers, %")
    axes.legend()
    return figure


def _label_heights(points: Sequence[Row], gap: float) -> list[float]:
    """Heights of the points' labels, moved apart where labels of near points would lie on each other."""
    heights = [0.0] * len(points)
    near = max(row["calls"] for row in points) * 0.2
    done: list[tuple[float, float]] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]["em"]):
        below = [h for x, h in done if abs(x - points[i]["calls"]) < near]
        heights[i] = max([points[i]["em"], *(h + gap for h in below)])
        done.append((points[i]["calls"], heights[i]))
    return heights


def read_curves(paths: Sequence[Path]) -> dict[str, tuple[Row, ...]]:
    """Log histories by the name of their run's folder; by the whole path where two folders share a name."""
    runs = [path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent for path in paths]
    names = [run.name for run in runs]
    return {
        name if names.count(name) == 1 else str(path): read_curve(path) for name, path in zip(names, paths, strict=True)
    }


def read_curve(path: Path) -> tuple[Row, ...]:
    """The log history of a `trainer_state.json`.

    Raises:
        UserError: the file is missing or broken, or has no loss in its history.
    """
    content = read_json(path)
    history = content.get("log_history") if isinstance(content, dict) else None
    rows = history if isinstance(history, list) else []
    kept = tuple(row for row in rows if isinstance(row, dict) and _finite(row.get("step")) and _has_loss(row))
    if not kept:
        raise UserError(f"{path} has no log_history with losses; give the trainer_state.json of a training run.")
    return kept


def _has_loss(row: Row) -> bool:
    return _finite(row.get("loss")) or _finite(row.get("eval_loss"))


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def training_figure(curves: Mapping[str, Sequence[Row]]) -> Figure:
    """Loss against steps of one or more trainings; held-out loss dashed."""
    figure, axes = _new()
    for place, (name, history) in enumerate(curves.items()):
        for key, line, suffix in (("loss", "-", ""), ("eval_loss", "--", ", held out")):
            points = [(row["step"], row[key]) for row in history if _finite(row.get(key))]
            if points:
                xs, ys = zip(*points, strict=True)
                colour = COLOURS[place % len(COLOURS)]
                axes.plot(xs, ys, line, color=colour, label=name + suffix, marker="." if len(points) < 40 else "")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure
