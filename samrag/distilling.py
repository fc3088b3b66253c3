"""Teacher replies that agree with gold, made into training rows."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from samrag.answering import looked_up, rank_documents
from samrag.arguments import DistillArguments
from samrag.calls import Call, FailureReason, Judgement
from samrag.engines.base import Engine
from samrag.errors import UserError
from samrag.files import read_records
from samrag.programs.distill import Distilled, DistillOptions, Material, Passed, distill, planned_calls
from samrag.programs.steps import spoken
from samrag.progress import progress
from samrag.prompts import PromptStyle, render, template_hash
from samrag.replies import write_reply
from samrag.schedule import Schedule, run
from samrag.schema import ChatMessage, Document, DroppedItem, Question, SftRow, Usage


def sft_row(question_id: str, passed: Passed, direct: bool, call_key: str, teacher_model: str) -> SftRow:
    """A row with the student's lean prompt: the teacher's worked examples are not part of what is learnt.

    Args:
        question_id: of which question.
        passed: the teacher's call and its reply.
        direct: teach the verdict alone, without the reasoning.
        call_key: of the reply in the call store.
        teacher_model: who wrote it.
    """
    prompt = render(replace(passed.call, direct=direct), PromptStyle.STUDENT)
    reply = replace(passed.reply, reasoning="") if direct and isinstance(passed.reply, Judgement) else passed.reply
    return SftRow(
        (prompt.message(), ChatMessage("assistant", write_reply(reply))),
        (prompt.image,) if prompt.image else (),
        passed.call.kind,
        passed.label,
        question_id,
        passed.doc_ids,
        template_hash(PromptStyle.STUDENT, passed.call.kind),
        direct,
        call_key,
        teacher_model,
        template_hash(PromptStyle.TEACHER, passed.call.kind),
        passed.filters,
    )


def draw_negatives(
    question: Question, ranking: Sequence[Document], num_positives: int, arguments: DistillArguments
) -> list[Document]:
    """Non-supports at random from the top of the ranking (section 3.3); the draw depends on seed and question alone."""
    candidates = [d for d in ranking if d.doc_id not in question.support_ids][: arguments.negatives_top]
    count = max(arguments.min_negatives, round(arguments.negatives_per_positive * num_positives))
    rng = random.Random(f"negatives:{arguments.seed}:{question.question_id}")
    return rng.sample(candidates, min(count, len(candidates)))


def draw_wrong_answers(question: Question, questions: Sequence[Question], count: int, seed: int) -> list[str]:
    """Answers of other questions, half of them from questions that begin alike, and so likely of the same sort."""
    rng = random.Random(f"wrong:{seed}:{question.question_id}")
    opening = question.question.split()[:2]
    others = [q for q in questions if q.answers and q.answers != question.answers]
    alike = [q for q in others if q.question.split()[:2] == opening]
    drawn: dict[str, None] = {}
    for turn in range(4 * count):
        pool = alike if alike and turn % 2 == 0 else others
        if not pool or len(drawn) == count:
            break
        drawn[spoken(rng.choice(pool).answers)] = None
    return list(drawn)


def options_of(arguments: DistillArguments) -> DistillOptions:
    """The recipe's options from the arguments that bear their names.

    Raises:
        UserError: a value is out of range.
    """
    given = asdict(arguments)
    try:
        return DistillOptions(
            **{field.name: given[field.name] for field in fields(DistillOptions) if field.name in given}
        )
    except ValueError as error:
        raise UserError(f"{error}.") from error


def read_materials(arguments: DistillArguments) -> tuple[list[Material], dict[str, Document]]:
    """Questions with their positives and drawn negatives, and the documents by id.

    Raises:
        UserError: a file is missing or broken, a support is missing, or the index is of other documents.
    """
    path = Path(arguments.documents_file)
    questions = read_records(Path(arguments.questions_file), Question)[: arguments.max_questions]
    documents = read_records(path, Document)
    by_id = documents_by_id(documents, path, questions)
    deep = arguments.negatives_top + max((len(question.support_ids) for question in questions), default=0)
    hits = rank_documents(questions, documents, Path(arguments.index_dir), arguments.embedder, deep)
    return materials_of(questions, by_id, looked_up(hits, documents), arguments), by_id


def materials_of(
    questions: Sequence[Question],
    documents: Mapping[str, Document],
    rankings: Sequence[Sequence[Document]],
    arguments: DistillArguments,
) -> list[Material]:
    """What the recipe is applied to, one item a question; `question_ids` picks some, the draws stay those of all.

    Raises:
        UserError: one of the `question_ids` is not there.
    """
    unknown = set(arguments.question_ids) - {question.question_id for question in questions}
    if unknown:
        raise UserError(f"question_ids: {min(unknown)!r} is not in {arguments.questions_file}; check the ids.")
    materials = []
    for question, ranking in zip(questions, rankings, strict=True):
        if arguments.question_ids and question.question_id not in arguments.question_ids:
            continue
        positives = [documents[i] for i in question.support_ids]
        negatives = draw_negatives(question, ranking, len(positives), arguments)
        wrong = draw_wrong_answers(question, questions, arguments.wrong_answers, arguments.seed)
        materials.append(Material(question, positives, negatives, wrong))
    return materials


async def ask_teacher(
    materials: Sequence[Material], engine: Engine, arguments: DistillArguments, concurrency: int
) -> tuple[list[Distilled], Usage]:
    """Run the recipe for every question; results in the order of the questions."""
    options = options_of(arguments)
    programs = [distill(material, options) for material in materials]
    num_planned = sum(len(planned_calls(material, options)) for material in materials)
    results: dict[int, Distilled] = {}
    total = Usage()
    with progress("distilling", len(programs)) as advance:
        async for position, result in run(programs, engine, Schedule.CONCURRENT, concurrency):
            results[position] = result.value
            total += result.usage
            advance(note=engine.meter.note(max(0, num_planned - total.calls)))
    return [results[i] for i in range(len(programs))], total


def rows_of(
    results: Sequence[Distilled], arguments: DistillArguments, teacher_model: str, key_of: Callable[[Call], str]
) -> list[SftRow]:
    """All rows in the order of the questions, balanced and capped per kind by seeded draws."""
    forms = (False, True) if arguments.direct_verdicts else (False,)
    rows = [
        sft_row(result.question_id, passed, direct, key_of(passed.call), teacher_model)
        for result in results
        for passed in result.passed
        for direct in forms
        if not direct or isinstance(passed.reply, Judgement)
    ]
    rng = random.Random(f"rows:{arguments.seed}")
    if arguments.max_class_ratio is not None:
        rows = _balanced(rows, arguments.max_class_ratio, rng)
    return rows if arguments.max_per_kind is None else _capped(rows, arguments.max_per_kind, rng)


def _grouped(rows: Sequence[SftRow], *names: str) -> dict[tuple[object, ...], list[int]]:
    """Row numbers by the values of some fields."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[tuple(getattr(row, name) for name in names)].append(number)
    return groups


