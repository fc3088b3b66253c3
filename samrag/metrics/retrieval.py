"""Retrieval scores: strict recall (the paper's), recall, MRR, nDCG, and how many documents an answer took. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from samrag.schema import Trace


def recall_at_n(ranking: Sequence[str], positives: Collection[str], n: int) -> float:
    """Strict recall of one question (SAM-RAG, eq. 2): 1 if *all* distinct positives are among the first n, else 0.

    The mean over questions is Recall@N.

    Args:
        ranking: document ids, best first.
        positives: ids of the supporting documents; one named twice counts once.
        n: how many places of the ranking count.

    Raises:
        ValueError: there are no positives, or n is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    if not positives:
        raise ValueError("recall needs at least one positive; leave out the questions without supporting documents")
    return float(set(positives) <= set(ranking[:n]))


def recall_at_k(ranking: Sequence[str], positives: Collection[str], k: int) -> float:
    """Share of the distinct positives that are among the first k. Raises what `recall_at_n` raises."""
    recall_at_n(ranking, positives, k)  # the same refusals
    return len(set(positives) & set(ranking[:k])) / len(set(positives))


def reciprocal_rank(ranking: Sequence[str], positives: Collection[str], k: int) -> float:
    """1 / place of the first positive among the first k, else 0; the mean over questions is MRR@k."""
    return next((1 / place for place, doc_id in enumerate(ranking[:k], 1) if doc_id in positives), 0.0)


def ndcg_at_k(ranking: Sequence[str], positives: Collection[str], k: int) -> float:
    """nDCG@k with gain 1 for a positive (Jarvelin and Kekalainen, 2002); a document ranked twice counts once.

    Raises:
        ValueError: there are no positives, or k is below 1.
    """
    recall_at_n(ranking, positives, k)
    ranked = list(dict.fromkeys(ranking))[:k]
    gain = sum(1 / math.log2(place + 1) for place, doc_id in enumerate(ranked, 1) if doc_id in positives)
    return gain / sum(1 / math.log2(place + 1) for place in range(1, min(k, len(set(positives))) + 1))


def mean_arn(traces: Sequence[Trace]) -> float:
    """ARN as the authors' code has it: mean number of distinct documents in the final context C.

    A question that ends with a cleared C counts as 0, which flatters the figure: show `mean_arn_answered` beside it.

    Raises:
        ValueError: there are no traces.
    """
    return _mean([_context_size(trace) for trace in traces])


def mean_arn_answered(traces: Sequence[Trace]) -> float | None:
    """ARN over the questions that got an answer; None when none got one."""
    sizes = [_context_size(trace) for trace in traces if trace.answers]
    return _mean(sizes) if sizes else None


def mean_documents_examined(traces: Sequence[Trace]) -> float:
    """Mean number of distinct documents a program looked at, kept or not; a document judged twice counts once.

    Raises:
        ValueError: there are no traces.
    """
    return _mean([len({document.doc_id for document in trace.documents}) for trace in traces])


def _context_size(trace: Trace) -> int:
    """Number of distinct documents in the final context."""
    return len(set(trace.context_ids))


def _mean(counts: Sequence[int]) -> float:
    """Mean of counts; no counts have none."""
    if not counts:
        raise ValueError("there are no traces to take a mean over; run the questions first")
    return sum(counts) / len(counts)
