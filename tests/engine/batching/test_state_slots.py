"""Who owns which place."""

from __future__ import annotations

import pytest

from service.engine.batching.state_slots import Slot, Slots, StaleSlot
from service.ipc.messages import FIRST


def test_every_place_is_handed_out_once_until_it_is_given_back() -> None:
    slots = Slots(3, 2)
    taken = [slots.take() for _ in range(5)]
    assert sorted(slot.place for slot in taken) == list(range(FIRST, FIRST + 5))
    assert slots.used == 5
    with pytest.raises(IndexError):
        slots.take()
    slots.give_back(taken[2])
    assert slots.take().place == taken[2].place


def test_who_gives_back_twice_is_told_so_and_takes_nothing_from_the_new_owner() -> None:
    slots = Slots(1, 0)
    old = slots.take()
    slots.give_back(old)
    with pytest.raises(StaleSlot):
        slots.give_back(old)
    new = slots.take()
    assert new.place == old.place and new != old
    with pytest.raises(StaleSlot):
        slots.give_back(old)
    assert slots.owns(new) and not slots.owns(old)
    slots.give_back(new)
    assert slots.used == 0


def test_a_slot_that_was_never_handed_out_cannot_be_given_back() -> None:
    with pytest.raises(StaleSlot):
        Slots(2, 0).give_back(Slot(FIRST, 0))
