"""Hard negatives for the retriever: python data_gen/mine.py --config configs/quickstart/mine.yaml.

The paper's rule (section 3.2): of the top 50 documents that are no supports, 10 at random. Writes retriever.jsonl in
FlagEmbedding's format.
"""

from __future__ import annotations

import logging
from pathlib import Path

from samrag.answering import rank_documents
from samrag.arguments import MineArguments
from samrag.config import parse, run
from samrag.files import read_records, write_records
from samrag.provenance import is_finished, write_run_record
from samrag.retrieval.mining import mine_negatives
from samrag.schema import Document, Question

log = logging.getLogger(__name__)


def main() -> None:
    """Parse, rank, draw, write."""
    (arguments,) = parse(MineArguments)
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file), Path(arguments.index_dir)]
    output = Path(arguments.output_dir)
    questions = read_records(inputs[0], Question)
    documents = read_records(inputs[1], Document)
    if is_finished(output, [arguments], inputs):
        return

    most_supports = max((len(question.support_ids) for question in questions), default=0)
    rankings = rank_documents(questions, documents, inputs[2], arguments.embedder, arguments.top + most_supports)
    rows = mine_negatives(
        questions,
        documents,
        rankings,
        num_negatives=arguments.num_negatives,
        top=arguments.top,
        seed=arguments.seed,
        relative_margin=arguments.relative_margin,
    )
    write_records(output / "retriever.jsonl", rows)
    write_run_record(output, [arguments], inputs, arguments.seed)
    log.info("%s: %d rows, %d negatives", output, len(rows), sum(len(row.neg) for row in rows))


if __name__ == "__main__":
    run(main)
