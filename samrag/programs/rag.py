"""Conventional RAG: answer once from the top k documents (SAM-RAG, section 4.3, "RAG"). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samrag.calls import Program
from samrag.programs.steps import Kept, SamplingOptions, answer_call, drafted, view_documents
from samrag.schema import Document, ExitReason, Question, Trace


@dataclass(frozen=True, slots=True)
class RagOptions(SamplingOptions):
    """Options of conventional RAG."""

    k: int = 8
    """Documents in the context (the paper's Table 2)."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k is {self.k}; it must be at least 1")


def rag(question: Question, ranking: Sequence[Document], options: RagOptions) -> Program[Trace]:
    """Yield calls, receive replies, return a Trace: images become query captions, then one answer from all k.

    Args:
        question: the question.
        ranking: documents, best first.
        options: see `RagOptions`.
    """
    top = ranking[: options.k]
    if not top:
        return Trace(question.question_id, "rag", (), ExitReason.NO_DOCUMENTS, ())
    viewed = yield from view_documents(question.question, top, options.sampling())
    context = [Kept(item.document.doc_id, item.passage) for item in viewed if item.passage is not None]
    documents = tuple(item.examined(0, item.passage is not None) for item in viewed)
    if not context:
        return Trace(question.question_id, "rag", (), ExitReason.ENGINE_FAILURE, (), documents)
    (reply,) = yield [answer_call(question, context, options.sampling())]
    draft = drafted(reply, context, 0)
    reason = (
        ExitReason.ENGINE_FAILURE if draft.failure else ExitReason.ANSWERED if draft.answers else ExitReason.NO_EVIDENCE
    )
    return Trace(question.question_id, "rag", draft.answers, reason, draft.context_ids, documents, (draft,))
