"""The growth that the measurement of memory reports."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable

import pytest

from tests.steady import LIMIT, WARM_UP, growing, resident_bytes, steady

BEGIN, MIB = 300 << 20, 1 << 20
LEAK_BYTES = 100
SENT = range(1_000, 100_001, 1_000)
LEAKED_MIB = LEAK_BYTES * 100_000 / MIB


def slope(held: Callable[[int], float]) -> float:
    """Return the slope of a process with `held(sent)` more bytes after `sent` requests."""
    return steady([(sent, BEGIN + int(held(sent))) for sent in SENT])


def noise(seed: int) -> Callable[[int], float]:
    chance = random.Random(seed)
    return lambda _: chance.gauss(0, MIB)


def test_constant_memory_has_no_slope() -> None:
    assert slope(lambda _: 0) == 0


def test_leak_has_its_slope() -> None:
    assert slope(lambda sent: LEAK_BYTES * sent) == pytest.approx(LEAKED_MIB)


def test_shrinking_memory_has_a_negative_slope() -> None:
    assert slope(lambda sent: -LEAK_BYTES * sent) == pytest.approx(-LEAKED_MIB)


def test_growth_during_warm_up_is_ignored() -> None:
    assert slope(lambda sent: 1_000 * min(sent, WARM_UP)) == 0


def test_single_step_is_ignored_at_any_position() -> None:
    for at in SENT:
        assert slope(lambda sent, at=at: 50 * MIB * (sent >= at)) == 0, at  # type: ignore[misc]


@pytest.mark.parametrize("every", [5_000, 10_000, 20_000])
def test_repeated_steps_are_growth(every: int) -> None:
    assert slope(lambda sent: 2 * MIB * (sent // every)) > LIMIT


def test_outliers_are_ignored() -> None:
    assert slope(lambda sent: 100 * MIB * (sent % 10_000 == 0)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_leak_is_distinguished_from_noise(seed: int) -> None:
    still, wave = noise(seed), noise(seed)
    assert abs(slope(still)) < LIMIT
    assert slope(lambda sent: LEAK_BYTES * sent + wave(sent)) == pytest.approx(LEAKED_MIB, abs=LIMIT)


def test_too_few_samples_raise() -> None:
    with pytest.raises(AssertionError, match="send more"):
        steady([(sent, BEGIN) for sent in SENT if sent <= WARM_UP])


def test_growing_selects_slopes_at_or_above_the_limit() -> None:
    assert growing({"supervisor": -1.0, "frontend-0": 0.99 * LIMIT, "engine-0": LIMIT}) == {"engine-0": LIMIT}


def test_resident_bytes_count_touched_pages() -> None:
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, 64 * MIB) as pages:  # an allocator may return pages that are resident already
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
        assert resident_bytes(os.getpid()) - before == pytest.approx(len(pages), abs=8 * MIB)
