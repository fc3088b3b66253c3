"""Intervals and paired tests: degenerate cases, exact cases, and repeatability."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samrag.metrics.significance import bootstrap_interval, paired_permutation_test

SCORES = st.lists(st.sampled_from([0.0, 0.33, 0.5, 1.0]), min_size=1, max_size=12)


@pytest.mark.parametrize("values", [[0.1], [1], [0.1] * 3, [0.0] * 50])
def test_equal_values_give_an_interval_of_no_width(values: list[float]) -> None:
    assert bootstrap_interval(values) == (values[0], values[0])


@settings(max_examples=30, deadline=None)
@given(SCORES)
def test_the_interval_lies_within_the_values_and_repeats_for_a_seed(values: list[float]) -> None:
    low, high = bootstrap_interval(values, resamples=200)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert bootstrap_interval(values, resamples=200) == (low, high)


def test_the_interval_agrees_with_the_normal_law_for_many_questions() -> None:
    values = [1.0] * 600 + [0.0] * 400
    low, high = bootstrap_interval(values, level=0.95, resamples=4000)
    half_width = 1.96 * math.sqrt(0.6 * 0.4 / 1000)
    assert low == pytest.approx(0.6 - half_width, abs=0.003)
    assert high == pytest.approx(0.6 + half_width, abs=0.003)


def test_a_higher_level_gives_a_wider_interval() -> None:
    values = [0.0, 1.0] * 50
    low, high = bootstrap_interval(values, level=0.8)
    wide_low, wide_high = bootstrap_interval(values, level=0.99)
    assert wide_low < low < high < wide_high


def test_intervals_of_nothing_or_of_non_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one number"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval([0.0, math.nan])
    with pytest.raises(ValueError, match="level is 95"):
        bootstrap_interval([0.0, 1.0], level=95)
    with pytest.raises(ValueError, match="resamples is 0"):
        bootstrap_interval([0.0, 1.0], resamples=0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_k_wins_and_no_loss_have_the_p_value_of_the_sign_test(count: int) -> None:
    assert paired_permutation_test([1.0] * count, [0.0] * count) == pytest.approx(2 / 2**count)


def test_ties_do_not_change_the_p_value() -> None:
    wins = paired_permutation_test([1.0] * 6, [0.0] * 6)
    assert paired_permutation_test([1.0] * 6 + [0.5] * 100, [0.0] * 6 + [0.5] * 100) == wins


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_the_test_is_symmetric_in_the_methods_and_gives_a_probability(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    p_value = paired_permutation_test(first, second)
    assert 0.0 < p_value <= 1.0
    assert paired_permutation_test(second, first) == pytest.approx(p_value)


def test_equal_methods_differ_with_probability_one() -> None:
    assert paired_permutation_test([0.0, 1.0, 0.5], [0.0, 1.0, 0.5]) == 1.0


def test_drawn_swaps_repeat_for_a_seed_and_find_a_clear_difference() -> None:
    first = [1.0] * 80 + [0.0] * 120
    second = [0.0] * 40 + [1.0] * 40 + [0.0] * 120
    p_value = paired_permutation_test(first, second, seed=3, resamples=999)
    assert p_value == paired_permutation_test(first, second, seed=3, resamples=999)
    assert p_value == pytest.approx(2 / 1000)


def test_methods_on_different_numbers_of_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="a has 2 values and b has 1"):
        paired_permutation_test([0.0, 1.0], [0.0])
    with pytest.raises(ValueError, match="at least one number"):
        paired_permutation_test([], [])
