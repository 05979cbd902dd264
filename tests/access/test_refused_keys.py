"""Answers to repeated wrong keys wait, within bounds. The clock is a fake."""

from __future__ import annotations

import pytest

from service.access.refused_keys import DELAY_SECONDS, FREE_REFUSALS, MAX_ADDRESSES, MAX_WAITING, WINDOW_SECONDS, RefusedKeys
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refused(clock: Clock) -> RefusedKeys:
    return RefusedKeys(clock)


def exhaust(refused: RefusedKeys, peer: str) -> None:
    """Send as many wrong keys as are answered at once."""
    assert [refused.delay(peer) for _ in range(FREE_REFUSALS)] == [0.0] * FREE_REFUSALS


def test_answers_wait_after_several_wrong_keys_until_the_next_window(refused: RefusedKeys, clock: Clock) -> None:
    exhaust(refused, "192.0.2.1")
    assert refused.delay("192.0.2.2") == 0.0
    clock.now += WINDOW_SECONDS - 1
    assert refused.delay("192.0.2.1") == DELAY_SECONDS
    clock.now += 1
    exhaust(refused, "192.0.2.1")
    assert refused.delay("192.0.2.1") == DELAY_SECONDS


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("", "192.0.2.1", False),
    ],
)
def test_addresses_of_a_network_count_together(first: str, second: str, together: bool, refused: RefusedKeys) -> None:
    exhaust(refused, first)
    assert refused.delay(second) == (DELAY_SECONDS if together else 0.0)


def test_number_of_waiting_answers_is_bounded(refused: RefusedKeys, clock: Clock) -> None:
    exhaust(refused, "192.0.2.1")
    assert all(refused.delay("192.0.2.1") for _ in range(MAX_WAITING))
    assert refused.delay("192.0.2.1") == 0.0
    clock.now += DELAY_SECONDS
    assert refused.delay("192.0.2.1") == DELAY_SECONDS
    assert len(refused._waiting) == 1


def test_number_of_addresses_is_bounded(refused: RefusedKeys, clock: Clock) -> None:
    exhaust(refused, "oldest")
    clock.now += 1
    exhaust(refused, "newest")
    for number in range(MAX_ADDRESSES - 1):
        refused.delay(f"other {number}")
    assert len(refused._windows) == MAX_ADDRESSES
    assert refused.delay("newest") == DELAY_SECONDS
    assert refused.delay("oldest") == 0.0, "it was forgotten"
