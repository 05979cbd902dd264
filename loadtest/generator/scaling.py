"""Whether generator processes limit a load, and how many of them the next measurement needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadtest.generator.job import Result

BUSY = 0.8
"""A load is limited by its generators when each uses a processor for more than this share of the measured time."""
GAIN = 1.05
"""More generators help when the rate becomes this many times larger."""


class Measured(NamedTuple):
    """The result of a load, and the number of its generator processes."""

    generators: int
    result: Result

    @property
    def rate(self) -> float:
        return self.result.rate

    @property
    def busy(self) -> float:
        """Return the share of the measured time that a generator used a processor, as a mean of all generators."""
        return self.result.cpu_seconds / (self.generators * self.result.seconds)

    @property
    def limited(self) -> bool:
        """Whether the generators were the limit of the load."""
        return self.busy > BUSY


def more_generators(trials: Sequence[Measured], most: int) -> int | None:
    """Return the number of generators for another measurement, None if they are not the limit or more of them do not help."""
    last = trials[-1]
    if not last.limited or last.generators >= most:
        return None
    if len(trials) > 1 and last.rate < GAIN * trials[-2].rate:
        return None
    return min(2 * last.generators, most)


def best(trials: Sequence[Measured]) -> Measured:
    """Return the last trial if its generators were not the limit, else the trial with the largest rate."""
    return max(trials, key=lambda trial: trial.rate) if trials[-1].limited else trials[-1]
