"""Is a difference more than luck: intervals and paired tests over questions. Pure.

The unit is the question. A seed fixes every draw, so equal inputs give equal figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CELLS = 2**22
"""Numbers held at a time while resampling: 32 MiB of floats, whatever the number of questions."""


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of `values[Q]`.

    Values that are all equal, a single one included, give that value twice: resampling shows no spread.

    Args:
        values: one score a question.
        level: coverage, between 0 and 1.
        seed: fixes the resampling.
        resamples: number of bootstrap samples.

    Raises:
        ValueError: there are no values, one is not finite, or `level` or `resamples` is out of range.
    """
    sample = _finite("values", values)
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, such as 0.95")
    _check_resamples(resamples)
    if sample.min() == sample.max():
        return float(sample[0]), float(sample[0])
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    result = bootstrap(
        (sample,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _CELLS // sample.size),
        vectorized=True,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def paired_permutation_test(a: Sequence[float], b: Sequence[float], seed: int = 0, resamples: int = 9999) -> float:
    """Two-sided p-value of "methods `a[Q]` and `b[Q]` score alike": within each question the two may be swapped.

    Swapping flips the sign of a question's difference, so questions without a difference do not enter. With few
    differences (2^k <= resamples) the test is exact, otherwise the swaps are drawn. No difference at all, or one: 1.

    Args:
        a: scores of the first method, one a question.
        b: scores of the second method, of the same questions in the same order.
        seed: fixes the drawn swaps.
        resamples: number of swaps drawn; the smallest p-value is about 2 / (resamples + 1).

    Raises:
        ValueError: the lengths differ, there are no values, one is not finite, or `resamples` is below 1.
    """
    first, second = _finite("a", a), _finite("b", b)
    if first.size != second.size:
        raise ValueError(f"a has {first.size} values and b has {second.size}; they must be of the same questions")
    _check_resamples(resamples)
    difference = first - second
    difference = difference[difference != 0]
    if difference.size < 2:  # with one difference both signs are as extreme; SciPy refuses to say so
        return 1.0
    from scipy.stats import permutation_test

    result = permutation_test(
        (difference,),
        _sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _CELLS // difference.size),
        alternative="two-sided",
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def _sum(sample: NDArray[np.float64], axis: int) -> Any:
    """Sum along an axis (a scalar or an array), in the signature SciPy calls."""
    return np.sum(sample, axis=axis)


def _finite(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    """`values[Q]` as an array; none, or one that is not finite, is an error."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} has shape {array.shape}; a list of at least one number is needed")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds {array[~np.isfinite(array)][0]}; every value must be a finite number")
    return array


def _check_resamples(resamples: int) -> None:
    """Refuse a number of resamples that gives no distribution."""
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; it must be at least 1")
