"""Rendezvous hashing of session ids."""

from __future__ import annotations

from collections import Counter

import pytest

from service.ipc.session_placement import engine_of_session

NAMES = [f"session {number}" for number in range(4000)]


@pytest.mark.parametrize("places", [1, 3])
def test_added_engine_moves_only_its_share(places: int) -> None:
    found = Counter(engine_of_session(name, places) for name in NAMES)
    assert sorted(found) == list(range(places))
    assert max(found.values()) - min(found.values()) < 0.1 * len(NAMES)
    moved = [name for name in NAMES if engine_of_session(name, places) != engine_of_session(name, places + 1)]
    assert len(moved) == pytest.approx(len(NAMES) / (places + 1), rel=0.15)
    assert {engine_of_session(name, places + 1) for name in moved} == {places}


def test_placement_is_stable_across_releases() -> None:
    assert [engine_of_session(name, 4) for name in ("a", "b", "sensor-17", "x" * 128)] == [2, 2, 1, 0]