def _balanced(rows: Sequence[SftRow], ratio: float, rng: random.Random) -> list[SftRow]:
    """Of each kind and form, no class larger than `ratio` times the smallest; the order is kept."""
    groups = _grouped(rows, "kind", "direct", "label")
    kept: set[int] = set()
    for group, numbers in groups.items():
        least = min(len(others) for other, others in groups.items() if other[:2] == group[:2])
        kept.update(rng.sample(numbers, min(len(numbers), int(ratio * least))))
    return [row for number, row in enumerate(rows) if number in kept]


def _capped(rows: Sequence[SftRow], most: int, rng: random.Random) -> list[SftRow]:
    """At most so many rows a kind; the order is kept."""
    groups = _grouped(rows, "kind").values()
    kept = {number for numbers in groups for number in rng.sample(numbers, min(len(numbers), most))}
    return [row for number, row in enumerate(rows) if number in kept]


def quarantined(dropped: Sequence[DroppedItem], command: str) -> list[DroppedItem]:
    """The items that got no usable reply, each with the command that tries its question again."""
    return [
        replace(item, replay=f"{command} --question_ids {item.question_id} --output_dir replay/{item.question_id}")
        for item in dropped
        if item.reason in list(FailureReason)
    ]


def documents_by_id(documents: Sequence[Document], path: Path, questions: Sequence[Question]) -> dict[str, Document]:
    """Index documents by id, and see that every support is there.

    Raises:
        UserError: a question has no support, or one that the documents lack.
    """
    by_id = {document.doc_id: document for document in documents}
    for question in questions:
        missing = [i for i in question.support_ids if i not in by_id]
        if missing or not question.support_ids:
            what = f"support {missing[0]!r} is not in {path}" if missing else "it has no supporting document"
            raise UserError(
                f"question {question.question_id!r}: {what}; prepare the data again, or remove the question."
            )
    return by_id
