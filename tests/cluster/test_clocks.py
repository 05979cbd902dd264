"""Hosts whose clocks are an hour apart: a deadline is the time that remains, on the way to an engine and through the session store.

All clocks of a replica are shifted, as on another host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import models, planted
from tests.cluster.replicas import Cluster, Replica, stopped
from tests.long.environment import compiled
from tests.long.overload import LAGS, Lag

AHEAD_SECONDS = (0, 3600)
"""By how much the clocks of the two replicas are ahead."""
MOVES = 20
PATIENT_MS, SHORT_MS = 60_000, 1_000
"""Deadlines. Both are much shorter than the clocks are apart."""
LATE_SECONDS = 0.02


@contextmanager
def apart(tmp_path: Path) -> Iterator[Cluster]:
    """Run two replicas whose clocks are apart."""
    models.accumulator(tmp_path / "models")
    shim = compiled("wall_clock.c", tmp_path)
    cluster = Cluster(tmp_path / "models", tmp_path, session_store=str(tmp_path / "sessions"))
    try:
        for seconds in AHEAD_SECONDS:
            jump = tmp_path / f"jump{seconds}"
            jump.write_text(str(seconds))
            with pytest.MonkeyPatch.context() as patch:
                planted.plant("", patch)
                patch.setenv("LD_PRELOAD", str(shim))
                patch.setenv("CLOCK_JUMP", str(jump))
                patch.setenv("MONOTONIC_SHIFT", str(seconds))
                cluster.add()
        yield cluster
    finally:
        cluster.close()


def moved(cluster: Cluster) -> int:
    """Let a session move with every chunk. Returns how many chunks of one step are answered in turn."""
    for steps in range(MOVES):
        options = {"session": "moved", "steps": steps, "deadline_ms": PATIENT_MS}
        reply = cluster.replicas[steps % 2].infer("accumulator", [[2]], **options)
        if reply.status_code != 200:
            return steps
    return MOVES


def end_of_deadline(asked: Replica, owner: Replica, session: str) -> tuple[str, float, float]:
    """Ask a replica for a session whose owner has stopped. Returns the error, the seconds until it came, and the lag."""
    assert owner.infer("accumulator", [[2]], session=session).status_code == 200
    with stopped(owner), Lag() as lag:
        began = time.monotonic()
        reply = asked.infer("accumulator", [[2]], session=session, steps=1, deadline_ms=SHORT_MS)
        seconds = time.monotonic() - began
    return reply.json()["code"], seconds, lag.worst


def test_deadlines_hold_between_hosts_whose_clocks_are_apart(tmp_path: Path) -> None:
    with apart(tmp_path) as cluster:
        first, second = cluster.replicas
        assert moved(cluster) == MOVES
        clocks = [replica.metric("seqserve_last_answer_time_seconds") for replica in cluster.replicas]
        assert clocks[1] - clocks[0] > max(AHEAD_SECONDS) / 2, "the clocks are apart"
        for asked, owner in ((first, second), (second, first)):
            code, seconds, lag = end_of_deadline(asked, owner, f"of {owner.host}")
            assert code == "deadline_exceeded"
            assert SHORT_MS / 1000 - LATE_SECONDS <= seconds <= SHORT_MS / 1000 + LATE_SECONDS + LAGS * lag, (seconds, lag)
