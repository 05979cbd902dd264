"""Which sequence owns which state slot of a model. A slot is a number here: this module knows neither devices nor tensors."""

from __future__ import annotations

from typing import NamedTuple

ZERO_SLOT, DISCARD_SLOT, FIRST_SLOT = 0, 1, 2
"""ZERO_SLOT holds the state in which every sequence begins and is never written. DISCARD_SLOT takes the states that nothing continues from
and is never read. FIRST_SLOT is the first slot that a sequence may own."""


class StateSlot(NamedTuple):
    """A slot number and its generation, which changes with every free: a stale holder cannot free the slot of its next owner."""

    number: int
    generation: int


class StaleSlot(Exception):
    """A slot was freed by a holder that does not own it any more."""


class SlotAllocator:
    """The state slots of one model: `count` that sequences hold between batches, and `spare` that only a launch needs."""

    def __init__(self, count: int, spare: int) -> None:
        self.count = count
        self._generations = [0] * (count + spare)
        self._free = list(range(count + spare))[::-1]

    @property
    def used(self) -> int:
        return len(self._generations) - len(self._free)

    def allocate(self) -> StateSlot:
        """Return a free slot, spare slots included; raises IndexError if none is free."""
        index = self._free.pop()
        return StateSlot(FIRST_SLOT + index, self._generations[index])

    def free(self, slot: StateSlot) -> None:
        """Free a slot. Raises StaleSlot if it was freed before, even if another sequence owns it by now."""
        if not self.owns(slot):
            raise StaleSlot(f"state slot {slot.number} of generation {slot.generation} was freed before")
        index = slot.number - FIRST_SLOT
        self._generations[index] += 1
        self._free.append(index)

    def owns(self, slot: StateSlot) -> bool:
        """Return whether the slot has not been freed since it was allocated."""
        return self._generations[slot.number - FIRST_SLOT] == slot.generation
