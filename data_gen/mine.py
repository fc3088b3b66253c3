"""Hard negatives for the retriever: python data_gen/mine.py --config configs/quickstart/mine.yaml.

The paper's rule (section 3.2) is configs/paper/mine.yaml: of the top 50 documents that are no supports, 10 at random.
With `relabel`, the teacher looks at what was drawn; its replies go to the call store. Writes retriever.jsonl in
FlagEmbedding's format.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from samrag.answering import open_index, recorded, teacher_backend
from samrag.arguments import MineArguments, TeacherArguments
from samrag.config import parse, run
from samrag.engines.recorded import Store
from samrag.files import read_records, write_records
from samrag.programs.relabel import RelabelOptions
from samrag.prompts import PromptStyle
from samrag.provenance import is_finished, write_run_record
from samrag.relabelling import relabel_rows
from samrag.retrieval.mining import MiningRule, mine_negatives, source_counts, with_negatives
from samrag.schema import Document, Question, RetrieverRow

log = logging.getLogger(__name__)


async def second_look(
    rows: Sequence[RetrieverRow], documents: Sequence[Document], arguments: MineArguments, teacher: TeacherArguments
) -> list[RetrieverRow]:
    """Ask the teacher about the negatives."""
    root = Path(arguments.image_root or "")
    store = Store(Path(teacher.store))
    engine = recorded(teacher_backend(teacher, root), store, root, PromptStyle.TEACHER)
    options = RelabelOptions(arguments.temperature, arguments.max_tokens, arguments.seed, arguments.relabel_votes)
    by_id = {document.doc_id: document for document in documents}
    try:
        relabelled, findings, _ = await relabel_rows(
            rows, by_id, engine, arguments.num_negatives, options, teacher.concurrency
        )
    finally:
        await engine.close()
        store.close()
        log.info("%s", engine.meter.table())
    log.info("second look: %s", ", ".join(f"{count} {finding}" for finding, count in findings.most_common()))
    return relabelled


def main() -> None:
    """Parse, rank, draw, look again, write."""
    arguments, teacher = parse(MineArguments, TeacherArguments)
    groups = [arguments, teacher] if arguments.relabel else [arguments]
    inputs = [Path(arguments.questions_file), Path(arguments.documents_file), Path(arguments.index_dir)]
    output = Path(arguments.output_dir)
    questions = read_records(inputs[0], Question)[: arguments.max_questions]
    documents = read_records(inputs[1], Document)
    if is_finished(output, groups, inputs):
        return

    spare = arguments.relabel_spare if arguments.relabel else 0
    rule = MiningRule(
        arguments.num_negatives + spare,
        arguments.top,
        arguments.relative_margin,
        tuple(arguments.rankers),
        arguments.seed,
    )
    index, vectors = open_index(questions, documents, inputs[2], arguments.embedder)
    rows = mine_negatives(questions, documents, vectors, index.vectors, rule)
    if arguments.relabel:
        rows = asyncio.run(second_look(rows, documents, arguments, teacher))
    rows = with_negatives(rows)
    write_records(output / "retriever.jsonl", rows)
    write_run_record(output, groups, inputs, arguments.seed)
    sources = ", ".join(f"{count} {ranker}" for ranker, count in source_counts(rows).items())
    log.info("%s: %d rows, negatives by ranker: %s", output, len(rows), sources)


if __name__ == "__main__":
    run(main)
