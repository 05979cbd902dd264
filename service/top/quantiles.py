"""Quantiles of histograms, and of the values observed between two moments. Nothing here knows the service or a clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observed values by bucket.

    bounds: the upper bounds of the buckets, ascending; the last is infinite. counts: how many values each bucket has. sum: of all values.
    """

    bounds: tuple[float, ...] = (math.inf,)
    counts: tuple[float, ...] = (0.0,)
    sum: float = 0.0

    @classmethod
    def of_cumulative(cls, buckets: Iterable[tuple[float, float]], sum: float) -> Distribution:
        """Return the distribution with these pairs of an upper bound and the number of all values up to it, in any order."""
        bounds, totals = zip(*sorted(buckets), strict=True)
        return cls(bounds, tuple(upper - lower for lower, upper in pairwise((0.0, *totals))), sum)

    @property
    def count(self) -> float:
        return math.fsum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean of the values, None without values."""
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return the value that `share` of the values do not exceed, as Prometheus' histogram_quantile estimates it.

        Values are taken as spread evenly over their bucket, and as not negative. Returns None without values, and infinity if the value
        exceeds the last finite bound.
        """
        if not self.count:
            return None
        rank, below, lower = share * self.count, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and below + count >= rank:
                return math.inf if math.isinf(bound) else lower + (bound - lower) * max(0.0, rank - below) / count
            below, lower = below + count, bound
        return math.inf

    def __add__(self, other: Distribution) -> Distribution:
        """Return both distributions together. They have the same bounds, or one of them is empty."""
        if not other.count or not self.count:
            return self if self.count else other
        if self.bounds != other.bounds:
            raise ValueError(f"histograms with the bounds {self.bounds} and {other.bounds} cannot be added")
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.sum + other.sum)


def increase(before: float, now: float) -> float:
    """Return by how much a counter rose. A counter that fell started again at 0, when its service was restarted."""
    return now - before if now >= before else now


def observed_since(before: Distribution, now: Distribution) -> Distribution:
    """Return the values of `now` that `before` lacks. A histogram with a count that fell began again, when its service was restarted."""
    if before.bounds != now.bounds or any(new < old for old, new in zip(_totals(before), _totals(now), strict=True)):
        return now
    counts = tuple(new - old for old, new in zip(before.counts, now.counts, strict=True))
    return Distribution(now.bounds, counts, now.sum - before.sum)


def _totals(distribution: Distribution) -> list[float]:
    return list(accumulate(distribution.counts))
