"""What a turn is expected to take. Pure: nothing here knows a device or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

NEWEST = 0.1
"""Share of the newest turn in what is known of how far predictions are off."""
FARTHEST = 4.0
"""A single turn counts as off by this factor at most: it may have been held up by something else."""


class Cost(NamedTuple):
    """Seconds: of any turn, of each step of the longest row, and of each step of all rows."""

    fixed: float
    per_step: float
    per_token: float

    def of(self, longest: int, tokens: int) -> float:
        return self.fixed + self.per_step * longest + self.per_token * tokens

    def steps_within(self, seconds: float, rows: int) -> int:
        """How many steps of each of so many rows fit into these seconds."""
        a_step = self.per_step + self.per_token * rows
        return int((seconds - self.fixed) / a_step) if a_step > 0 else 1 << 30

    def steps_at_pace(self, pace: float, most: int, rows: int) -> int:
        """The fewest steps a turn of so many rows in which they come as far in a second as in turns of `most` steps, but for this share."""
        a_step = self.per_step + self.per_token * rows
        each = self.fixed + a_step * most * (1 - pace)
        return math.ceil(pace * most * self.fixed / each) if each > 0 else 1

    def times(self, factor: float) -> Cost:
        return Cost(self.fixed * factor, self.per_step * factor, self.per_token * factor)


@dataclass(slots=True)
class Correction:
    """By which factor turns take longer than warm-up said: a running mean of what was observed."""

    factor: float = 1.0

    def observe(self, predicted: float, took: float) -> None:
        """predicted: as warm-up said."""
        if predicted > 0:
            seen = min(FARTHEST, max(1 / FARTHEST, took / predicted))
            self.factor += NEWEST * (seen - self.factor)
