"""The predicted time of batches. Pure: nothing here knows a device or a clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

NEWEST, NEWEST_OF_HOST = 0.1, 0.03
"""Weights of the newest batch in the running means of the factor and of the host's time, which varies more."""
FARTHEST = 4.0
"""A batch counts as at most this multiple of its expected time: it may have waited for something else. The correction still follows
a device or a host that stays slow, however slow it is: otherwise every admitted request would miss its deadline."""


FloatOrArray = TypeVar("FloatOrArray", float, NDArray[Any])


class Cost(NamedTuple):
    """Seconds per batch, per step of the longest row, and per token of all rows."""

    fixed: float
    per_step: float
    per_token: float

    def of(self, longest: FloatOrArray, tokens: FloatOrArray) -> FloatOrArray:
        """Return the seconds of a batch, or of each of many."""
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


@dataclass(slots=True)
class Correction:
    """How batches differ from their prediction at warm-up: a factor for the device, and the host's time for each batch. Running means.

    A host that is slow does not make the steps of a batch slow: with the factor alone, a busy host would lead to batches of fewer steps,
    which cost it more time.
    """

    factor: float = 1.0
    host_seconds: float = 0.0

    def observe(self, predicted: float, seconds: float, device: tuple[float, float]) -> None:
        """Include a batch that took `seconds` in all.

        predicted: seconds of the device by warm-up. device: bounds of the device's seconds, because the host may notice the end late.
        """
        if predicted <= 0:
            return
        least, most = device
        # A host that seems to take less than no time shows that the factor is too large.
        expected = self.factor * predicted + min(0.0, self.host_seconds)
        observed = min(max(expected, least), most) / predicted
        observed = min(FARTHEST * self.factor, max(self.factor / FARTHEST, observed))
        seconds = min(FARTHEST * self.seconds(predicted), seconds)
        self.factor += NEWEST * (observed - self.factor)
        self.host_seconds += NEWEST_OF_HOST * (seconds - self.factor * predicted - self.host_seconds)

    def seconds(self, predicted: float) -> float:
        """Return the expected time of a batch."""
        seconds = self.factor * predicted
        return seconds + self.host_seconds if self.host_seconds > 0 else seconds

    def of(self, cost: Cost) -> Cost:
        return Cost(self.seconds(cost.fixed), self.factor * cost.per_step, self.factor * cost.per_token)
