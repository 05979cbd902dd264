"""Arrivals have the requested mean rate, and depend only on their seed."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from loadtest.generator.arrivals import ARRIVALS, BURST


def counts(arrivals: str, rate: float, seconds: int) -> list[int]:
    """Return the number of arrivals in each second."""
    times = itertools.takewhile(lambda at: at < seconds, itertools.accumulate(ARRIVALS[arrivals](rate, 3)))
    by_second = Counter(int(at) for at in times)
    return [by_second[second] for second in range(seconds)]


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_arrivals_have_the_requested_mean_rate(arrivals: str) -> None:
    assert statistics.mean(counts(arrivals, rate=100.0, seconds=400)) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_arrivals_depend_only_on_the_seed(arrivals: str) -> None:
    gaps = [list(itertools.islice(ARRIVALS[arrivals](5.0, seed), 100)) for seed in (7, 7, 8)]
    assert gaps[0] == gaps[1] != gaps[2]


def test_bursty_arrivals_have_a_higher_variance() -> None:
    by_second = {name: counts(name, rate=100.0, seconds=400) for name in ARRIVALS}
    spread = {name: statistics.variance(each) / statistics.mean(each) for name, each in by_second.items()}
    assert spread["poisson"] == pytest.approx(1, rel=0.2)
    assert spread["bursty"] > BURST
