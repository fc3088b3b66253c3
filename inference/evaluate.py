"""Evaluate a study: python inference/evaluate.py --config configs/evaluate.yaml [--max_traces 100].

Reads the study's traces and questions; writes `metrics.json`, tables, plots and `report.html`, and prints the tables.
"""

from __future__ import annotations

from pathlib import Path

from samrag.config import parse, run
from samrag.report.arguments import EvaluateArguments


def evaluate(arguments: EvaluateArguments) -> None:
    """Score, write, show."""
    from rich.console import Console

    from samrag import tracking
    from samrag.files import write_json, write_text
    from samrag.provenance import write_run_record
    from samrag.report import page, plots, scores, tables

    folder = Path(arguments.output_dir)
    curve_paths = [Path(path) for path in arguments.curves or ()]
    study = scores.read_study(Path(arguments.study_dir))
    curves = plots.read_curves(curve_paths)
    metrics = scores.evaluate(study, arguments.seed)

    study_tables = tables.study_tables(metrics)
    readable = tables.readable(study_tables)
    figures = plots.draw_plots(metrics, curves)
    write_json(folder / "metrics.json", metrics)
    write_text(folder / "tables.md", "\n".join(tables.to_markdown(table) for table in readable))
    for table in study_tables:
        write_text(folder / "tables" / f"{table.name}.csv", tables.to_csv(table))
    for name, figure in figures.items():
        plots.write_plot(figure, folder / "plots" / f"{name}.svg")
    report = folder / "report.html"
    write_text(report, page.render_page(study, metrics, page.figure_uris(figures), arguments.max_traces))
    inputs = [*scores.study_inputs(Path(arguments.study_dir)), *curve_paths]
    write_run_record(folder, [arguments], inputs, arguments.seed)
    if arguments.wandb:
        tracking.log_tables("evaluate", folder, {table.name: table.rows for table in study_tables})

    console = Console()
    for table in readable:
        console.print(tables.to_rich(table))
    console.print(f"report: {report.resolve()}", style="bold", soft_wrap=True, markup=False, highlight=False)


def main() -> None:
    """Parse the configuration, then evaluate."""
    evaluate(*parse(EvaluateArguments))


if __name__ == "__main__":
    run(main)
