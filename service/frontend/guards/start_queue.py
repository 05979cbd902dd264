"""Bounds how long one tick of the event loop starts requests, and refuses requests that have waited for too long.

One tick handles all sockets that were readable at its beginning. With hundreds of busy clients, to decode all of their requests in one
tick would keep everything else waiting: answers, timers and health checks. So after SLICE_SECONDS the other requests of the tick wait here,
undecoded, for the next ticks. The connections take turns there: a connection with a thousand calls delays a connection with one call as
little as another with one. If clients send more than the frontend can decode, the waits grow. Then each tick also refuses some of the
requests, which costs less than to decode them: the requests that have waited longest. It starts the newest requests, which can still be
answered in time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from service.errors import Overloaded
from service.frontend.guards.reading_turns import ReadingTurns

SLICE_SECONDS = 0.005
"""A tick starts requests for this time, and refuses requests for at most as long."""
LONG_WAIT_SHARE = 0.1
"""A wait is long after this share of the default deadline."""
PATIENCE_SECONDS = 1.0
"""An overload begins when all handled requests have waited long for this time: a burst, or a pause, is none. It ends when nothing has been
refused for this time."""

Start = Callable[[float], None]
"""Starts a request that arrived at this monotonic time."""


class LongWaits:
    """Judges from the waits of requests whether a part of a frontend is overloaded, and which requests it should refuse.

    Times are monotonic seconds.
    """

    def __init__(self, long_seconds: float) -> None:
        """long_seconds: a longer wait is long."""
        self._long_seconds = long_seconds
        self.long_since = math.inf
        """When the first of the last requests was handled that have all waited long, infinite if the last request has not."""
        self._refused = -math.inf
        """When a request was refused last."""

    def handle(self, waited: float, now: float) -> None:
        """Note that a request is handled now."""
        self.long_since = min(self.long_since, now) if waited > self._long_seconds else math.inf

    def overloaded(self, now: float) -> bool:
        """Return whether requests that have waited long should be refused."""
        return now - self.long_since > PATIENCE_SECONDS or now - self._refused < PATIENCE_SECONDS

    def refuses(self, waited: float, now: float) -> bool:
        """Return whether a request should be refused now."""
        return waited > self._long_seconds and self.overloaded(now)

    def refuse(self, now: float) -> None:
        """Note that a request is refused now."""
        self._refused = now


def refusal() -> Overloaded:
    """Return the error for a request that is refused."""
    return Overloaded("more requests arrive than a frontend can decode: retry later, or run more frontends", retry_after=1)


class WaitingStart(Struct):
    """A request that waits for a later tick."""

    arrived: float
    start: Start | None
    connection: object

    def cancel(self) -> None:
        """Forget the request."""
        self.start = None

    disconnect = cancel
    """See `Call.disconnect`."""


class StartQueue:
    """The requests of one frontend that wait to be started.

    The connections take turns in the order of their first waiting requests, except in an overload.
    """

    def __init__(self, default_deadline_ms: float, turns: ReadingTurns, clock: Callable[[], float] = time.monotonic) -> None:
        self._waits = LongWaits(LONG_WAIT_SHARE * default_deadline_ms / 1000)
        self._turns = turns
        self._clock = clock
        self._waiting: deque[WaitingStart] = deque()
        """The first waiting request of each connection."""
        self._behind: dict[object, deque[WaitingStart]] = {}
        """The later requests of the connections that may have several."""
        self._ticking = False
        """Whether `_next_tick` is scheduled."""
        self._slice_end = math.inf
        """When this tick starts no further request."""
        self.refusing = False
        """Whether the request that is started now is one to refuse."""

    @property
    def waiting(self) -> int:
        """How many connections wait for their turn."""
        return len(self._waiting)

    def must_wait(self, now: float) -> bool:
        """Return whether a request that is complete now must wait. The caller otherwise starts it at once."""
        if not self._ticking:
            self._slice_end = now + SLICE_SECONDS
            self._schedule()
        elif self._waiting or now > self._slice_end:
            return True
        self._waits.long_since = math.inf
        return False

    def add(self, arrived: float, start: Start, connection: object = None) -> WaitingStart:
        """Keep a request until its turn. start: raises nothing. connection: that may have several waiting requests, None for another."""
        waiting = WaitingStart(arrived, start, connection)
        if connection in self._behind:
            self._behind[connection].append(waiting)
        else:
            self._waiting.append(waiting)
            if connection is not None:
                self._behind[connection] = deque()
        if not self._ticking:
            self._schedule()
        return waiting

    def refuse(self) -> Overloaded:
        """Return the error for the request that is started now, while `refusing`."""
        self._waits.refuse(self._clock())
        return refusal()

    def _schedule(self) -> None:
        self._ticking = True
        asyncio.get_running_loop().call_soon(self._next_tick)  # when the sockets of this tick have been handled

    def _next_tick(self) -> None:
        """Start some of the waiting requests. In an overload, also refuse some that have waited long."""
        self._ticking = False
        if not self._waiting:
            return
        self._schedule()
        began = now = self._clock()
        self._slice_end = now + SLICE_SECONDS
        waiting, overloaded = self._waiting, self._waits.overloaded(now)
        while waiting and now <= self._slice_end:
            behind = self._behind.get(waiting[-1].connection) if overloaded else None
            if behind:  # the first request of its connection then waits before all others, to be refused
                waiting.rotate()
                taken = behind.pop()
            else:
                taken = self._take(waiting.pop if overloaded else waiting.popleft, waiting.append)
            self._waits.handle(now - taken.arrived, now)
            now = self._start(taken)
        self._refuse(now)
        if overloaded:
            self._turns.excuse(self._clock() - began)

    def _refuse(self, now: float) -> None:
        """Refuse the requests that have waited longest, if they have waited too long."""
        end, self.refusing, newer = now + SLICE_SECONDS, True, list[WaitingStart]()
        try:
            while self._waiting and now <= end and self._waits.overloaded(now):
                if self._waits.refuses(now - self._waiting[0].arrived, now):
                    now = self._start(self._take(self._waiting.popleft, self._waiting.appendleft))
                else:  # a later request of a connection is before older requests of the others
                    newer.append(self._waiting.popleft())
        finally:
            self._waiting.extendleft(reversed(newer))
            self.refusing = False

    def _take(self, take: Callable[[], WaitingStart], put: Callable[[WaitingStart], None]) -> WaitingStart:
        """Take a request, and put the next request of its connection."""
        taken = take()
        if behind := self._behind.get(taken.connection):
            put(behind.popleft())
        else:
            self._behind.pop(taken.connection, None)
        return taken

    def _start(self, waiting: WaitingStart) -> float:
        """Start a request, unless it was cancelled. Return the time at the end."""
        start, waiting.start = waiting.start, None  # they refer to each other
        if start is not None:
            start(waiting.arrived)
        return self._clock()
