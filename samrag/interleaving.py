"""Training data for interleaved answers, in three stages: a teacher drafts, a person refines, filters decide.

A draft is cut into blocks: paragraphs, and the images between them. On the page of `samrag.report.refining` a person
moves and removes images, and accepts or rejects the draft; what comes back is a list of block numbers for each draft,
so a refinement can neither change words nor show an image that the draft did not have. Only accepted drafts become
rows; every other one is named with its reason.

Left out: images in tables, which stay with their table's text; changing words; and two people on one draft.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from samrag.arguments import InterleaveArguments
from samrag.calls import INTERLEAVED_KINDS, Call, Composition, Passage, Program, Reply
from samrag.engines.base import Engine
from samrag.errors import UserError
from samrag.files import read_json
from samrag.interleaved import CATEGORIES, ImageReference, structure
from samrag.metrics.interleaved import image_set_score
from samrag.programs.interleaved import InterleavedOptions, interleaved
from samrag.progress import progress
from samrag.prompts import PromptStyle, render, template_hash
from samrag.prompts.render import IMAGE_MARK
from samrag.replies import write_composition
from samrag.schedule import Schedule, run
from samrag.schema import (
    ChatMessage,
    DroppedItem,
    InterleavedQuestion,
    InterleavedTrace,
    Language,
    SftRow,
    Usage,
)

FORMAT = "samrag-refinement-1"
"""Names the form of the page's export."""

# --- stage 1: drafts ---


@dataclass(frozen=True, slots=True)
class Composed:
    """What the program did for a question, with the calls for drafts and what came of them."""

    trace: InterleavedTrace
    compositions: tuple[tuple[Call, Reply], ...]


@dataclass(frozen=True, slots=True)
class TeacherDraft:
    """A teacher's answer to one question: a line of drafts.jsonl."""

    question_id: str
    question: str
    language: Language
    markdown: str
    """Empty: there is no answer."""
    exit_reason: str
    """How the program ended, and so how far the answer is verified."""
    reason: str = ""
    """The teacher's reasoning."""
    category: str = ""
    passages: tuple[Passage, ...] = ()
    """What it was written from, as prompts show it."""
    context_ids: tuple[str, ...] = ()
    """The documents of the passages."""
    images: tuple[str, ...] = ()
    """Ids of the candidate images, in the order that IMG#k counts them."""
    problems: tuple[str, ...] = ()
    """References that were dropped."""
    reference: str = ""
    """Gold answer, where there is one."""
    call_key: str = ""
    """Key of the reply in the call store."""
    teacher: str = ""

    @property
    def call(self) -> Call:
        """What the student will be asked."""
        return Call(INTERLEAVED_KINDS[self.language], self.question, self.passages)


def options_of(arguments: InterleaveArguments) -> InterleavedOptions:
    """The program's options from the arguments that bear their names."""
    given = asdict(arguments)
    names = [field.name for field in fields(InterleavedOptions) if field.name in given]
    return InterleavedOptions(**{name: given[name] for name in names})


def composed(question: InterleavedQuestion, options: InterleavedOptions) -> Program[Composed]:
    """The program for one question, its calls for drafts noted."""
    program = interleaved(question, options)
    noted: list[tuple[Call, Reply]] = []
    replies: list[Reply] | None = None
    while True:
        try:
            calls = next(program) if replies is None else program.send(replies)
        except StopIteration as end:
            return Composed(end.value, tuple(noted))
        replies = yield calls
        kinds = INTERLEAVED_KINDS.values()
        noted += [(call, reply) for call, reply in zip(calls, replies, strict=True) if call.kind in kinds]


async def ask_drafts(
    questions: Sequence[InterleavedQuestion],
    engine: Engine,
    arguments: InterleaveArguments,
    teacher_model: str,
    concurrency: int,
) -> tuple[list[TeacherDraft], Usage]:
    """A draft for every question, in their order."""
    options = options_of(arguments)
    programs = [composed(question, options) for question in questions]
    results: dict[int, Composed] = {}
    total = Usage()
    with progress("drafting", len(programs)) as advance:
        async for position, result in run(programs, engine, Schedule.CONCURRENT, concurrency):
            results[position] = result.value
            total += result.usage
            advance(note=engine.meter.note())
    drafts = [draft_of(question, results[i], engine, teacher_model) for i, question in enumerate(questions)]
    return drafts, total


