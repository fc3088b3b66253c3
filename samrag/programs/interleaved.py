"""Answers of text and images from retrieved documents, verified as SAM-RAG verifies (section 3.4). Pure.

RAG-IGBench's task (arXiv 2512.05119): texts are numbered DOC#1, DOC#2, ..., images IMG#1, IMG#2, ... over all that was
retrieved, and the model answers in Markdown that refers to both. An image stands in the prompt as the words that the
relevance step found for it. Numbers are given before anything is judged, so they mean the same whatever is kept.

With both checks off this is the benchmark's plain generation over captions. Left out: prompts with several images in
them, which the engines do not have yet.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from samrag.calls import INTERLEAVED_KINDS, Call, CallKind, Composition, Failure, Judgement, Passage, Program, Reply
from samrag.interleaved import BadReference, InterleavedAnswer, structure, to_markdown
from samrag.programs.steps import Judged, SamplingOptions, judge_merged, view_documents
from samrag.schema import Document, Draft, ExitReason, InterleavedQuestion, InterleavedTrace, Modality, Verdict


@dataclass(frozen=True, slots=True)
class InterleavedOptions(SamplingOptions):
    """Options of interleaved answers."""

    max_tokens: int = 2048
    """Longest reply, in tokens (the benchmark's)."""
    is_rel: bool = True
    """Judge each document's relevance, images too; off shows all of them."""
    is_sup: bool = True
    """Judge whether the kept documents support the answer."""
    max_regenerations: int = 1
    """Answers drawn anew, at most, after one with bad references or without full support."""
    regeneration_temperature: float = 0.7
    """Temperature of those."""
    bad_reference: BadReference = BadReference.DROP
    """What becomes of a reference that is still bad in the last draft: dropped, or left as the model wrote it."""

    def __post_init__(self) -> None:
        if self.max_regenerations < 0:
            raise ValueError(f"max_regenerations is {self.max_regenerations}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A kept document with its number."""

    doc_id: str
    is_image: bool
    number: int
    passage: Passage
    """Its title headed by the number."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A draft, and its answer with the references checked."""

    draft: Draft
    answer: InterleavedAnswer

    @property
    def rank(self) -> int:
        """The better of two drafts has the higher one; support counts, then that no reference is bad."""
        support = {Verdict.TRUE: 3, Verdict.PARTIAL: 2, None: 1, Verdict.FALSE: 0}[self.draft.is_sup]
        return 2 * support + (not self.answer.problems)


def interleaved(question: InterleavedQuestion, options: InterleavedOptions) -> Program[InterleavedTrace]:
    """Yield calls, receive replies, return a trace with the answer in Markdown.

    Args:
        question: the question with its retrieved documents; its gold is not looked at.
        options: see `InterleavedOptions`.
    """
    documents = question.documents
    trace = InterleavedTrace(
        question.question_id,
        "interleaved",
        markdown="",
        exit_reason=ExitReason.NO_DOCUMENTS,
        texts=tuple(document.doc_id for document in question.texts),
        images=tuple(document.doc_id for document in question.images),
        context_ids=(),
    )
    if not documents:
        return trace
    judge = judge_merged if options.is_rel else view_documents
    judged = yield from judge(question.question, documents, options.sampling())
    kept = [item.passage is not None and item.verdict is not Verdict.FALSE for item in judged]
    trace = replace(trace, documents=tuple(item.examined(0, keep) for item, keep in zip(judged, kept, strict=True)))
    context = _numbered(documents, judged, kept)
    if not context:
        failed = all(item.failure for item in judged)
        return replace(trace, exit_reason=ExitReason.ENGINE_FAILURE if failed else ExitReason.NO_EVIDENCE)
    written = yield from _write(question, context, options)
    return _finished(replace(trace, context_ids=tuple(item.doc_id for item in context)), written, options)


def _numbered(documents: Sequence[Document], judged: Sequence[Judged], kept: Sequence[bool]) -> list[_Shown]:
    """The kept documents, each with the number it has among all texts or all images."""
    counts = {Modality.TEXT: 0, Modality.IMAGE: 0}
    shown = []
    for document, item, keep in zip(documents, judged, kept, strict=True):
        counts[document.modality] += 1
        if keep:
            assert item.passage is not None
            number, is_image = counts[document.modality], document.modality is Modality.IMAGE
            title = f"{'IMG' if is_image else 'DOC'}#{number} {item.passage.title}".rstrip()
            shown.append(_Shown(document.doc_id, is_image, number, Passage(title, item.passage.text)))
    return shown


def _write(
    question: InterleavedQuestion, context: Sequence[_Shown], options: InterleavedOptions
) -> Generator[list[Call], list[Reply], list[_Written]]:
    """Draft, check references and support, draft again a bounded number of times; all drafts, in order."""
    written: list[_Written] = []
    critique = ""
    for regeneration in range(options.max_regenerations + 1):
        latest = yield from _draft(question, context, regeneration, critique, options)
        if options.is_sup and latest.draft.answers:
            latest = yield from _support(question, context, latest, options)
        written.append(latest)
        critique = _critique(latest)
        if latest.draft.failure or not critique:
            break
    return written


def _draft(
    question: InterleavedQuestion,
    context: Sequence[_Shown],
    regeneration: int,
    critique: str,
    options: InterleavedOptions,
) -> Generator[list[Call], list[Reply], _Written]:
    """One draft; its references must be among the kept documents."""
    temperature = options.regeneration_temperature if regeneration else options.temperature
    (reply,) = yield [
        Call(
            INTERLEAVED_KINDS[question.language],
            question.question,
            tuple(item.passage for item in context),
            critique=critique,
            sampling=options.sampling(temperature),
            sample_index=regeneration,
        )
    ]
    ids = tuple(item.doc_id for item in context)
    if not isinstance(reply, Composition):
        assert isinstance(reply, Failure), f"an interleaved call got {type(reply).__name__}"
        return _Written(Draft((), "", ids, 0, regeneration, failure=reply.reason), InterleavedAnswer(()))
    images, texts = ({item.number for item in context if item.is_image is wanted} for wanted in (True, False))
    answer = structure(reply.markdown, images, texts, options.bad_reference)
    markdown = to_markdown(answer).strip()
    return _Written(Draft((markdown,) if markdown else (), reply.reasoning, ids, 0, regeneration), answer)


def _support(
    question: InterleavedQuestion, context: Sequence[_Shown], written: _Written, options: InterleavedOptions
) -> Generator[list[Call], list[Reply], _Written]:
    """Ask is_sup of a draft; without a usable reply it stays unverified."""
    (reply,) = yield [
        Call(
            CallKind.IS_SUP,
            question.question,
            tuple(item.passage for item in context),
            answer=written.draft.answers[0],
            sampling=options.sampling(),
        )
    ]
    if isinstance(reply, Judgement):
        return replace(written, draft=replace(written.draft, is_sup=reply.verdict, is_sup_reasoning=reply.reasoning))
    assert isinstance(reply, Failure), f"an is_sup call got {type(reply).__name__}"
    return written


def _critique(written: _Written) -> str:
    """What is wrong with a draft; empty when nothing is known to be."""
    found = list(written.answer.problems)
    if written.draft.is_sup in (Verdict.PARTIAL, Verdict.FALSE):
        found.append(written.draft.is_sup_reasoning)
    return "\n".join(found)


def _finished(trace: InterleavedTrace, written: Sequence[_Written], options: InterleavedOptions) -> InterleavedTrace:
    """The trace with its best draft as the answer; an answer that the documents speak against is none."""
    trace = replace(trace, drafts=tuple(item.draft for item in written))
    spoken = [item for item in written if item.draft.answers]
    if not spoken:
        last = written[-1]
        reason = ExitReason.ENGINE_FAILURE if last.draft.failure else ExitReason.NO_EVIDENCE
        return replace(trace, exit_reason=reason, problems=last.answer.problems)
    best = max(spoken, key=lambda item: item.rank)  # of equals the first
    if best.draft.is_sup is Verdict.FALSE:
        return replace(trace, exit_reason=ExitReason.NO_EVIDENCE)
    reasons = {
        Verdict.TRUE: ExitReason.VERIFIED,
        Verdict.PARTIAL: ExitReason.BEST_EFFORT,
        None: ExitReason.UNVERIFIED if options.is_sup else ExitReason.ANSWERED,
    }
    return replace(
        trace,
        markdown=best.draft.answers[0],
        exit_reason=reasons[best.draft.is_sup],
        problems=best.answer.problems,
    )
