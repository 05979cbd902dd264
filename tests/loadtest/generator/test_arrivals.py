"""Arrivals have the requested mean rate, and depend only on their seed."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from loadtest.generator.arrivals import ARRIVALS, BURST


@pytest.mark.parametrize(("arrivals", "spread"), [("poisson", 1), ("bursty", 2 * BURST)])
def test_arrivals_have_the_requested_mean_and_spread(arrivals: str, spread: float) -> None:
    times = itertools.takewhile(lambda at: at < 400, itertools.accumulate(ARRIVALS[arrivals](100.0, 3)))
    by_second = Counter(int(at) for at in times)
    counts = [by_second[second] for second in range(400)]
    assert statistics.mean(counts) == pytest.approx(100, rel=0.1)
    assert statistics.variance(counts) / statistics.mean(counts) == pytest.approx(spread, rel=0.3)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_arrivals_depend_only_on_the_seed(arrivals: str) -> None:
    gaps = [list(itertools.islice(ARRIVALS[arrivals](5.0, seed), 100)) for seed in (7, 7, 8)]
    assert gaps[0] == gaps[1] != gaps[2]
