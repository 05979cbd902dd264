"""Judges from the waits of requests whether a part of a frontend is overloaded, and which requests it should refuse."""

from __future__ import annotations

import math

from service.errors import Overloaded

SHARE = 0.1
"""A wait is long after this share of the default deadline."""
PATIENCE_SECONDS = 1.0
"""An overload begins when all handled requests have waited long for this time: a burst, or a pause, is none. It ends when nothing has been
refused for this time."""


class LongWaits:
    """The waits of the requests that one part of a frontend handles in the order of their arrival. Times are monotonic seconds."""

    def __init__(self, default_deadline_ms: float) -> None:
        self._long_wait = SHARE * default_deadline_ms / 1000
        self._long_since = math.inf
        """When the first of the last requests was handled that have all waited long."""
        self._refused = -math.inf
        """When a request was refused last."""

    def handle(self, waited: float, now: float) -> None:
        """Note that a request is handled now."""
        self._long_since = min(self._long_since, now) if waited > self._long_wait else math.inf

    def refuses(self, waited: float, now: float) -> bool:
        """Return whether a request should be refused now."""
        overloaded = now - self._long_since > PATIENCE_SECONDS or now - self._refused < PATIENCE_SECONDS
        refuses = overloaded and waited > self._long_wait
        if refuses:
            self._refused = now
        return refuses


def refusal() -> Overloaded:
    """Return the error for a request that is refused."""
    return Overloaded("more requests arrive than a frontend can decode: retry later, or run more frontends", retry_after=1)
