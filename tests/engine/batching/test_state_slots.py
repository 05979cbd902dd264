"""The allocator of state slots."""

from __future__ import annotations

import pytest

from service.engine.batching.state_slots import FIRST_SLOT, SlotAllocator, StaleSlot


def test_slot_is_allocated_once_until_it_is_freed() -> None:
    slots = SlotAllocator(3, 2)
    taken = [slots.allocate() for _ in range(5)]
    assert sorted(slot.number for slot in taken) == list(range(FIRST_SLOT, FIRST_SLOT + 5))
    assert slots.used == 5
    with pytest.raises(IndexError):
        slots.allocate()
    slots.free(taken[2])
    assert slots.allocate().number == taken[2].number


def test_second_free_fails_and_keeps_the_new_owner() -> None:
    slots = SlotAllocator(1, 0)
    old = slots.allocate()
    slots.free(old)
    with pytest.raises(StaleSlot):
        slots.free(old)
    new = slots.allocate()
    assert new.number == old.number and new != old
    with pytest.raises(StaleSlot):
        slots.free(old)
    assert slots.owns(new) and not slots.owns(old)
    slots.free(new)
    assert slots.used == 0