def draft_of(question: InterleavedQuestion, done: Composed, engine: Engine, teacher_model: str) -> TeacherDraft:
    """The draft that the program chose, with the call that it came from."""
    trace = done.trace
    draft = TeacherDraft(
        question.question_id,
        question.question,
        question.language,
        trace.markdown,
        str(trace.exit_reason),
        category=question.question_type,
        images=trace.images,
        problems=trace.problems,
        reference=question.reference,
        teacher=teacher_model,
    )
    if not trace.markdown:
        return draft
    chosen = next(item for item in trace.drafts if item.answers == (trace.markdown,))
    call, reply = next(pair for pair in done.compositions if pair[0].sample_index == chosen.regeneration)
    assert isinstance(reply, Composition), f"an answer came from {type(reply).__name__}"
    return replace(
        draft,
        reason=reply.reasoning,
        category=reply.category if reply.category in CATEGORIES else question.question_type,
        passages=call.passages,
        context_ids=trace.context_ids,
        call_key=engine.key(call),
    )


# --- blocks ---


class BlockKind(StrEnum):
    """What a block is."""

    TEXT = "text"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a draft that a person sees as one."""

    kind: BlockKind
    markdown: str
    index: int = 0
    """Number of the image; 0 for text."""
    alt: str = ""


def blocks_of(draft: TeacherDraft) -> list[Block]:
    """A draft's paragraphs and images, in order; a table is one block, images in it included."""
    blocks: list[Block] = []
    for paragraph in re.split(r"\n[ \t]*\n", draft.markdown):
        if any(line.lstrip().startswith("|") for line in paragraph.splitlines()):
            blocks.append(Block(BlockKind.TEXT, paragraph.strip("\n")))
            continue
        words = ""
        for segment in structure(paragraph, len(draft.images)).segments:
            if isinstance(segment, ImageReference) and not segment.problem:
                blocks += _text_block(words)
                blocks.append(Block(BlockKind.IMAGE, segment.source, segment.index, segment.alt))
                words = ""
            else:
                words += segment.source
        blocks += _text_block(words)
    return blocks


def _text_block(words: str) -> list[Block]:
    return [Block(BlockKind.TEXT, words.strip("\n"))] if words.strip() else []


def arranged(draft: TeacherDraft, order: Sequence[int]) -> str:
    """The Markdown of a draft with its blocks in an order; as the teacher wrote it when nothing was changed.

    Raises:
        ValueError: a number is no block or comes twice, or the texts are not all there, in their own order.
    """
    blocks = blocks_of(draft)
    twice = [number for number, times in Counter(order).items() if times > 1]
    unknown = [number for number in order if not 0 <= number < len(blocks)]
    if unknown or twice:
        raise ValueError(f"block {(unknown or twice)[0]} {'does not exist' if unknown else 'comes twice'}")
    texts = [number for number, block in enumerate(blocks) if block.kind is BlockKind.TEXT]
    if [number for number in order if blocks[number].kind is BlockKind.TEXT] != texts:
        raise ValueError("a text is missing or was moved; only images may be")
    if list(order) == list(range(len(blocks))):
        return draft.markdown
    return "\n\n".join(blocks[number].markdown for number in order)


# --- stage 2: what a person decided ---


class _Item(BaseModel):
    """One decision, as the page exports it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question_id: Annotated[str, Field(min_length=1)]
    decision: Literal["accept", "reject", "open"]
    order: list[int]


class _Export(BaseModel):
    """A whole export."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["samrag-refinement-1"]
    drafts: str
    items: list[_Item]


@dataclass(frozen=True, slots=True)
class Refinement:
    """What a person decided on one draft."""

    question_id: str
    accepted: bool
    markdown: str
    """The draft with its images as the person left them."""


