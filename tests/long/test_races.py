"""All ordered pairs of events that end a request, each for many seeds. `make test-all` runs it. tests/test_races.py plants faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.races import POINTS, Event
from tests.long.races.story import run_stories

SEEDS = 200


def test_every_request_has_one_outcome_and_one_release_over_many_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("w") as log:
        results = run_stories(SEEDS, log.fileno())
    with capsys.disabled():
        print(f"\n{dict(results.outcomes)}", end="")
    assert results.faults == []
    assert results.happened == {(event, point) for event in Event for point in POINTS}
