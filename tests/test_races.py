"""All ordered pairs of events that end a request, at named points of its way: one outcome and one release for each request."""

from __future__ import annotations

from pathlib import Path

from tests.races import Event
from tests.races.story import run_stories

SEEDS = 4
"""Stories of each pair. tests/long has 200."""


def test_every_request_has_one_outcome_and_one_release(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        results = run_stories(SEEDS, log.fileno())
    assert results.faults == []
    assert {event for event, _ in results.happened} == set(Event)
    assert {
        "ok",
        "cancelled",
        "deadline_exceeded",
        "inference_failed",
        "engine_lost",
        "session_lost",
    } <= results.outcomes.keys()
