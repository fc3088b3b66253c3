"""Teacher replies that agree with gold, made into training rows."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from samrag.arguments import DistillArguments, TeacherArguments
from samrag.calls import Answer, Caption, Judgement
from samrag.engines.base import Engine
from samrag.errors import UserError
from samrag.programs.distill import Distilled, DistillOptions, Passed, distill
from samrag.programs.steps import spoken
from samrag.progress import progress
from samrag.prompts import PromptStyle, render, template_hash
from samrag.replies import NOT_STATED, write
from samrag.schedule import Schedule, run
from samrag.schema import ChatMessage, Document, DroppedItem, Question, SftRow, Usage


def target_text(reply: Judgement | Answer | Caption) -> str:
    """A reply as the student is to write it: the JSON contract, chain of thought first."""
    if isinstance(reply, Judgement):
        return write(reply.reasoning, reply.verdict)
    if isinstance(reply, Caption):
        return write("", reply.text)
    values = list(reply.values) or [NOT_STATED]
    return write(reply.reasoning, values[0] if len(values) == 1 else values)


def sft_row(question_id: str, passed: Passed) -> SftRow:
    """A row with the student's lean prompt: the teacher's worked examples are not part of what is learnt."""
    prompt = render(passed.call, PromptStyle.STUDENT)
    return SftRow(
        (prompt.message(), ChatMessage("assistant", target_text(passed.reply))),
        (prompt.image,) if prompt.image else (),
        passed.call.kind,
        passed.label,
        question_id,
        passed.doc_ids,
        template_hash(PromptStyle.STUDENT),
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


async def ask_teacher(
    questions: Sequence[Question],
    documents: Mapping[str, Document],
    rankings: Sequence[Sequence[Document]],
    engine: Engine,
    arguments: DistillArguments,
    teacher: TeacherArguments,
) -> tuple[list[Distilled], Usage]:
    """Run the recipe for every question; results in the order of the questions."""
    options = DistillOptions(
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        num_samples=arguments.num_samples,
        bridge_positives=arguments.bridge_positives,
        multi_document=arguments.multi_document,
        refusals=arguments.refusals,
    )
    programs = []
    for question, ranking in zip(questions, rankings, strict=True):
        positives = [documents[i] for i in question.support_ids]
        negatives = draw_negatives(question, ranking, len(positives), arguments)
        wrong = draw_wrong_answers(question, questions, arguments.wrong_answers, arguments.seed)
        programs.append(distill(question, positives, negatives, wrong, options))
    results: dict[int, Distilled] = {}
    total = Usage()
    with progress("distilling", len(programs)) as advance:
        async for position, result in run(programs, engine, Schedule.CONCURRENT, teacher.concurrency):
            results[position] = result.value
            total += result.usage
            advance(note=f"{total.calls:,} calls, {total.cached_calls:,} stored, {total.failures:,} failed")
    return [results[i] for i in range(len(programs))], total


def rows_of(results: Sequence[Distilled], max_per_kind: int | None, seed: int) -> list[SftRow]:
    """All rows, capped per kind by a seeded draw, in the order of the questions."""
    rows = [sft_row(result.question_id, passed) for result in results for passed in result.passed]
    if max_per_kind is None:
        return rows
    by_kind: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        by_kind[row.kind].append(number)
    rng = random.Random(f"cap:{seed}")
    kept = {i for numbers in by_kind.values() for i in rng.sample(numbers, min(max_per_kind, len(numbers)))}
    return [row for number, row in enumerate(rows) if number in kept]


def data_card(
    rows: Sequence[SftRow], dropped: Sequence[DroppedItem], usage: Usage, teacher: TeacherArguments, num_questions: int
) -> str:
    """A page that says what is in the set, what was refused and why, and what it took."""
    kinds = Counter((row.kind, row.label) for row in rows)
    reasons = Counter((item.kind, item.reason) for item in dropped)
    lines = [
        "# Teacher data",
        "",
        f"{len(rows):,} rows from {num_questions:,} questions; teacher `{teacher.teacher_model}`; "
        f"student templates `{template_hash(PromptStyle.STUDENT)}`, "
        f"teacher templates `{template_hash(PromptStyle.TEACHER)}`.",
        "",
        f"{usage.calls:,} calls ({usage.input_tokens:,} tokens in, {usage.output_tokens:,} out), "
        f"{usage.failures:,} without a usable reply.",
        "",
        "Every row's verdict or answer agrees with the gold labels; a failed call is never a label.",
        "",
        "## Rows",
        "",
        "| kind | label | rows |",
        "|---|---|---:|",
        *(f"| {kind} | {label} | {count:,} |" for (kind, label), count in sorted(kinds.items())),
        "",
        "## Dropped",
        "",
        "| kind | reason | items |",
        "|---|---|---:|",
        *(f"| {kind} | {reason} | {count:,} |" for (kind, reason), count in sorted(reasons.items())),
        "",
    ]
    return "\n".join(lines)


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
