"""SAM-RAG's adaptive loop (section 3.4, Table 1). Pure.

What the paper leaves open is an option here. Left out on purpose: speculative judging, and calibrated verdict modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from samrag.calls import Answer, Call, CallKind, Failure, Judgement, Program, Reply
from samrag.programs.steps import (
    Judged,
    Kept,
    Log,
    SamplingOptions,
    answer_call,
    comparable,
    drafted,
    judge_merged,
    judge_two_step,
    passages,
    spoken,
    view_documents,
)
from samrag.schema import Document, Draft, ExitReason, Question, Trace, Verdict


class ImageJudgement(StrEnum):
    """How an image's relevance is judged."""

    MERGED = "merged"  # one call: verdict, and reasoning that serves as caption (the paper's prompt B.5)
    TWO_STEP = "two_step"  # query caption, then is_rel of the caption (the paper's section 3.4.3)


class Exhausted(StrEnum):
    """What to return when the documents run out without a verified answer."""

    BEST = "best"  # the last partly supported draft, else abstain
    ABSTAIN = "abstain"  # nothing
    CONTEXT = "context"  # the last draft of any kind; without one, an answer from whatever was kept
    CLOSED_BOOK = "closed_book"  # the last partly supported draft, else an answer without documents


@dataclass(frozen=True, slots=True)
class SamRagOptions(SamplingOptions):
    """Options of the loop; defaults where the paper is silent follow its reference code or say why they do not."""

    batch_size: int = 7
    """Documents judged per retrieval batch (reference code, LLaVA)."""
    max_batches: int = 4
    """Retrieval batches per question at most."""
    max_regenerations: int = 2
    """Answers drawn anew after is_use False, at most, in one batch."""
    regeneration_temperature: float = 0.7
    """A greedy second draft would be the first one again."""
    critique: bool = True
    """Tell the model why its last answer was refused."""
    num_votes: int = 1
    """Self-consistency of the answer; more than 1 needs `vote_temperature` above 0."""
    vote_temperature: float = 0.7
    """Temperature of the votes."""
    is_rel: bool = True
    """Judge each document's relevance; off keeps every document of a batch."""
    is_use: bool = True
    """Judge whether the answer suits the question."""
    is_sup: bool = True
    """Judge whether the context supports the answer."""
    is_use_content: bool = True
    """Show the context to is_use (prompt B.4); off: question and answer alone (Table 1)."""
    image_judgement: ImageJudgement = ImageJudgement.MERGED
    """How an image's relevance is judged."""
    on_exhausted: Exhausted = Exhausted.BEST
    """What to return when no answer was verified."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_batches", "num_votes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_regenerations < 0:
            raise ValueError(f"max_regenerations is {self.max_regenerations}; it must be 0 or more")
        if self.max_regenerations and self.regeneration_temperature <= 0 and not self.critique:
            raise ValueError(
                "regeneration_temperature must be above 0 without critique: the redrawn answer is the same"
            )
        if self.num_votes > 1 and self.vote_temperature <= 0:
            raise ValueError("num_votes above 1 needs vote_temperature above 0: greedy votes are all the same")


Steps = Generator[list[Call], list[Reply], Draft]


def sam_rag(question: Question, ranking: Sequence[Document], options: SamRagOptions) -> Program[Trace]:
    """Yield calls, receive replies, return a Trace (SAM-RAG, section 3.4).

    Args:
        question: the question.
        ranking: documents, best first; read in batches.
        options: see `SamRagOptions`.
    """
    context: list[Kept] = []
    log = Log()

    def finish(answers: tuple[str, ...], reason: ExitReason, ids: tuple[str, ...]) -> Trace:
        return Trace(question.question_id, "sam_rag", answers, reason, ids, tuple(log.documents), tuple(log.drafts))

    for number, batch in enumerate(_batches(ranking, options)):
        judged = yield from _judge(question.question, batch, options)
        fresh = [Kept(j.document.doc_id, j.passage) for j in judged if j.passage and j.verdict is not Verdict.FALSE]
        log.documents += [j.examined(number, j.passage is not None and j.verdict is not Verdict.FALSE) for j in judged]
        context += fresh
        if not fresh:  # F stays False: nothing new to answer from
            continue
        draft = yield from _answer(question, context, number, options, log)
        if draft.failure:
            return finish((), ExitReason.ENGINE_FAILURE, draft.context_ids)
        if not draft.answers:  # the content lacks it: keep C, as for Partial
            continue
        if not options.is_sup:
            refused = draft.is_use is Verdict.FALSE
            reason = ExitReason.UNVERIFIED if refused else ExitReason.ANSWERED
            return finish(draft.answers, reason, draft.context_ids)
        draft = yield from _support(question, context, draft, options)
        log.drafts[-1] = draft
        if draft.is_sup is Verdict.TRUE:
            return finish(draft.answers, ExitReason.VERIFIED, draft.context_ids)
        if draft.is_sup is Verdict.FALSE:
            context.clear()
    if not ranking:
        return finish((), ExitReason.NO_DOCUMENTS, ())
    last = yield from _exhausted(question, context, options, log)
    if last.failure:
        return finish((), ExitReason.ENGINE_FAILURE, last.context_ids)
    if not last.answers:
        return finish((), ExitReason.NO_EVIDENCE, tuple(kept.doc_id for kept in context))
    reason = ExitReason.BEST_EFFORT if last.is_sup is Verdict.PARTIAL else ExitReason.UNVERIFIED
    return finish(last.answers, reason, last.context_ids)


def _batches(ranking: Sequence[Document], options: SamRagOptions) -> Generator[Sequence[Document]]:
    starts = range(0, len(ranking), options.batch_size)
    for start in islice(starts, options.max_batches):
        yield ranking[start : start + options.batch_size]


def _judge(
    question: str, batch: Sequence[Document], options: SamRagOptions
) -> Generator[list[Call], list[Reply], list[Judged]]:
    if not options.is_rel:
        return (yield from view_documents(question, batch, options.sampling()))
    judge = judge_merged if options.image_judgement is ImageJudgement.MERGED else judge_two_step
    return (yield from judge(question, batch, options.sampling()))


def _answer(question: Question, context: Sequence[Kept], batch: int, options: SamRagOptions, log: Log) -> Steps:
    """Draft an answer; while is_use is False, draft again, a bounded number of times. The last draft goes on."""
    critique = ""
    for regeneration in range(options.max_regenerations + 1):
        draft = yield from _draft(question, context, batch, regeneration, critique, options)
        if options.is_use and draft.answers:
            draft = yield from _use(question, context, draft, options)
        log.drafts.append(draft)
        if draft.failure or not draft.answers or draft.is_use is not Verdict.FALSE:
            break
        critique = f"{spoken(draft.answers)}: {draft.is_use_reasoning}" if options.critique else ""
    return draft


def _draft(
    question: Question, context: Sequence[Kept], batch: int, regeneration: int, critique: str, options: SamRagOptions
) -> Steps:
    """One draft, by vote when self-consistency is on."""
    temperature = options.temperature if regeneration == 0 else options.regeneration_temperature
    if options.num_votes > 1:
        temperature = max(temperature, options.vote_temperature)
    sampling = options.sampling(temperature)
    first = regeneration * options.num_votes
    replies = yield [
        answer_call(question, context, sampling, first + vote, critique) for vote in range(options.num_votes)
    ]
    return drafted(_majority(replies), context, batch, regeneration)


def _majority(replies: Sequence[Reply]) -> Reply:
    """The most frequent answer, compared without case and order; of equals the first. Failures have no vote."""
    answers = [reply for reply in replies if isinstance(reply, Answer)]
    if not answers:
        return replies[0]
    keys = [comparable(answer) for answer in answers]
    winner = Counter(keys).most_common(1)[0][0]  # most_common keeps first-seen order among equals
    return answers[keys.index(winner)]


def _use(question: Question, context: Sequence[Kept], draft: Draft, options: SamRagOptions) -> Steps:
    shown = passages(context) if options.is_use_content else ()
    (reply,) = yield [
        Call(CallKind.IS_USE, question.question, shown, answer=spoken(draft.answers), sampling=options.sampling())
    ]
    if isinstance(reply, Judgement):
        return replace(draft, is_use=reply.verdict, is_use_reasoning=reply.reasoning)
    assert isinstance(reply, Failure), f"an is_use call got {type(reply).__name__}"
    return draft  # no verdict: the draft goes on to is_sup, with is_use None in the trace


def _support(question: Question, context: Sequence[Kept], draft: Draft, options: SamRagOptions) -> Steps:
    (reply,) = yield [
        Call(
            CallKind.IS_SUP,
            question.question,
            passages(context),
            answer=spoken(draft.answers),
            sampling=options.sampling(),
        )
    ]
    if isinstance(reply, Judgement):
        return replace(draft, is_sup=reply.verdict, is_sup_reasoning=reply.reasoning)
    assert isinstance(reply, Failure), f"an is_sup call got {type(reply).__name__}"
    return draft  # no verdict: not verified, and no reason to clear C


def _exhausted(question: Question, context: Sequence[Kept], options: SamRagOptions, log: Log) -> Steps:
    """The draft to end with when no answer was verified; one without answers means to abstain."""
    nothing = Draft((), "", (), batch=-1)
    spoken_drafts = [draft for draft in log.drafts if draft.answers]
    if options.on_exhausted is Exhausted.ABSTAIN:
        return nothing
    if options.on_exhausted is Exhausted.CONTEXT:
        if spoken_drafts or not context:
            return spoken_drafts[-1] if spoken_drafts else nothing
        return (yield from _last_resort(question, context, options, log))
    partly = [draft for draft in spoken_drafts if draft.is_sup is Verdict.PARTIAL]
    if partly or options.on_exhausted is Exhausted.BEST:
        return partly[-1] if partly else nothing
    return (yield from _last_resort(question, (), options, log))


def _last_resort(question: Question, context: Sequence[Kept], options: SamRagOptions, log: Log) -> Steps:
    """An answer that nothing verifies."""
    draft = yield from _draft(question, context, -1, 0, "", options)
    log.drafts.append(draft)
    return draft
