"""Random stories of replicas over one store: every answer is right, and everything heals. The long run has many more."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.store.story import Story

STORIES, EVENTS = 12, 400


def tell(seed: int, events: int, folder: Path, *, gentle: bool = False) -> Counter[str]:
    """Return how often each event happened in one story."""
    story = Story(folder, random.Random(seed), gentle)
    for _ in range(events):
        story.any_event()
    story.finish()
    return story.counts


@pytest.mark.parametrize("seed", range(STORIES))
def test_story_ends_well(seed: int, tmp_path: Path) -> None:
    tell(seed, EVENTS, tmp_path)


@pytest.mark.parametrize("seed", range(STORIES // 2))
def test_orderly_changes_of_replicas_lose_nothing(seed: int, tmp_path: Path) -> None:
    counts = tell(seed, EVENTS, tmp_path, gentle=True)
    assert counts["ends"] and counts["taken"] and not counts["session_lost"]


def test_stories_have_every_event(tmp_path: Path) -> None:
    counts = sum((tell(100 + seed, EVENTS, tmp_path / str(seed)) for seed in range(4)), start=Counter[str]())
    for event in ("answers", "taken", "held", "ended", "away", "session_lost", "session_unreachable", "lost replies", "ends"):
        assert counts[event], f"{event} never happened: {counts}"
