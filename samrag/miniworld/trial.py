"""The mini world's training questions as material for the teacher, without an index: for benchmarks."""

from __future__ import annotations

from pathlib import Path

from samrag.arguments import DistillArguments
from samrag.distilling import materials_of
from samrag.files import read_records
from samrag.programs.distill import Material
from samrag.retrieval.lexical import Bm25Ranker
from samrag.schema import Document, Question


def recipe(seed: int = 0) -> DistillArguments:
    """The default recipe; its files are not read."""
    return DistillArguments(
        questions_file="", documents_file="", image_root="", index_dir="", embedder="", output_dir="", seed=seed
    )


def bm25_materials(run_dir: Path, arguments: DistillArguments, max_questions: int | None = None) -> list[Material]:
    """The training questions of a quickstart run, their negatives drawn from BM25's ranking."""
    data = Path(run_dir) / "data" / "train"
    questions = read_records(data / "questions.jsonl", Question)[:max_questions]
    documents = read_records(data / "documents.captioned.jsonl", Document)
    by_id = {document.doc_id: document for document in documents}
    ranked = Bm25Ranker(documents).search([q.question for q in questions], arguments.negatives_top + 4)
    return materials_of(questions, by_id, [[by_id[hit.doc_id] for hit in hits] for hits in ranked], arguments)
