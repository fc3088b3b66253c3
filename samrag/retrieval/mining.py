"""Hard negatives for the retriever (SAM-RAG, section 3.2): ten at random of the fifty best that are not positives."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from samrag.errors import UserError
from samrag.retrieval.index import Hit
from samrag.schema import Document, Question, RetrieverRow

logger = logging.getLogger(__name__)


def mine_negatives(
    questions: Sequence[Question],
    documents: Sequence[Document],
    rankings: Sequence[Sequence[Hit]],
    num_negatives: int = 10,
    top: int = 50,
    seed: int = 0,
    relative_margin: float | None = None,
    positive_scores: Sequence[Mapping[str, float]] | None = None,
    missing: Literal["error", "skip"] = "error",
) -> list[RetrieverRow]:
    """One row a question: its supports as positives, and negatives drawn from its ranking.

    Known positives are dropped by id, and documents whose text equals a positive's; of the rest the `top` best are
    kept and `num_negatives` drawn without replacement (all of them when there are fewer). The draw depends on the seed
    and the question's id alone. Negatives stand in the order drawn, so their first n are a uniform sample too.

    Args:
        questions: Questions with supports.
        documents: The corpus the rankings are over.
        rankings: Best first, one a question; give them at least `top` plus the number of positives deep.
        num_negatives: Negatives a question.
        top: Documents they are drawn from.
        seed: Of the draw.
        relative_margin: Also drop documents that score above (1 - margin) times the best positive's score, which are
            likely positives without a label (NV-Retriever, 2407.15831); None is the paper's rule.
        positive_scores: Scores of each question's positives by id; None takes them from the ranking where they occur.
        missing: What to do with supports that the corpus lacks: refuse, or leave them out, and with them questions
            that have no other.

    Raises:
        UserError: counts that do not fit, a question without supports, or a support that the corpus lacks.
    """
    _check(questions, rankings, num_negatives, top, relative_margin)
    texts = {document.doc_id: document.retrieval_text for document in documents}
    rows = []
    for number, (question, ranking) in enumerate(zip(questions, rankings, strict=True)):
        positives = _known_positives(question, texts, missing)
        if not positives:
            continue
        scores = {hit.doc_id: hit.score for hit in ranking}
        scores.update(positive_scores[number] if positive_scores is not None else {})
        candidates = _candidates(ranking, positives, texts)
        if relative_margin is not None:
            candidates = _below_margin(candidates, positives, scores, relative_margin)
        negatives = _draw(candidates[:top], num_negatives, seed, question.question_id)
        rows.append(_row(question, positives, negatives, scores, texts))
    if len(rows) < len(questions):
        logger.warning(
            "%d of %d questions have no support in the corpus; left out", len(questions) - len(rows), len(questions)
        )
    return rows


def _check(
    questions: Sequence[Question],
    rankings: Sequence[Sequence[Hit]],
    num_negatives: int,
    top: int,
    relative_margin: float | None,
) -> None:
    if len(questions) != len(rankings):
        raise UserError(f"there are {len(questions)} questions but {len(rankings)} rankings; give one a question.")
    if not 1 <= num_negatives <= top:
        raise UserError(f"num_negatives is {num_negatives} and top is {top}; 1 <= num_negatives <= top must hold.")
    if relative_margin is not None and not 0 <= relative_margin < 1:
        raise UserError(f"relative_margin is {relative_margin}; it must be in [0, 1), or left out.")


def _known_positives(
    question: Question, texts: Mapping[str, str], missing: Literal["error", "skip"]
) -> tuple[str, ...]:
    """The question's distinct supports that are in the corpus."""
    if not question.support_ids and missing == "error":
        raise UserError(f"question {question.question_id!r} has no supporting documents; mine on a labelled split.")
    unknown = [doc_id for doc_id in question.support_ids if doc_id not in texts]
    if unknown and missing == "error":
        raise UserError(
            f"the support {unknown[0]!r} of question {question.question_id!r} is not in the corpus; "
            "take the corpus of the same split, or skip such questions."
        )
    return tuple(dict.fromkeys(doc_id for doc_id in question.support_ids if doc_id in texts))


def _candidates(ranking: Sequence[Hit], positives: Sequence[str], texts: Mapping[str, str]) -> list[Hit]:
    """The ranking without the positives and without documents of the same text."""
    known = set(positives)
    same = {_plain(texts[doc_id]) for doc_id in positives}
    return [hit for hit in ranking if hit.doc_id not in known and _plain(texts[hit.doc_id]) not in same]


def _below_margin(
    candidates: Sequence[Hit], positives: Sequence[str], scores: Mapping[str, float], margin: float
) -> list[Hit]:
    known = [scores[doc_id] for doc_id in positives if doc_id in scores]
    if not known:  # the positives rank below every candidate seen; nothing can be said of them
        raise UserError(
            f"relative_margin needs the score of {positives[0]!r}, which is not in its ranking; give positive_scores."
        )
    return [hit for hit in candidates if hit.score <= (1 - margin) * max(known)]


def _draw(candidates: Sequence[Hit], count: int, seed: int, question_id: str) -> list[Hit]:
    """Draw without replacement, from a stream that belongs to the question."""
    digest = hashlib.sha256(f"{seed}:{question_id}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return [candidates[i] for i in random.permutation(len(candidates))[:count]]


def _row(
    question: Question,
    positives: Sequence[str],
    negatives: Sequence[Hit],
    scores: Mapping[str, float],
    texts: Mapping[str, str],
) -> RetrieverRow:
    scored = all(doc_id in scores for doc_id in positives)
    return RetrieverRow(
        query=question.question,
        pos=tuple(texts[doc_id] for doc_id in positives),
        neg=tuple(texts[hit.doc_id] for hit in negatives),
        query_id=question.question_id,
        pos_ids=tuple(positives),
        neg_ids=tuple(hit.doc_id for hit in negatives),
        pos_scores=tuple(scores[doc_id] for doc_id in positives) if scored else (),
        neg_scores=tuple(hit.score for hit in negatives),
    )


def _plain(text: str) -> str:
    """A text without differences of case and white space."""
    return " ".join(text.casefold().split())
