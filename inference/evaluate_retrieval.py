"""Strict recall of rankers: python inference/evaluate_retrieval.py --config configs/evaluate_retrieval.yaml.

recall@N is 1 when all supports are within the top N (SAM-RAG, equation 2). Writes retrieval.json and retrieval.md.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from samrag.arguments import RetrievalArguments
from samrag.config import parse, run
from samrag.errors import UserError
from samrag.files import read_records, write_json, write_text
from samrag.ranking import RankerPlan, rank_all, recall_rows
from samrag.report.tables import readable, retrieval_table, to_markdown, to_rich
from samrag.schema import Document, Question

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, rank, score, write."""
    (arguments,) = parse(RetrievalArguments)
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file)]
    questions = read_records(inputs[0], Question)
    documents = read_records(inputs[1], Document)
    for question in questions:
        if not question.support_ids:
            raise UserError(
                f"{inputs[0]}: question {question.question_id!r} has no supporting document, so it has no recall; "
                "take a split with labels, or remove the question."
            )
    plan = RankerPlan(
        arguments.rankers,
        arguments.indexes,
        arguments.fusions,
        arguments.reranks,
        arguments.fusion_depth,
        arguments.rerank_depth,
    )
    rankings = rank_all(questions, documents, plan, max(arguments.at))
    rows = recall_rows(questions, rankings, arguments.at)
    output = Path(arguments.output_dir)
    write_json(output / "retrieval.json", {"rows": rows, "questions": len(questions), "documents": len(documents)})
    (table,) = readable([retrieval_table(rows)])
    write_text(output / "retrieval.md", to_markdown(table))
    Console().print(to_rich(table))
    log.info("%d questions, %d documents: %s", len(questions), len(documents), output / "retrieval.md")


if __name__ == "__main__":
    run(main)
