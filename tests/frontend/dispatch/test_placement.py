"""Which engine has a session."""

from __future__ import annotations

from collections import Counter

import pytest

from service.frontend.dispatch.placement import home

NAMES = [f"session {number}" for number in range(4000)]


@pytest.mark.parametrize("places", [1, 2, 3, 8])
def test_every_place_has_its_even_share(places: int) -> None:
    found = Counter(home(name, places) for name in NAMES)
    assert sorted(found) == list(range(places))
    assert max(found.values()) - min(found.values()) < 0.1 * len(NAMES)


@pytest.mark.parametrize("places", [1, 2, 7])
def test_a_place_more_takes_its_share_and_moves_no_other_session(places: int) -> None:
    moved = [name for name in NAMES if home(name, places) != home(name, places + 1)]
    assert len(moved) == pytest.approx(len(NAMES) / (places + 1), rel=0.15)
    assert {home(name, places + 1) for name in moved} == {places}


def test_it_is_the_same_in_every_process_and_release() -> None:
    assert [home(name, 4) for name in ("a", "b", "sensor-17", "x" * 128)] == [2, 2, 1, 0]
