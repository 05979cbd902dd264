"""Who owns which place of a model's states. Pure: a place is a number, and nothing here knows a device or a tensor."""

from __future__ import annotations

from typing import NamedTuple

from service.ipc.messages import FIRST


class Slot(NamedTuple):
    """A place and the generation in which it was handed out: who gives back a slot of an older one gives back what is another's."""

    place: int
    generation: int


class StaleSlot(Exception):
    """A slot was given back, or asked about, that its holder does not own any more."""


class Slots:
    """The places of one model's states: `count` of them to be held from turn to turn, and `spare` that only a launch needs."""

    def __init__(self, count: int, spare: int) -> None:
        self.count = count
        self._generations = [0] * (count + spare)
        self._free = list(range(count + spare))[::-1]
        self._owned = [False] * (count + spare)

    @property
    def used(self) -> int:
        return len(self._generations) - len(self._free)

    def take(self) -> Slot:
        """A place that nobody owns, spare ones included; raises IndexError when there is none."""
        index = self._free.pop()
        self._owned[index] = True
        return Slot(FIRST + index, self._generations[index])

    def give_back(self, slot: Slot) -> None:
        """Raises StaleSlot when it was given back before, whoever may own the place by now."""
        if not self.owns(slot):
            raise StaleSlot(f"place {slot.place} of generation {slot.generation} is not its holder's any more")
        index = slot.place - FIRST
        self._owned[index] = False
        self._generations[index] += 1
        self._free.append(index)

    def owns(self, slot: Slot) -> bool:
        """Whether whoever holds this slot still owns its place."""
        index = slot.place - FIRST
        return self._owned[index] and self._generations[index] == slot.generation
