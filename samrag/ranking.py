"""Rankers side by side, and their strict recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samrag.answering import rank_documents
from samrag.errors import UserError
from samrag.metrics.retrieval import recall_at_n
from samrag.metrics.significance import bootstrap_interval
from samrag.retrieval.fusion import reciprocal_rank_fusion
from samrag.retrieval.lexical import Bm25Ranker, TitleRanker
from samrag.schema import Document, Question

FUSED_DEPTH = 100
_LEXICAL: dict[str, tuple[str, type[TitleRanker] | type[Bm25Ranker]]] = {
    "title": ("title", TitleRanker),
    "bm25": ("BM25", Bm25Ranker),
}


def rank_all(
    questions: Sequence[Question],
    documents: Sequence[Document],
    rankers: Sequence[str],
    indexes: Sequence[str],
    k: int,
    fused: Sequence[str] = (),
) -> dict[str, list[list[str]]]:
    """The k best document ids of each question, by ranker.

    Args:
        questions: the questions.
        documents: the corpus.
        rankers: names of lexical rankers.
        indexes: dense rankers as `label=index folder=embedder`.
        k: depth.
        fused: labels of rankers that a further one, `fusion`, is made of by reciprocal rank, from `FUSED_DEPTH`
            documents of each; none adds no fusion.

    Raises:
        UserError: an unknown ranker or label, or an index that is not written as above.
    """
    deep = max(k, FUSED_DEPTH) if fused else k
    rankings = {}
    for name in rankers:
        if name not in _LEXICAL:
            raise UserError(f"ranker {name!r} is unknown; there are {', '.join(_LEXICAL)}.")
        label, ranker = _LEXICAL[name]
        hits = ranker(documents).search([question.question for question in questions], deep)
        rankings[label] = [[hit.doc_id for hit in ranking] for ranking in hits]
    for entry in indexes:
        parts = entry.split("=")
        if len(parts) != 3:
            raise UserError(
                f"index {entry!r}: write it as label=index folder=embedder, for example R=runs/index=quickstart."
            )
        hits = rank_documents(questions, documents, Path(parts[1]), parts[2], deep)
        rankings[parts[0]] = [[hit.doc_id for hit in ranking] for ranking in hits]
    unknown = [label for label in fused if label not in rankings]
    if unknown:
        raise UserError(f"fused: there is no ranker {unknown[0]!r}; there are {', '.join(rankings)}.")
    if fused:
        together = zip(*(rankings[label] for label in fused), strict=True)
        rankings["fusion"] = [[hit.doc_id for hit in reciprocal_rank_fusion(each, k)] for each in together]
    return {label: [ids[:k] for ids in ranked] for label, ranked in rankings.items()}


def recall_rows(
    questions: Sequence[Question], rankings: Mapping[str, Sequence[Sequence[str]]], at: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per ranker and N: strict recall in percent with its 95 % bootstrap interval."""
    rows: list[dict[str, Any]] = []
    for label, ranked in rankings.items():
        for n in at:
            scores = [
                100 * recall_at_n(ids, question.support_ids, n) for ids, question in zip(ranked, questions, strict=True)
            ]
            low, high = bootstrap_interval(scores)
            rows.append(
                {
                    "ranker": label,
                    "n": n,
                    "recall": sum(scores) / len(scores),
                    "recall_ci": [low, high],
                    "questions": len(scores),
                }
            )
    return rows
