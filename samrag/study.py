"""The paper's Tables 2 to 4 as a grid of cells over one set of questions."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from samrag.answering import (
    Method,
    documents_for,
    looked_up,
    open_index,
    recorded,
    similarity_for,
    teacher_backend,
    write_traces,
)
from samrag.arguments import LoopArguments, StudyArguments, TeacherArguments
from samrag.engines.base import Backend
from samrag.engines.recorded import Store
from samrag.files import read_records, write_json
from samrag.programs.climb import Assessment
from samrag.prompts import PromptStyle
from samrag.schedule import Schedule
from samrag.schema import Document, Question

log = logging.getLogger(__name__)

R, TUNED_R, M, TUNED_M, G = "R", "R*", "M", "M*", "G"
CHECKS = {
    "rag": Method("rag"),
    "is_rel": Method("sam_rag", is_use=False, is_sup=False),
    "no_is_sup": Method("sam_rag", is_sup=False),
    "no_is_use": Method("sam_rag", is_use=False),
    "all": Method("sam_rag"),
    "climb": Method("climb", pool=True),
    "no_pool": Method("climb"),
    "no_critic": Method("climb", pool=True, critic=False),
    "no_iteration": Method("climb", pool=True, iteration=False),
    "no_facet": Method("climb", pool=True, facet_diagnosis=False),
}
"""The rows of SAM-RAG's Table 3, and those of CLIMB's Table 2."""
CLIMB_CHECKS = tuple(name for name, method in CHECKS.items() if method.name == "climb")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One system of the grid."""

    name: str
    method: str
    retriever: str
    student: str
    checks: str


def cell(checks: str, retriever: str, student: str) -> Cell:
    """A cell with its name."""
    method = CHECKS[checks].name
    label = method if checks in ("rag", "all", "climb") else f"{method}-{checks}"
    name = f"{label}-{retriever}-{student}".replace("*", "star")
    return Cell(name, method, retriever, student, checks)


def grid(with_teacher: bool, climb: bool = False) -> list[Cell]:
    """Table 2 for both methods, and Table 3's ablations with R* and M*; CLIMB with R* by the models that can judge."""
    students = [M, TUNED_M, *([G] if with_teacher else [])]
    cells = [
        cell(checks, retriever, student)
        for student in students
        for retriever in (R, TUNED_R)
        for checks in ("rag", "all")
    ]
    cells += [cell(checks, TUNED_R, TUNED_M) for checks in ("is_rel", "no_is_sup", "no_is_use")]
    refiners = students[1:] if climb else []
    return [*cells, *(cell(checks, TUNED_R, student) for student in refiners for checks in CLIMB_CHECKS)]


async def run_study(arguments: StudyArguments, loop: LoopArguments, teacher: TeacherArguments) -> list[Cell]:
    """Run every cell that is not done; all share one call store, so nothing is asked twice."""
    questions = read_records(Path(arguments.questions_file), Question)[: arguments.max_questions]
    documents = read_records(Path(arguments.documents_file), Document)
    cells = grid(arguments.with_teacher, arguments.climb)
    rankings = _rankings(cells, questions, documents, arguments, loop)
    embedders = {R: arguments.embedder, TUNED_R: arguments.tuned_embedder}
    similarities = {name: similarity_for(loop, embedder) for name, embedder in embedders.items()}
    root, folder = Path(arguments.image_root), Path(arguments.output_dir)
    store = Store(Path(teacher.store))
    backends = _backends(arguments, teacher, root)
    try:
        for item in cells:
            local, method = item.student != G, CHECKS[item.checks]
            ranking = rankings[item.retriever, method.pool]
            style = PromptStyle.STUDENT if local else PromptStyle.TEACHER
            engine = recorded(backends[item.student], store, root, style)
            await write_traces(
                folder / "cells" / item.name,
                {"engine": engine.identity, "rankings": _ids(ranking)},
                method,
                questions,
                ranking,
                engine,
                Schedule.LOCKSTEP if local else Schedule.CONCURRENT,
                dataclasses.replace(loop, assessment=Assessment.VERDICTS) if local else loop,
                arguments.max_in_flight,
                similarities[item.retriever],
            )
    finally:
        for backend in backends.values():
            await backend.close()
        store.close()
    write_json(folder / "study.json", {
        "cells": [dataclasses.asdict(item) for item in cells],
        "questions": arguments.questions_file,
        "documents": arguments.documents_file,
        "image_root": arguments.image_root,
        "teacher_is_simulated": arguments.teacher_is_simulated,
    })  # fmt: skip
    return cells


def _rankings(
    cells: Sequence[Cell],
    questions: Sequence[Question],
    documents: Sequence[Document],
    arguments: StudyArguments,
    loop: LoopArguments,
) -> dict[tuple[str, bool], list[list[Document]]]:
    """What the cells read, by retriever and whether it is a pool."""
    places = {
        R: (Path(arguments.index_dir), arguments.embedder),
        TUNED_R: (Path(arguments.tuned_index_dir), arguments.tuned_embedder),
    }
    wanted = {(item.retriever, CHECKS[item.checks].pool): CHECKS[item.checks] for item in cells}
    opened = {name: open_index(questions, documents, *places[name]) for name in sorted({name for name, _ in wanted})}
    return {key: looked_up(documents_for(method, *opened[key[0]], loop), documents) for key, method in wanted.items()}


def _ids(rankings: Sequence[Sequence[Document]]) -> str:
    return hashlib.sha256(repr([[d.doc_id for d in ranking] for ranking in rankings]).encode()).hexdigest()


def _backends(arguments: StudyArguments, teacher: TeacherArguments, root: Path) -> dict[str, Backend]:
    from samrag.engines.local import LocalBackend

    tuned = LocalBackend.load(
        arguments.model_path,
        adapter=arguments.adapter,
        image_root=root,
        batch_tokens=arguments.batch_tokens,
        max_batch=arguments.max_batch,
        num_threads=arguments.num_threads,
    )
    backends: dict[str, Backend] = {M: tuned.with_adapter(False), TUNED_M: tuned}
    if arguments.with_teacher:
        backends[G] = teacher_backend(teacher, root)
    return backends
