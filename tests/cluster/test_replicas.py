"""Replicas start, end and start again at their own addresses. `make test-all` runs this folder."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests import models
from tests.cluster.replicas import Replica, clustered
from tests.serving import eventually


def answered(replica: Replica, name: str) -> int:
    """Send one chunk of a session and return how many steps the session has."""
    answer = replica.infer("accumulator", [[1, 2]], session=name)
    assert answer.status_code == 200, answer.text
    steps: int = answer.json()["session"]["steps"]
    return steps


def test_replicas_have_sessions_of_their_own(tmp_path: Path) -> None:
    models.accumulator(tmp_path / "models")
    with clustered(tmp_path / "models", tmp_path, 2) as cluster:
        first, second = cluster.replicas
        assert [answered(first, "a"), answered(first, "a"), answered(second, "a")] == [2, 4, 2]
        first.kill()
        assert cluster.running == [second]
        assert answered(second, "a") == 4
        assert answered(cluster.again(first), "a") == 2
        added = cluster.add()
        assert answered(added, "a") == 2
        second.drain()
        eventually(lambda: not second.ready())
        assert second.await_end() == 0
        assert cluster.running == [cluster.at(first.host), added]
        assert httpx.get(f"{added.address}/readyz", trust_env=False).status_code == 200
