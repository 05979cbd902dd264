"""The deadlines of all pending requests behind one timer of the event loop: a timer for each request would cost more than its dispatch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

RESOLUTION_SECONDS = 0.005
"""A deadline is noticed at most this late."""
T = TypeVar("T", bound=Hashable)


class Deadlines(Generic[T]):
    """Calls `on_expired` with each item whose deadline passes while it is here.

    Times are seconds on `clock`. Items with deadlines in the same interval of RESOLUTION_SECONDS expire together, at its end.
    """

    def __init__(self, on_expired: Callable[[T], None], clock: Callable[[], float]) -> None:
        self._on_expired = on_expired
        self._clock = clock
        self._slots: dict[int, set[T]] = {}
        self._armed_slot = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T, deadline: float) -> None:
        """Watch an item."""
        slot = _slot(deadline)
        self._slots.setdefault(slot, set()).add(item)
        if slot < self._armed_slot:
            self._arm(slot)

    def discard(self, item: T, deadline: float) -> None:
        """Watch an item no longer. deadline: as it was added."""
        slot = _slot(deadline)
        items = self._slots.get(slot)
        if items is not None:
            items.discard(item)
            if not items:
                del self._slots[slot]

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, slot: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_slot = slot
        seconds = max(0.0, slot * RESOLUTION_SECONDS - self._clock())
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Expire what is due. The timer was set for the earliest slot of its time; by now that slot may be gone."""
        self._timer, self._armed_slot = None, math.inf
        now = self._clock()
        for slot in [slot for slot in self._slots if slot * RESOLUTION_SECONDS <= now]:
            for item in self._slots.pop(slot):
                self._on_expired(item)
        if self._slots:
            self._arm(min(self._slots))


def _slot(deadline: float) -> int:
    return math.ceil(deadline / RESOLUTION_SECONDS)
