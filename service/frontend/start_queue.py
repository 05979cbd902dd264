"""Bounds how long one tick of the event loop starts requests, and refuses requests that have waited for too long.

One tick handles all sockets that were readable at its beginning. With hundreds of busy clients, to decode all of their requests in one
tick would keep everything else waiting: answers, timers and health checks. So after SLICE_SECONDS the other requests of the tick wait here,
undecoded, for the next ticks. If clients send more than the frontend can decode, the waits grow. Then each tick also refuses some of the
requests, which costs less than to decode them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from service.frontend.long_waits import LongWaits, refusal

SLICE_SECONDS = 0.005
"""A tick starts requests for this time, and refuses requests for at most as long."""
Start = Callable[[float], None]
"""Starts a request that arrived at this monotonic time."""


class WaitingStart:
    """A request that waits for a later tick."""

    __slots__ = ("arrived", "start")

    def __init__(self, arrived: float, start: Start) -> None:
        self.arrived = arrived
        self.start: Start | None = start

    def cancel(self) -> None:
        """Forget the request."""
        self.start = None

    disconnect = cancel
    """See `Call.disconnect`."""


class StartQueue:
    """The requests of one frontend that wait to be started, in the order of their arrival."""

    def __init__(self, default_deadline_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._waits = LongWaits(default_deadline_ms)
        self._clock = clock
        self._waiting: deque[WaitingStart] = deque()
        self._ticking = False
        """Whether `_next_tick` is scheduled."""
        self._slice_end = math.inf
        """When this tick starts no further request."""
        self._refusing = False

    def must_wait(self, now: float) -> bool:
        """Return whether a request that is complete now must wait. The caller otherwise starts it at once."""
        if not self._ticking:
            self._slice_end = now + SLICE_SECONDS
            self._schedule()
        elif self._waiting or now > self._slice_end:
            return True
        self._waits.handle(0.0, now)
        return False

    def add(self, arrived: float, start: Start) -> WaitingStart:
        """Keep a request until its turn. start: raises nothing."""
        waiting = WaitingStart(arrived, start)
        self._waiting.append(waiting)
        self._schedule()
        return waiting

    def check(self) -> None:
        """Raise Overloaded if the request that is started now is one to refuse."""
        if self._refusing:
            raise refusal()

    def _schedule(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._next_tick)  # when the sockets of this tick have been handled

    def _next_tick(self) -> None:
        """Start the requests that have waited longest. In an overload, refuse others that have waited long."""
        self._ticking = False
        if not self._waiting:
            return
        self._schedule()
        now = self._clock()
        self._slice_end = now + SLICE_SECONDS
        while self._waiting and now <= self._slice_end:
            self._waits.handle(now - self._waiting[0].arrived, now)
            now = self._start_first()
        end, self._refusing = now + SLICE_SECONDS, True
        while self._waiting and now <= end and self._waits.refuses(now - self._waiting[0].arrived, now):
            now = self._start_first()
        self._refusing = False

    def _start_first(self) -> float:
        """Start the first waiting request. Return the time at its end."""
        waiting = self._waiting.popleft()
        if waiting.start is not None:
            waiting.start(waiting.arrived)
        return self._clock()
