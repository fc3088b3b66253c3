"""The mini world's questions put to its teacher without index, server or store: for benchmarks."""

from __future__ import annotations

from pathlib import Path

from samrag.arguments import DistillArguments
from samrag.calls import Call, Reply
from samrag.distilling import materials_of, options_of
from samrag.files import read_records
from samrag.miniworld.teacher import Teacher
from samrag.programs.distill import Distilled, Material, distill
from samrag.prompts import PromptStyle, render
from samrag.replies import parse
from samrag.retrieval.lexical import Bm25Ranker
from samrag.schema import Document, Question


def recipe(seed: int = 0) -> DistillArguments:
    """The default recipe; its files are not read."""
    return DistillArguments(
        questions_file="", documents_file="", image_root="", index_dir="", embedder="", output_dir="", seed=seed
    )


def bm25_materials(
    run_dir: Path, arguments: DistillArguments, max_questions: int | None = None, split: str = "train"
) -> list[Material]:
    """The questions of a split of a quickstart run, their negatives drawn from BM25's ranking."""
    data = Path(run_dir) / "data" / split
    questions = read_records(data / "questions.jsonl", Question)[:max_questions]
    documents = read_records(data / "documents.captioned.jsonl", Document)
    by_id = {document.doc_id: document for document in documents}
    ranked = Bm25Ranker(documents).search([q.question for q in questions], arguments.negatives_top + 4)
    return materials_of(questions, by_id, [[by_id[hit.doc_id] for hit in hits] for hits in ranked], arguments)


def asked(teacher: Teacher, call: Call) -> Reply:
    """The simulated teacher's reply to a call."""
    prompt = render(call, PromptStyle.TEACHER)
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": prompt.body}]}],
        "response_format": {"json_schema": {"name": str(call.kind)}},
        "seed": call.sample_index,
    }
    return parse(call.kind, teacher.text(body))


def follow(
    material: Material, teacher: Teacher, arguments: DistillArguments
) -> tuple[Distilled, list[tuple[Call, Reply]]]:
    """Run the recipe; also every item's call with its reply."""
    program = distill(material, options_of(arguments))
    items: list[tuple[Call, Reply]] = []
    calls, step = next(program), 0
    while True:
        replies = [asked(teacher, call) for call in calls]
        if step % 2 == 0:  # every second step asks back
            items += zip(calls, replies, strict=True)
        try:
            calls, step = program.send(replies), step + 1
        except StopIteration as end:
            return end.value, items
