"""What CLIMB's confidence U is worth: right answers by its bins, how well it orders answers, and where it misled.

U is no probability, so a bin's accuracy is to be read as what such a U meant on these questions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from samrag.metrics.calibration import auroc, expected_calibration_error, reliability

if TYPE_CHECKING:
    from samrag.report.scores import QuestionScore

EDGES = (0.0, 0.7, 0.8, 0.9, 1.0)
"""Bins of U, as in CLIMB's table of accuracy by final U."""
Row = dict[str, Any]


class Failing(StrEnum):
    """Where a wrong answer went wrong: at the first step that lost a supporting document, or after all of them."""

    NOT_IN_POOL = "not_in_pool"
    NOT_IN_CONTEXT = "not_in_context"
    WITH_EVIDENCE = "with_evidence"


def bin_rows(scores: Sequence[QuestionScore]) -> list[Row]:
    """Questions by the U of their final answer, and a last row of all of them with ECE and AUROC.

    Questions without an answer, or whose call for U failed, are left out; none with U gives no row.
    """
    rated = [
        (score.trace.confidence, _right(score))
        for score in scores
        if score.trace and score.trace.answers and score.trace.confidence is not None
    ]
    if not rated:
        return []
    stated, right = zip(*rated, strict=True)
    rows = [
        {
            "confidence": f"{one.low:.2f} to {one.high:.2f}",
            "n": one.count,
            "mean_confidence": _percent(one.confidence),
            "accuracy": _percent(one.accuracy),
        }
        for one in reliability(stated, right, EDGES)
    ]
    every = {
        "confidence": "all",
        "n": len(rated),
        "mean_confidence": _percent(math.fsum(stated) / len(rated)),
        "accuracy": _percent(sum(right) / len(rated)),
        "ece": _percent(expected_calibration_error(stated, right, EDGES)),
        "auroc": _percent(auroc(stated, right)),
    }
    return [*rows, every]


def failing_row(scores: Sequence[QuestionScore]) -> Row:
    """How many answers are wrong, where they went wrong, and on how many U had risen nevertheless.

    A question without answer or trace is not counted here.
    """
    wrong = [score for score in scores if score.trace and score.trace.answers and not _right(score)]
    places = Counter(_place(score) for score in wrong)
    return {
        "wrong": len(wrong),
        **{str(place): places[place] for place in Failing},
        "rose": sum(_rise(score) is not None for score in wrong),
    }


def misled_rows(scores: Sequence[QuestionScore], most: int = 10) -> list[Row]:
    """Wrong answers whose U rose on the way, the largest rise first; of equals in the order of the questions."""
    rises = [(score, rise) for score in scores if (rise := _rise(score)) is not None and not _right(score)]
    rises.sort(key=lambda pair: pair[1][0] - pair[1][1])
    return [
        {
            "question_id": score.question.question_id,
            "question": score.question.question,
            "answer": "; ".join(score.trace.answers),
            "gold": "; ".join(score.question.answers),
            "first": round(first, 4),
            "last": round(last, 4),
            "place": str(_place(score)),
        }
        for score, (first, last) in rises[:most]
        if score.trace
    ]


def _right(score: QuestionScore) -> bool:
    return score.em == 1


def _place(score: QuestionScore) -> Failing:
    assert score.trace
    wanted = set(score.question.support_ids)
    if not wanted <= {document.doc_id for document in score.trace.documents}:
        return Failing.NOT_IN_POOL
    return Failing.WITH_EVIDENCE if wanted <= set(score.trace.context_ids) else Failing.NOT_IN_CONTEXT


def _rise(score: QuestionScore) -> tuple[float, float] | None:
    """U of the first draft and of the answer, where the answer's is higher."""
    trace = score.trace
    if trace is None or not trace.answers or trace.confidence is None or not trace.drafts:
        return None
    first = trace.drafts[0].confidence
    return (first, trace.confidence) if first is not None and trace.confidence > first else None


def _percent(value: float) -> float | None:
    return None if math.isnan(value) else round(100 * value, 4)
