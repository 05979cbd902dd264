"""A limit on how often something happens."""

from __future__ import annotations


class RateBudget:
    """Allows a burst, which fills up again at a constant rate. The caller passes the time in seconds."""

    __slots__ = ("_burst", "_left", "_rate", "_time")

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = self._left = float(burst)
        self._rate = per_second
        self._time = 0.0

    def spend(self, now: float) -> bool:
        """Take one unit; false when there is none left. What is refused costs nothing: it would delay later units without end."""
        self._left = min(self._burst, self._left + (now - self._time) * self._rate)
        self._time = now
        allowed = self._left >= 1
        self._left -= allowed
        return allowed
