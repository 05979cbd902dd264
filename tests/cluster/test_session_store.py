"""Sessions of real replicas in a shared store: they move, survive crashes, and go on without it. `make test-all` runs this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.accumulator import Account
from tests.cluster.replicas import Cluster, Replica, clustered
from tests.serving import eventually
from tests.store.redis_server import Redis, running_redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The setting `session_store`."""
    models.accumulator(tmp_path / "models")
    if request.param == "folder":
        return str(tmp_path / "sessions")
    server: Redis = request.getfixturevalue("redis")
    return server.url


@pytest.fixture
def cluster(tmp_path: Path, store: str) -> Iterator[Cluster]:
    with clustered(tmp_path / "models", tmp_path, 2, session_store=store, checkpoint_chunks="2") as started:
        yield started


def chunk(replica: Replica, name: str, **options: object) -> tuple[int, dict[str, object]]:
    """Send a chunk with two steps. Return the status and the body of the reply."""
    answer = replica.infer("accumulator", [[1, 2]], session=name, **options)
    return answer.status_code, answer.json()


def steps(reply: tuple[int, dict[str, object]]) -> int:
    """Return the steps of the session after a chunk that was answered."""
    status, body = reply
    assert status == 200, body
    count: int = body["session"]["steps"]  # type: ignore[index]
    return count


def code(reply: tuple[int, dict[str, object]]) -> tuple[int, object]:
    status, body = reply
    return status, body.get("code")


def test_session_follows_its_chunks(cluster: Cluster) -> None:
    first, second = cluster.replicas
    assert [steps(chunk(replica, "a")) for replica in (first, second, second, first, second)] == [2, 4, 6, 8, 10]
    assert first.metric("seqserve_sessions") == 0 and second.metric("seqserve_sessions") == 1
    state = first.client.get("/sessions/a/state")
    assert state.status_code == 200 and first.metric("seqserve_sessions") == 1, "the state of a session moves it, like a chunk"


def test_crash_loses_what_was_not_saved(cluster: Cluster) -> None:
    """The client learns how many steps were saved, sends the steps after them again, and gets the right sum."""
    first, second = cluster.replicas
    assert [steps(chunk(first, "a")) for _ in range(3)] == [2, 4, 6]
    assert steps(chunk(first, "young")) == 2
    eventually(lambda: first.metric("seqserve_session_saves_total", outcome="saved") >= 1)
    first.kill()
    reply = chunk(second, "a", steps=6)
    assert code(reply) == (409, "session_lost") and reply[1]["steps"] == 4
    for _ in range(2):
        assert chunk(second, "a")[1]["steps"] == 4, "a chunk without steps changes nothing"
    reply = chunk(second, "a", steps=4)
    assert steps(reply) == 6
    assert Account.told(reply[1]["outputs"][0]["value"]) == Account(3, 6)  # type: ignore[index]
    assert code(chunk(second, "young")) == (409, "session_lost")
    assert steps(chunk(second, "young")) == 2


def test_streams_go_on_without_the_store(tmp_path: Path, redis: Redis) -> None:
    models.accumulator(tmp_path / "models")
    with clustered(tmp_path / "models", tmp_path, 2, session_store=redis.url, checkpoint_chunks="2") as cluster:
        first, second = cluster.replicas
        assert [steps(chunk(first, "a")) for _ in range(2)] == [2, 4]
        redis.stop()
        eventually(lambda: second.metric("seqserve_session_store_up") == first.metric("seqserve_session_store_up") == 0)
        assert [steps(chunk(first, "a")) for _ in range(4)] == [6, 8, 10, 12]
        assert steps(chunk(second, "new", start=True)) == 2
        assert steps(chunk(second, "new")) == 4
        assert code(chunk(second, "a")) == (503, "session_unreachable")
        redis.start()
        eventually(lambda: second.metric("seqserve_session_store_up") == first.metric("seqserve_session_store_up") == 1)
        # The data of the store is gone. Saves create the records again.
        saved = [replica.metric("seqserve_session_saves_total", outcome="saved") for replica in cluster.replicas]
        assert [steps(chunk(first, "a")) for _ in range(2)] == [14, 16]
        assert [steps(chunk(second, "new")) for _ in range(2)] == [6, 8]
        for replica, before in zip(cluster.replicas, saved, strict=True):
            eventually(lambda: replica.metric("seqserve_session_saves_total", outcome="saved") > before)  # noqa: B023
        assert steps(chunk(second, "a", steps=16)) == 18
        assert steps(chunk(first, "new", steps=8)) == 10
