"""Judges from the waits of requests whether a part of a frontend is overloaded, and which requests it should refuse."""

from __future__ import annotations

import math

from service.errors import Overloaded

PATIENCE_SECONDS = 1.0
"""An overload begins when all handled requests have waited long for this time: a burst, or a pause, is none. It ends when nothing has been
refused for this time."""


class LongWaits:
    """The waits of the requests that one part of a frontend handles in the order of their arrival. Times are monotonic seconds."""

    def __init__(self, long_seconds: float) -> None:
        """long_seconds: a longer wait is long."""
        self._long_seconds = long_seconds
        self._long_since = math.inf
        """When the first of the last requests was handled that have all waited long."""
        self._refused = -math.inf
        """When a request was refused last."""

    def handle(self, waited: float, now: float) -> None:
        """Note that a request is handled now."""
        self._long_since = min(self._long_since, now) if waited > self._long_seconds else math.inf

    def overloaded(self, now: float) -> bool:
        return now - self._long_since > PATIENCE_SECONDS or now - self._refused < PATIENCE_SECONDS

    def refuses(self, waited: float, now: float) -> bool:
        """Return whether a request should be refused now."""
        return waited > self._long_seconds and self.overloaded(now)

    def refuse(self, now: float) -> None:
        """Note that a request is refused now."""
        self._refused = now


def refusal() -> Overloaded:
    """Return the error for a request that is refused."""
    return Overloaded("more requests arrive than a frontend can decode: retry later, or run more frontends", retry_after=1)
