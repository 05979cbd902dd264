"""Five minutes at twice the capacity, with random deadlines. `make test-all` runs it.

The device is planted: a batch takes a fixed time and no processor time, so that the clients, which share the cores with the server, take
nothing from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from loadtest.target import Target
from tests import models, planted
from tests.accumulator import at_rest
from tests.long.test_stress import Crowd, check_in_time, overloaded
from tests.serving import Server, serving

SECONDS = 300.0
STEPS = 20
MAX_BATCH = "2"


@contextmanager
def dated(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server with a slow device, and the file with the rows of its batches."""
    rows = tmp_path / "rows"
    models.accumulator(tmp_path / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWS", str(rows))
        planted.plant("dated-device", patch)
        with serving(tmp_path / "models", tmp_path, max_batch_sequences=MAX_BATCH, idle_seconds="600") as server:
            yield server, rows


def computed(rows: Path) -> tuple[int, int]:
    """Return how many rows were computed, and how many of them after their deadline."""
    batches = [line.split() for line in rows.read_text().splitlines()]
    return sum(int(count) for count, _ in batches), sum(int(late) for _, late in batches)


def test_five_minutes_at_twice_the_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dated(tmp_path) as (server, rows):
        before = at_rest(server)
        crowd = Crowd(Target.of(server.address, "/infer"), "accumulator", STEPS)
        capacity = uvloop.run(overloaded(crowd, SECONDS))
        codes, (count, late) = Counter(one.code for one in crowd.heard), computed(rows)
        with capsys.disabled():
            print(
                f"\n{capacity:.0f} requests/s, {dict(codes)}, {count} rows computed, {late} late, lag {1000 * crowd.lag:.0f} ms",
                end="",
            )
        check_in_time(crowd.heard, crowd.lag)
        assert codes["ok"] and codes["overloaded"] + codes["deadline_exceeded"]
        assert count and not late
        now = at_rest(server).since(before)
        now.check()
        assert {code: now.outcomes[code] for code in ("overloaded", "deadline_exceeded")} == {
            code: codes[code] for code in ("overloaded", "deadline_exceeded")
        }
