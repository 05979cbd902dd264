"""Random stories of replicas over one store: every answer is right, and everything heals."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.store.story import Story

STORIES, GENTLE, EVENTS = 10, 3, 400


def tell(seed: int, events: int, folder: Path, *, gentle: bool = False, connected: bool = False) -> Counter[str]:
    """Return how often each event happened in one story."""
    story = Story(folder, random.Random(seed), gentle, connected)
    for _ in range(events):
        story.any_event()
    story.finish()
    return story.counts


def test_stories_end_well(tmp_path: Path) -> None:
    counts = sum((tell(seed, EVENTS, tmp_path / str(seed)) for seed in range(STORIES)), start=Counter[str]())
    faults = ("away", "session_lost", "session_unreachable", "lost replies", "lost results", "store process crashes")
    for event in ("answers", "taken", "held", "ended", "ends", *faults):
        assert counts[event], f"{event} never happened: {counts}"


def test_stories_of_connected_replicas_end_well(tmp_path: Path) -> None:
    counts = sum((tell(seed, EVENTS, tmp_path / str(seed), connected=True) for seed in range(STORIES)), start=Counter[str]())
    assert counts["crashes"] and counts["engine crashes"] and counts["store process crashes"] and counts["taken"]


@pytest.mark.parametrize("seed", range(GENTLE))
def test_orderly_changes_of_replicas_lose_nothing(seed: int, tmp_path: Path) -> None:
    counts = tell(seed, EVENTS, tmp_path, gentle=True)
    assert counts["ends"] and counts["taken"] and not counts["session_lost"]
