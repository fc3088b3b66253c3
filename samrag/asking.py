"""What the teacher's stages ask: each as a set of programs, for dry runs and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samrag.answering import looked_up, rank_documents, teacher_backend
from samrag.arguments import CaptionArguments, DistillArguments, InterleaveArguments, TeacherArguments
from samrag.benchmarks.rag_igbench import read_questions
from samrag.calls import Program
from samrag.captioning import caption_programs
from samrag.config import parse
from samrag.distilling import documents_by_id, materials_of, options_of
from samrag.engines.costs import BATCH_SHARE
from samrag.engines.pending import Layer, PendingBackend
from samrag.engines.recorded import Store
from samrag.files import read_records
from samrag.interleaving import composed
from samrag.interleaving import options_of as interleaved_options
from samrag.programs.distill import distill
from samrag.prompts import PromptStyle
from samrag.schema import Document, Question


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that asks the teacher."""

    teacher: TeacherArguments
    image_root: Path
    programs: Callable[[], Iterable[Program[Any]]]
    """Makes the programs anew, to be run from their beginning."""


def caption_stage(arguments: CaptionArguments, teacher: TeacherArguments) -> Stage:
    """Raw captions of image documents."""
    documents = [d for name in arguments.documents_files for d in read_records(Path(name), Document)]
    return Stage(teacher, Path(arguments.image_root), lambda: caption_programs(documents, arguments))


def distill_stage(arguments: DistillArguments, teacher: TeacherArguments) -> Stage:
    """The student's training data."""
    questions = read_records(Path(arguments.questions_file), Question)[: arguments.max_questions]
    documents = read_records(Path(arguments.documents_file), Document)
    by_id = documents_by_id(documents, Path(arguments.documents_file), questions)
    deep = arguments.negatives_top + max((len(question.support_ids) for question in questions), default=0)
    hits = rank_documents(questions, documents, Path(arguments.index_dir), arguments.embedder, deep)
    materials = materials_of(questions, by_id, looked_up(hits, documents), arguments)
    options = options_of(arguments)
    return Stage(teacher, Path(arguments.image_root), lambda: (distill(material, options) for material in materials))


def interleave_stage(arguments: InterleaveArguments, teacher: TeacherArguments) -> Stage:
    """Drafts of interleaved answers."""
    questions = read_questions(Path(arguments.data_file), arguments.language, arguments.split)
    chosen, options = questions[: arguments.max_questions], interleaved_options(arguments)
    return Stage(teacher, Path(arguments.image_root), lambda: (composed(question, options) for question in chosen))


def read_stage(name: str, config: str) -> Stage:
    """A stage by its name and its own YAML.

    Raises:
        UserError: the YAML, or a file that it names, cannot be used.
    """
    args = ["--config", config]
    if name == "caption":
        return caption_stage(*parse(CaptionArguments, TeacherArguments, args=args))
    if name == "interleave":
        return interleave_stage(*parse(InterleaveArguments, TeacherArguments, args=args))
    return distill_stage(*parse(DistillArguments, TeacherArguments, args=args))


async def dry_run(stage: Stage, batch: bool = False) -> str:
    """What a stage has stored and has to ask now, in two sentences; nothing is asked.

    Args:
        stage: the stage.
        batch: reckon with the price of batches.
    """
    backend = teacher_backend(stage.teacher, stage.image_root)
    store = Store(Path(stage.teacher.store))
    try:
        pending = PendingBackend(backend.identity, store, stage.image_root)
        layer = Layer(pending, PromptStyle.TEACHER, backend.repairs)
        wanted = [item.request async for item in layer.wanted(stage.programs())]
    finally:
        store.close()
    estimate = backend.estimate(wanted, BATCH_SHARE if batch else 1.0)
    total = layer.num_finished + layer.num_waiting
    then = "; what the others ask after that depends on the replies" if layer.num_waiting else ""
    return (
        f"{pending.num_stored:,} replies are stored; to ask now: {estimate}. {layer.num_finished:,} of {total:,}"
        f" programs are finished{then}."
    )
