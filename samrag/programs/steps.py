"""Calls that several programs make, and what they do with a document. Pure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from samrag.calls import Answer, Call, CallKind, Caption, Failure, Judgement, Passage, Reply, Sampling
from samrag.schema import Document, Draft, ExaminedDocument, Modality, Question, Verdict


@dataclass(frozen=True, slots=True)
class Kept:
    """A document in the context C, as the model sees it there."""

    doc_id: str
    passage: Passage


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How replies are drawn."""

    temperature: float = 0.0
    """Temperature of every first call; 0 is greedy."""
    max_tokens: int = 512
    """Longest reply, in tokens."""
    seed: int = 0
    """Seed of the draws."""

    def sampling(self, temperature: float | None = None) -> Sampling:
        """Sampling of one call."""
        return Sampling(self.temperature if temperature is None else temperature, self.max_tokens, self.seed)


@dataclass(frozen=True, slots=True)
class Judged:
    """A document after the relevance step: what is recorded of it, and its passage when it is usable."""

    document: Document
    verdict: Verdict | None
    reasoning: str
    passage: Passage | None
    probability: float | None = None
    failure: str = ""

    def examined(self, batch: int, kept: bool) -> ExaminedDocument:
        """The trace's record."""
        return ExaminedDocument(
            self.document.doc_id, batch, kept, self.verdict, self.reasoning, self.probability, self.failure
        )


def passages(context: Sequence[Kept]) -> tuple[Passage, ...]:
    """What the model sees of the context C."""
    return tuple(kept.passage for kept in context)


def caption_for(question: str, document: Document, sampling: Sampling, sample_index: int = 0) -> Call:
    """Ask for the question-specific caption d_sc of an image (SAM-RAG, section 3.4.3)."""
    return Call(
        CallKind.CAPTION_QUERY,
        question,
        title=document.title,
        image=document.image,
        sampling=sampling,
        sample_index=sample_index,
    )


def relevance_of_text(question: str, passage: Passage, sampling: Sampling, sample_index: int = 0) -> Call:
    """Ask is_rel of a passage."""
    return Call(CallKind.IS_REL_TEXT, question, (passage,), sampling=sampling, sample_index=sample_index)


def relevance_of_image(question: str, document: Document, sampling: Sampling, sample_index: int = 0) -> Call:
    """Ask is_rel of an image in one call, whose reasoning serves as the caption (SAM-RAG, prompt B.5)."""
    return Call(
        CallKind.IS_REL_IMAGE,
        question,
        title=document.title,
        image=document.image,
        sampling=sampling,
        sample_index=sample_index,
    )


def _judged(document: Document, reply: Reply, passage: Passage | None) -> Judged:
    if isinstance(reply, Judgement):
        shown = passage or Passage(document.title, reply.reasoning)
        return Judged(document, reply.verdict, reply.reasoning, shown, reply.probability)
    assert isinstance(reply, Failure), f"a relevance call got {type(reply).__name__}"
    return Judged(document, None, "", None, failure=reply.reason)


def view_documents(
    question: str, documents: Sequence[Document], sampling: Sampling
) -> Generator[list[Call], list[Reply], list[Judged]]:
    """Turn documents into passages without judging them: images become query captions, all in one step."""
    images = [document for document in documents if document.modality is Modality.IMAGE]
    replies = yield [caption_for(question, document, sampling) for document in images]
    captions = {document.doc_id: reply for document, reply in zip(images, replies, strict=True)}
    viewed = []
    for document in documents:
        if document.modality is Modality.TEXT:
            viewed.append(Judged(document, None, "", Passage(document.title, document.text)))
            continue
        reply = captions[document.doc_id]
        if isinstance(reply, Caption):
            viewed.append(Judged(document, None, reply.text, Passage(document.title, reply.text)))
        else:
            assert isinstance(reply, Failure), f"a caption call got {type(reply).__name__}"
            viewed.append(Judged(document, None, "", None, failure=reply.reason))
    return viewed


def judge_merged(
    question: str, documents: Sequence[Document], sampling: Sampling
) -> Generator[list[Call], list[Reply], list[Judged]]:
    """is_rel of documents, one call each: an image's verdict and caption come from the same reply."""
    calls = [
        relevance_of_image(question, document, sampling)
        if document.modality is Modality.IMAGE
        else relevance_of_text(question, Passage(document.title, document.text), sampling)
        for document in documents
    ]
    replies = yield calls
    return [
        _judged(document, reply, call.passages[0] if call.passages else None)
        for document, call, reply in zip(documents, calls, replies, strict=True)
    ]


def judge_two_step(
    question: str, documents: Sequence[Document], sampling: Sampling
) -> Generator[list[Call], list[Reply], list[Judged]]:
    """is_rel of documents, images by their query caption first (SAM-RAG, section 3.4.3 as written)."""
    viewed = yield from view_documents(question, documents, sampling)
    usable = [(item.document, item.passage) for item in viewed if item.passage is not None]
    replies = yield [relevance_of_text(question, passage, sampling) for _, passage in usable]
    judged = {
        document.doc_id: _judged(document, reply, passage)
        for (document, passage), reply in zip(usable, replies, strict=True)
    }
    return [judged.get(item.document.doc_id, item) for item in viewed]


@dataclass(slots=True)
class Log:
    """What a program has seen and written so far."""

    documents: list[ExaminedDocument] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)


def answer_call(
    question: Question, context: Sequence[Kept], sampling: Sampling, sample_index: int = 0, critique: str = ""
) -> Call:
    """Ask for an answer from the context C."""
    return Call(
        CallKind.ANSWER,
        question.question,
        passages(context),
        critique=critique,
        sampling=sampling,
        sample_index=sample_index,
    )


def spoken(values: Sequence[str]) -> str:
    """An answer list as the one string that is put to a judge."""
    return "; ".join(values)


def comparable(answer: Answer) -> tuple[str, ...]:
    """An answer without case and order: equal for answers that say the same."""
    return tuple(sorted(value.casefold() for value in answer.values))


def drafted(reply: Reply, context: Sequence[Kept], batch: int, regeneration: int = 0) -> Draft:
    """Record an answer call's reply."""
    ids = tuple(kept.doc_id for kept in context)
    if isinstance(reply, Answer):
        return Draft(reply.values, reply.reasoning, ids, batch, regeneration)
    assert isinstance(reply, Failure), f"an answer call got {type(reply).__name__}"
    return Draft((), "", ids, batch, regeneration, failure=reply.reason)