def read_refinements(paths: Sequence[Path], drafts: Sequence[TeacherDraft], drafts_hash: str) -> dict[str, Refinement]:
    """Decisions by question id; drafts that nobody decided on are not among them.

    Args:
        paths: exports of the page; people may share the drafts among them.
        drafts: what the page showed.
        drafts_hash: of drafts.jsonl, which an export must name.

    Raises:
        UserError: an export is no such file, is of other drafts, names a draft that does not exist, arranges blocks
            that it cannot, or two decisions are on one draft (the message names file and question).
    """
    by_id = {draft.question_id: draft for draft in drafts}
    found: dict[str, Refinement] = {}
    for path in paths:
        try:
            export = _Export.model_validate(read_json(path))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{path}, {where or 'file'}: {first['msg']}; export it again from the page.") from error
        if export.drafts != drafts_hash:
            raise UserError(f"{path} was exported from a page of other drafts; export it from the present page.")
        for item in export.items:
            where = f"{path}, question {item.question_id!r}"
            if item.question_id not in by_id:
                raise UserError(f"{where}: there is no such draft; export it again from the page.")
            try:
                markdown = arranged(by_id[item.question_id], item.order)
            except ValueError as error:
                raise UserError(f"{where}: {error}; export it again from the page.") from error
            if item.decision == "open":
                continue
            if item.question_id in found:
                raise UserError(f"{where} was decided before; keep one decision for each draft.")
            found[item.question_id] = Refinement(item.question_id, item.decision == "accept", markdown)
    return found


# --- stage 3: filters and rows ---


def rows_of(
    drafts: Sequence[TeacherDraft], refinements: Mapping[str, Refinement], arguments: InterleaveArguments
) -> tuple[list[SftRow], list[DroppedItem]]:
    """A row for each draft that a person accepted and the filters pass; all others with the reason."""
    rows, dropped = [], []
    for draft in drafts:
        refinement = refinements.get(draft.question_id)
        reason, detail = _refused(draft, refinement, arguments)
        if reason:
            kind = INTERLEAVED_KINDS[draft.language]
            dropped.append(DroppedItem(draft.question_id, kind, draft.context_ids, reason, detail[:300]))
        else:
            assert refinement is not None
            rows.append(sft_row(draft, refinement.markdown, arguments))
    return rows, dropped


def _refused(draft: TeacherDraft, refinement: Refinement | None, arguments: InterleaveArguments) -> tuple[str, str]:
    """Why a draft becomes no row, with a detail; empty when it becomes one."""
    if not draft.markdown:
        return "no_answer", draft.exit_reason
    if refinement is None:
        return "not_reviewed", draft.markdown
    markdown = refinement.markdown
    if not refinement.accepted:
        return "rejected", markdown
    images, texts = shown_numbers(draft)
    answer = structure(markdown, images, texts)
    if answer.problems:
        return "bad_reference", answer.problems[0]
    if IMAGE_MARK in markdown or IMAGE_MARK in draft.reason:
        return "image_marker", markdown  # a row would count it as an image
    if len(answer.images) < arguments.min_images:
        return "too_few_images", markdown
    if len(answer.citations) < arguments.min_citations:
        return "too_few_citations", markdown
    if draft.reference:
        gold = structure(draft.reference, len(draft.images)).images
        f1 = image_set_score(answer.images, gold).f1
        if f1 < arguments.min_image_f1:
            return "images_unlike_gold", f"F1 {f1:.2f}: {answer.images} where gold has {gold}"
    return "", ""


def shown_numbers(draft: TeacherDraft) -> tuple[set[int], set[int]]:
    """Numbers of the images and of the texts that the teacher was shown: each title is headed by its own."""
    found: dict[str, set[int]] = {"IMG": set(), "DOC": set()}
    for passage in draft.passages:
        match = re.match(r"(IMG|DOC)#([0-9]+)", passage.title)
        assert match is not None, f"the passage {passage.title!r} has no number"
        found[match[1]].add(int(match[2]))
    return found["IMG"], found["DOC"]


def sft_row(draft: TeacherDraft, markdown: str, arguments: InterleaveArguments) -> SftRow:
    """A row with the student's lean prompt: documents as the teacher saw them, and no critique of a former draft."""
    kind = draft.call.kind
    filters = ["references exist, each once", "accepted by a person"]
    if markdown != draft.markdown:
        filters.append("images rearranged by a person")
    if draft.reference and arguments.min_image_f1:
        filters.append("images agree with gold")
    return SftRow(
        (
            render(draft.call, PromptStyle.STUDENT).message(),
            ChatMessage("assistant", write_composition(draft.reason, draft.category, markdown)),
        ),
        (),
        kind,
        "answer",
        draft.question_id,
        draft.context_ids,
        template_hash(PromptStyle.STUDENT, kind),
        call_key=draft.call_key,
        teacher=draft.teacher,
        teacher_template=template_hash(PromptStyle.TEACHER, kind),
        filters=tuple(filters),
    )
