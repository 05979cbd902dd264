"""Quantiles of histograms: without values, with values above all buckets, and after a restart of the service."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.top.quantiles import Distribution, increase, observed_since

BOUNDS = (1.0, 2.0, 4.0, math.inf)


def of(*counts: float, sum: float = 0.0) -> Distribution:
    return Distribution(BOUNDS, counts, sum)


def test_empty_histogram_has_no_quantile_and_no_mean() -> None:
    for empty in Distribution(), of(0, 0, 0, 0):
        assert empty.quantile(0.5) is None
        assert empty.mean is None


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 3.0), (1.0, 4.0)], ids=lambda number: f"{number:g}"
)
def test_values_are_spread_evenly_over_their_bucket(share: float, value: float) -> None:
    assert of(2, 0, 2, 0).quantile(share) == pytest.approx(value)


def test_quantile_above_the_last_finite_bound_is_infinite() -> None:
    assert of(9, 0, 0, 1).quantile(0.9) == 1.0
    assert of(9, 0, 0, 1).quantile(0.99) == math.inf
    assert of(0, 0, 0, 3).quantile(0.5) == math.inf


def test_cumulative_buckets_may_come_in_any_order() -> None:
    buckets = [(math.inf, 7.0), (1.0, 1.0), (4.0, 6.0), (2.0, 1.0)]
    assert Distribution.of_cumulative(buckets, 20.0) == of(1, 0, 5, 1, sum=20.0)


def test_values_since_an_earlier_moment_are_the_difference() -> None:
    assert observed_since(of(1, 2, 0, 1, sum=9.0), of(1, 5, 1, 1, sum=18.0)) == of(0, 3, 1, 0, sum=9.0)
    assert observed_since(of(1, 2, 0, 1), of(1, 2, 0, 1)).quantile(0.5) is None


def test_histogram_that_began_again_is_taken_whole() -> None:
    assert observed_since(of(5, 5, 5, 5, sum=50.0), of(1, 0, 0, 0, sum=0.5)) == of(1, 0, 0, 0, sum=0.5)
    assert observed_since(of(5, 0, 0, 0), of(1, 7, 0, 0)) == of(1, 7, 0, 0), "although it has more values than before"


def test_histogram_that_is_new_is_taken_whole() -> None:
    assert observed_since(Distribution(), of(1, 2, 3, 4)) == of(1, 2, 3, 4)


def test_counter_that_fell_began_again() -> None:
    assert increase(5.0, 8.0) == 3.0
    assert increase(5.0, 2.0) == 2.0


def test_sum_of_histograms_has_the_values_of_both() -> None:
    assert of(1, 0, 2, 0, sum=4.0) + of(0, 1, 2, 3, sum=5.0) == of(1, 1, 4, 3, sum=9.0)
    assert Distribution() + of(1, 0, 0, 0) == of(1, 0, 0, 0) + Distribution() == of(1, 0, 0, 0)
    with pytest.raises(ValueError, match="cannot be added"):
        of(1, 0, 0, 0) + Distribution((3.0, math.inf), (1.0, 0.0))


@given(st.lists(st.floats(0.001, 3.99), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_estimate_is_in_the_bucket_of_the_exact_quantile(values: list[float], share: float) -> None:
    counts, _ = np.histogram(values, (0.0, 1.0, 2.0, 4.0))
    estimate = of(*map(float, counts), 0.0).quantile(share)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    [(lower, upper)] = [(lower, upper) for lower, upper in ((0, 1), (1, 2), (2, 4)) if lower <= exact < upper]
    assert estimate is not None
    assert lower <= estimate <= upper
