"""Which state slots of a model are free. A slot is a number here: this module knows neither devices nor tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ZERO_SLOT, DISCARD_SLOT, FIRST_SLOT = 0, 1, 2
"""ZERO_SLOT holds the state in which every sequence begins and is never written. DISCARD_SLOT takes the states that nothing continues from
and is never read. FIRST_SLOT is the first slot that a state handle may hold."""
Numbers = NDArray[np.integer[Any]]


class FreeSlots:
    """The free slots of one model, of `count` in all."""

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._slots = np.arange(FIRST_SLOT + count - 1, FIRST_SLOT - 1, -1)
        """The free slots come first."""

    @property
    def used(self) -> int:
        return self._count - self._free

    def take(self, count: int) -> Numbers:
        """Return free slots, (count,). The caller never takes more than are free."""
        assert count <= self._free, "the scheduler begins no more sequences than there is room for"
        self._free -= count
        return self._slots[self._free : self._free + count].copy()

    def put_back(self, slots: Numbers) -> None:
        """Free slots that were taken."""
        assert self._free + len(slots) <= self._count, "a slot is freed once"
        self._slots[self._free : self._free + len(slots)] = slots
        self._free += len(slots)

    def free(self) -> Numbers:
        return self._slots[: self._free]
