"""Slows down clients that guess keys: after an address has sent several wrong keys, answers to its wrong keys wait.

Only these answers wait. A valid key of the same address, which may be that of a proxy, is never delayed. Each frontend counts for itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from service.access.address_group import address_group

DELAY_SECONDS = 1.0
"""How long an answer waits."""
WINDOW_SECONDS = 60.0
FREE_REFUSALS = 10
"""Wrong keys of an address in a window that are answered at once."""
MAX_ADDRESSES = 4096
"""Addresses that are remembered. The address with the oldest window is forgotten first."""
MAX_WAITING = 1024
"""Answers that wait at a time. Further answers are sent at once: a wrong key must not cost the service much memory."""


class RefusedKeys:
    """Counts the wrong keys that a frontend has received, by address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}
        """When the window of an address began, and its wrong keys since then. The oldest window comes first."""
        self._waiting: deque[float] = deque()
        """When the answers that wait are sent."""

    def delay(self, peer: str) -> float:
        """Count a wrong key from an address, and return the seconds that its answer waits."""
        now = self._clock()
        while self._waiting and self._waiting[0] <= now:
            self._waiting.popleft()
        if self._count(address_group(peer), now) <= FREE_REFUSALS or len(self._waiting) >= MAX_WAITING:
            return 0.0
        self._waiting.append(now + DELAY_SECONDS)
        return DELAY_SECONDS

    def _count(self, group: str, now: float) -> int:
        """Count a wrong key, and return the number of those in the current window of a group of addresses."""
        began, count = self._windows.get(group, (now, 0))
        if now - began >= WINDOW_SECONDS:
            del self._windows[group]
            began, count = now, 0
        elif not count and len(self._windows) >= MAX_ADDRESSES:
            del self._windows[next(iter(self._windows))]
        self._windows[group] = began, count + 1
        return count + 1
