"""Several rankings made into one by reciprocal rank (Cormack et al., 2009)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from samrag.retrieval.index import Hit


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[str]], k: int, constant: float = 60.0, weights: Sequence[float] | None = None
) -> list[Hit]:
    """The k best documents by the sum of weight / (constant + place) over the rankings that hold them, places from 1.

    Equal sums are in the order of the best place, then of the ranking that gave it: no score of a ranker is compared
    with another's, so dense, lexical and title rankings go together.

    Args:
        rankings: Document ids, best first; one may be short or empty.
        k: How many to return.
        constant: How little the first places stand out (60 in the paper).
        weights: Of each ranking; equal by default.

    Raises:
        ValueError: k is below 1, the constant is negative, or the weights are not one a ranking and 0 or more.
    """
    given = [1.0] * len(rankings) if weights is None else list(weights)
    if k < 1 or constant < 0:
        raise ValueError(f"k is {k} and constant {constant}; k must be at least 1, the constant 0 or more")
    if len(given) != len(rankings) or any(weight < 0 for weight in given):
        raise ValueError(f"{len(given)} weights for {len(rankings)} rankings; one each is wanted, 0 or more")
    scores: dict[str, float] = defaultdict(float)
    first: dict[str, tuple[int, int]] = {}
    for number, (ranking, weight) in enumerate(zip(rankings, given, strict=True)):
        for place, doc_id in enumerate(dict.fromkeys(ranking), 1):
            scores[doc_id] += weight / (constant + place)
            first[doc_id] = min(first.get(doc_id, (place, number)), (place, number))
    best = sorted(scores, key=lambda doc_id: (-scores[doc_id], first[doc_id]))[:k]
    return [Hit(doc_id, scores[doc_id]) for doc_id in best]
