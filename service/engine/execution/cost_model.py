"""The predicted time of batches. Pure: nothing here knows a device or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NEWEST = 0.1
"""Weight of the newest batch in the running mean of the correction."""
FARTHEST = 4.0
"""Largest change of the factor by one batch: the batch may have waited for something else. The factor follows a device that stays slow,
or that other processes use, however slow it is: otherwise every admitted request would miss its deadline."""


class Cost(NamedTuple):
    """Seconds per batch, per step of the longest row, and per token of all rows."""

    fixed: float
    per_step: float
    per_token: float

    def of(self, longest: int, tokens: int) -> float:
        """Return the seconds of a batch."""
        return self.fixed + self.per_step * longest + self.per_token * tokens

    def steps_within(self, seconds: float, rows: int) -> int:
        """Return how many steps of each row fit into a time budget."""
        step_seconds = self.per_step + self.per_token * rows
        return int((seconds - self.fixed) / step_seconds) if step_seconds > 0 else 1 << 30

    def steps_at_pace(self, pace: float, most: int, rows: int) -> int:
        """Return the fewest steps per batch that reach this share of the throughput of batches of `most` steps."""
        step_seconds = self.per_step + self.per_token * rows
        seconds = self.fixed + step_seconds * most * (1 - pace)
        return math.ceil(pace * most * self.fixed / seconds) if seconds > 0 else 1

    def times(self, factor: float) -> Cost:
        return Cost(self.fixed * factor, self.per_step * factor, self.per_token * factor)


@dataclass(slots=True)
class Correction:
    """The factor by which batches take longer than warm-up predicted: a running mean."""

    factor: float = 1.0

    def observe(self, predicted: float, seconds: float) -> None:
        """Include a batch that took `seconds`. predicted: by warm-up, without correction."""
        if predicted > 0:
            observed = min(FARTHEST * self.factor, max(self.factor / FARTHEST, seconds / predicted))
            self.factor += NEWEST * (observed - self.factor)
