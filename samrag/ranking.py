"""Rankers side by side, and their strict recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samrag.answering import rank_documents
from samrag.errors import UserError
from samrag.metrics.retrieval import recall_at_n
from samrag.metrics.significance import bootstrap_interval
from samrag.retrieval.fusion import Reranker, fuse
from samrag.retrieval.index import Hit
from samrag.retrieval.lexical import LEXICAL_RANKERS
from samrag.schema import Document, Question

LABELS = {"title": "title", "bm25": "BM25"}
"""What lexical rankers are called in tables."""


@dataclass(frozen=True, slots=True)
class RankerPlan:
    """Which rankers to compare."""

    rankers: Sequence[str] = ()
    """Names of lexical rankers."""
    indexes: Sequence[str] = ()
    """Dense rankers as `label=index folder=embedder`."""
    fusions: Sequence[str] = ()
    """Fusions as `label=ranker+ranker`, with labels from above; `*2` after one is its weight."""
    reranks: Sequence[str] = ()
    """Rerankings as `label=ranker=cross-encoder`."""
    fusion_depth: int = 100
    """Ranks of each ranker that a fusion looks at."""
    rerank_depth: int = 50
    """Documents of each question that a cross-encoder reads."""


def rank_all(
    questions: Sequence[Question], documents: Sequence[Document], plan: RankerPlan, k: int
) -> dict[str, list[list[str]]]:
    """The k best document ids of each question, by the ranker's label.

    Raises:
        UserError: an unknown ranker, a label twice, or an entry that is not written as above.
    """
    depth = max(k, plan.fusion_depth if plan.fusions else 0, plan.rerank_depth if plan.reranks else 0)
    texts = [question.question for question in questions]
    hits: dict[str, list[list[Hit]]] = {}
    for name in plan.rankers:
        if name not in LABELS:
            raise UserError(f"ranker {name!r} is unknown; there are {', '.join(LABELS)}.")
        _add(hits, LABELS[name], LEXICAL_RANKERS[name](documents).search(texts, depth))
    for entry in plan.indexes:
        label, folder, embedder = _parts(entry, "index", "label=index folder=embedder", "R=runs/index=quickstart")
        _add(hits, label, rank_documents(questions, documents, Path(folder), embedder, depth))
    for entry in plan.fusions:
        label, terms = _parts(entry, "fusion", "label=ranker+ranker", "fusion=BM25+R")
        members, weights = zip(*(_weighted(term, hits) for term in terms.split("+")), strict=True)
        _add(hits, label, fuse([_cut(hits[name], plan.fusion_depth) for name in members], depth, weights))
    by_id = {document.doc_id: document for document in documents}
    for entry in plan.reranks:
        example = "reranked=fusion=BAAI/bge-reranker-base"
        label, ranker, model = _parts(entry, "reranking", "label=ranker=cross-encoder", example)
        read = _cut(hits[_known(ranker, hits)], plan.rerank_depth)
        _add(hits, label, Reranker(model).rerank(texts, read, by_id))
    return {label: [[hit.doc_id for hit in ranking[:k]] for ranking in found] for label, found in hits.items()}


def _add(hits: dict[str, list[list[Hit]]], label: str, found: list[list[Hit]]) -> None:
    if label in hits:
        raise UserError(f"two rankers are called {label!r}; give each a label of its own.")
    hits[label] = found


def _cut(rankings: Sequence[Sequence[Hit]], depth: int) -> list[Sequence[Hit]]:
    return [ranking[:depth] for ranking in rankings]


def _parts(entry: str, what: str, form: str, example: str) -> list[str]:
    """An entry's parts between the equals signs, as many as its form has."""
    parts = [part.strip() for part in entry.split("=")]
    if len(parts) != form.count("=") + 1 or not all(parts):
        raise UserError(f"{what} {entry!r}: write it as {form}, for example {example}.")
    return parts


def _weighted(term: str, hits: Mapping[str, object]) -> tuple[str, float]:
    """Label and weight of a fusion's term; a label may itself end in a star (`R*`)."""
    if term.strip() in hits:
        return term.strip(), 1.0
    name, star, weight = term.strip().rpartition("*")
    try:
        return _known(name if star else term.strip(), hits), float(weight) if star else 1.0
    except ValueError:
        return _known(term.strip(), hits), 1.0


def _known(label: str, hits: Mapping[str, object]) -> str:
    if label not in hits:
        raise UserError(f"there is no ranker {label!r} to build on; before it come {', '.join(hits) or 'none'}.")
    return label


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
