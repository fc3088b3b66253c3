"""Whether stated probabilities are right: calibration error, Brier score, and how well they tell right from wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions whose confidence lies in [low, high); the last bin includes 1."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean confidence; NaN without predictions."""
    accuracy: float
    """Share that was right; NaN without predictions."""


def _checked(confidence: ArrayLike, correct: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    stated, right = np.asarray(confidence, dtype=float), np.asarray(correct, dtype=float)
    if stated.shape != right.shape or stated.ndim != 1:
        raise ValueError(f"confidence has shape {stated.shape}, correct {right.shape}; both must be [N]")
    if not np.isin(right, (0.0, 1.0)).all() or not ((stated >= 0) & (stated <= 1)).all():
        raise ValueError("confidence must lie in [0, 1], and correct be 0 or 1")
    return stated, right


def reliability(confidence: ArrayLike, correct: ArrayLike, edges: Sequence[float] | int = 10) -> list[Bin]:
    """Predictions by their confidence.

    Args:
        confidence: [N], in [0, 1].
        correct: [N], 0 or 1.
        edges: rising bin edges, or so many bins of equal width over [0, 1].

    Raises:
        ValueError: shapes differ, or values are out of range.
    """
    stated, right = _checked(confidence, correct)
    # k / n is the double that a stated 0.6 is; linspace's multiple of the step may lie one bit above it
    borders = np.arange(edges + 1) / max(edges, 1) if isinstance(edges, int) else np.asarray(edges, dtype=float)
    if len(borders) < 2 or (np.diff(borders) <= 0).any():
        raise ValueError("edges must be at least two rising numbers")
    bins = []
    for low, high in itertools.pairwise(borders):
        inside = (stated >= low) & ((stated < high) | ((high == borders[-1]) & (stated <= high)))
        count = int(inside.sum())
        means = (float(stated[inside].mean()), float(right[inside].mean())) if count else (float("nan"),) * 2
        bins.append(Bin(float(low), float(high), count, *means))
    return bins


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, edges: Sequence[float] | int = 10) -> float:
    """ECE (Guo et al., 2017, eq. 3): mean gap of confidence and accuracy over bins, by their sizes. NaN for N = 0."""
    bins = [b for b in reliability(confidence, correct, edges) if b.count]
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / total if total else float("nan")


def brier_score(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Mean squared gap of confidence and outcome. NaN for N = 0."""
    stated, right = _checked(confidence, correct)
    return float(((stated - right) ** 2).mean()) if len(stated) else float("nan")


def auroc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Probability that a right prediction has the higher confidence, ties counted half; NaN when all are alike."""
    stated, right = _checked(confidence, correct)
    if right.min(initial=1) == right.max(initial=0):
        return float("nan")
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(right, stated))


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(coverage, risk), both [N]: the error rate among the k most confident predictions, for each k; ties by order."""
    stated, right = _checked(confidence, correct)
    order = np.argsort(-stated, kind="stable")
    answered = np.arange(1, len(order) + 1)
    return answered / max(len(order), 1), np.cumsum(1 - right[order]) / answered
