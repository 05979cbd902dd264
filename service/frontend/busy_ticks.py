"""Refuses requests that have waited too long for the event loop, before they are decoded.

Bytes wait in the sockets while a frontend is busy, where no queue is limited. One tick of its event loop handles all sockets that were
readable at its beginning. If clients send more than the frontend can decode, ticks grow to seconds and every answer comes late. So the
requests at the end of a long tick are refused, which costs little, and ticks stay short against the deadlines.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from service.errors import Overloaded

SHARE = 0.1
"""A tick is long after this share of the default deadline. A request has then waited for at most twice this time."""
PATIENCE_SECONDS = 1.0
"""An overload begins when all ticks have been long for this time: a burst, or a frontend that waits for a core, is none. It ends when
nothing has been refused for this time."""


class BusyTicks:
    """The lengths of one frontend's ticks, as far as they begin requests."""

    def __init__(self, default_deadline_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_seconds = SHARE * default_deadline_ms / 1000
        self._clock = clock
        self._began = self._ended = self._short = self._refused = -math.inf
        """When the first request of the last tick was begun, when the last tick and the last short one ended, and the last refusal."""
        self._open = False

    def check(self, now: float) -> None:
        """Raise Overloaded for a request that has waited too long. Called when a request begins."""
        if not self._open:
            if now - self._ended > PATIENCE_SECONDS:
                self._short = now
            self._began, self._open = now, True
            asyncio.get_running_loop().call_soon(self._end)  # runs when the sockets of this tick have been handled
        elif now - self._began > self._most_seconds and self._overloaded(now):
            self._refused = now
            raise Overloaded(
                "more requests arrive than a frontend can decode: retry later, or run more frontends", retry_after=1
            )

    def _overloaded(self, now: float) -> bool:
        return now - self._short > PATIENCE_SECONDS or now - self._refused < PATIENCE_SECONDS

    def _end(self) -> None:
        self._ended, self._open = self._clock(), False
        if self._ended - self._began <= self._most_seconds:
            self._short = self._ended
