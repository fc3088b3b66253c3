"""Calibration: which bin a confidence falls into."""

from __future__ import annotations

import pytest

from samrag.metrics.calibration import expected_calibration_error, reliability


@pytest.mark.parametrize("count", [10, 20])
def test_a_confidence_on_an_edge_lies_in_the_bin_that_begins_there(count: int) -> None:
    for place in range(count + 1):
        bins = reliability([place / count], [1], count)
        assert [b.count for b in bins].index(1) == min(place, count - 1)
        assert sum(b.count for b in bins) == 1


def test_stated_edges_are_taken_as_they_are() -> None:
    bins = reliability([0.69, 0.7, 0.8, 0.9, 1.0], [0, 1, 0, 1, 0], (0.0, 0.7, 0.8, 0.9, 1.0))
    assert [(b.low, b.count, b.accuracy) for b in bins] == [(0.0, 1, 0.0), (0.7, 1, 1.0), (0.8, 1, 0.0), (0.9, 2, 0.5)]


def test_the_error_weighs_gaps_by_the_size_of_their_bins() -> None:
    assert expected_calibration_error([0.6, 0.6, 0.6, 0.9], [1, 1, 0, 1]) == pytest.approx(
        (3 * (2 / 3 - 0.6) + 0.1) / 4
    )


@pytest.mark.parametrize("edges", [0, -1, (0.5,), (0.0, 0.5, 0.5)])
def test_edges_that_make_no_bins_are_refused(edges: object) -> None:
    with pytest.raises(ValueError, match="edges must be at least two rising numbers"):
        reliability([0.5], [1], edges)  # type: ignore[arg-type]
