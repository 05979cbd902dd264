"""The messages of an ending replica about its sessions, while other replicas end at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from service.mover.hand_over import hand_over


def outcome(held: Sequence[list[str]]) -> tuple[tuple[int, int], set[str]]:
    """Hand over with these sessions at each look, until the last. Return the result, and the sessions that were offered."""
    looks, offered = iter(held), set[str]()
    left = len(held)

    async def sessions() -> list[str]:
        nonlocal left
        left -= 1
        return next(looks)

    async def run() -> tuple[int, int]:
        return await hand_over(
            60.0, sessions, lambda: ["b"], lambda: left > 0, lambda _, offer: offered.update(offer.sessions), "a"
        )

    return asyncio.run(run()), offered


@pytest.mark.parametrize(
    ("held", "taken_and_left"),
    [
        ([[]], (0, 0)),
        ([["x", "y"], ["y"], []], (2, 0)),
        ([["x", "y"], ["y"]], (1, 1)),
        ([["x"], ["y", "z"]], (1, 2)),
    ],
    ids=["none", "all are taken", "one is left", "two come and one is taken"],
)
def test_sessions_that_come_late_count_too(held: list[list[str]], taken_and_left: tuple[int, int]) -> None:
    found, offered = outcome(held)
    assert found == taken_and_left
    assert offered >= set(held[0])
