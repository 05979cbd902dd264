"""Sessions move between real replicas: where their chunks go, and when replicas stop and crash. `make cluster-test` runs this folder."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from service.access import keys
from service.access.scopes import Scope
from tests import models
from tests.accumulator import Account
from tests.certificates import Authority
from tests.cluster.replicas import Cluster, Replica, clustered, knows, peer_settings, stopped
from tests.mover.redis_server import running_redis
from tests.serving import eventually

REPLICAS = 3


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The settings with which the replicas of a test find each other."""
    models.accumulator(tmp_path / "models")
    return peer_settings(tmp_path, 2 * REPLICAS)


@pytest.fixture
def cluster(tmp_path: Path, settings: dict[str, str]) -> Iterator[Cluster]:
    with clustered(tmp_path / "models", tmp_path, REPLICAS, **settings) as started:
        eventually(lambda: all(knows(replica, REPLICAS - 1) for replica in started.replicas))
        yield started


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with running_redis(tmp_path) as url:
        yield url


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


def test_stopped_replica_keeps_its_sessions_to_itself(cluster: Cluster) -> None:
    """While the owner is stopped, no replica answers for it. When it continues, the session continues with the same steps."""
    first, second, _ = cluster.replicas
    assert steps(chunk(first, "a")) == 2
    with stopped(first):
        status, body = chunk(second, "a")
        assert (status, body["code"]) == (503, "session_unreachable")
        assert second.infer("accumulator", [[1]], session="a").headers["retry-after"] == "1"
        # A session on this replica continues; no session begins under a name that the stopped replica could hold.
        assert chunk(second, "new")[0] == 503
    eventually(lambda: chunk(second, "a", steps=2)[0] == 200)
    assert steps(chunk(first, "a", steps=4)) == 6


def test_crashed_replica_loses_its_sessions_only(cluster: Cluster) -> None:
    first, second, third = cluster.replicas
    assert steps(chunk(first, "a")) == 2
    assert steps(chunk(second, "b")) == 2
    first.kill()
    eventually(lambda: knows(third, 1))
    status, body = chunk(third, "a", steps=2)
    assert (status, body["code"], body["steps"]) == (409, "session_lost", 0)
    assert steps(chunk(third, "b", steps=2)) == 4


def test_client_key_does_not_open_the_peer_port(cluster: Cluster, settings: dict[str, str]) -> None:
    """Anything sent there without a proof, even HTTP with a key, gets no reply."""
    for sent in (b"GET /sessions/a/state HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n\r\n" + bytes(64), bytes(200)):
        with socket.create_connection((cluster.replicas[0].host, int(settings["peer_port"])), timeout=30) as connection:
            connection.sendall(sent)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    eventually(lambda: cluster.replicas[0].events("peer refused"))


def test_sessions_of_tenants_move_apart(tmp_path: Path, settings: dict[str, str]) -> None:
    """The same id names a session of each tenant, on every replica."""
    file, scopes = tmp_path / "keys.toml", [Scope.INFER, Scope.SESSION, Scope.METRICS]
    tokens = [keys.create(file, name, scopes, name) for name in ("red", "blue")]
    with clustered(tmp_path / "models", tmp_path, 2, **settings, keys=str(file)) as started:
        first, second = started.replicas

        def send(replica: Replica, token: str) -> int:
            replica.client.headers["authorization"] = f"Bearer {token}"
            return steps(chunk(replica, "a"))

        red, blue = tokens
        first.client.headers["authorization"] = f"Bearer {red}"
        eventually(lambda: knows(first, 1))
        assert [send(first, red), send(second, blue), send(second, red), send(first, blue)] == [2, 2, 4, 4]


def test_moves_over_tls(tmp_path: Path, settings: dict[str, str]) -> None:
    certificate, key = Authority(tmp_path).sign("replica")
    tls = {"tls_cert": str(certificate), "tls_key": str(key)}
    with clustered(tmp_path / "models", tmp_path, 2, **settings, **tls) as started:
        for replica in started.replicas:
            replica.client.close()
            replica.client = httpx.Client(base_url=replica.address, timeout=30, trust_env=False, verify=False)
        first, second = started.replicas
        eventually(lambda: knows(first, 1))
        assert [steps(chunk(first, "a")), steps(chunk(second, "a")), steps(chunk(first, "a"))] == [2, 4, 6]


def test_session_moves_between_frontends_and_engines(tmp_path: Path, settings: dict[str, str]) -> None:
    """Each replica has two engines, and the mover finds the engine of a session."""
    with clustered(tmp_path / "models", tmp_path, 2, **settings, device="cpu,cpu", frontends="2") as started:
        first, second = started.replicas
        eventually(lambda: knows(first, 1))
        for name in ("a", "b", "c", "d", "e"):
            assert [steps(chunk(first, name)), steps(chunk(second, name)), steps(chunk(first, name))] == [2, 4, 6]


def test_mover_that_ends_is_started_again(cluster: Cluster) -> None:
    first, second, _ = cluster.replicas
    assert steps(chunk(first, "a")) == 2
    os.kill(first.pid("mover-0"), signal.SIGKILL)
    eventually(lambda: first.metric("seqserve_process_restarts_total", process="mover") == 1)
    eventually(lambda: knows(first, 2) and knows(second, 2))
    assert steps(chunk(second, "a")) == 4


@pytest.mark.parametrize("store", ["folder", "redis"])
def test_session_continues_from_its_checkpoint_after_a_crash(
    tmp_path: Path, settings: dict[str, str], store: str, request: pytest.FixtureRequest
) -> None:
    """The client learns how many steps the checkpoint has, sends the steps after it again, and gets the right sum."""
    checkpoints = str(tmp_path / "checkpoints") if store == "folder" else request.getfixturevalue("redis_url")
    saved = {"checkpoints": checkpoints, "checkpoint_chunks": "2"}
    with clustered(tmp_path / "models", tmp_path, 2, **settings, **saved) as started:
        first, second = started.replicas
        eventually(lambda: knows(first, 1))
        for count in (2, 4, 6):
            assert steps(chunk(first, "a")) == count
        eventually(lambda: first.metric("seqserve_checkpoints_total", outcome="saved") >= 1)
        first.kill()
        eventually(lambda: knows(second, 0))
        status, body = chunk(second, "a", steps=6)
        assert (status, body["code"], body["steps"]) == (409, "session_lost", 4)
        status, body = chunk(second, "a", steps=4)
        assert status == 200 and body["session"] == {"id": "a", "steps": 6}
        assert Account.told(body["outputs"][0]["value"]) == Account(3, 6)  # type: ignore[index]
        # An orderly end saves everything.
        assert steps(chunk(second, "a")) == 8
        second.drain()
        assert second.await_end() == 0
        third = started.again(second)
        eventually(lambda: knows(third, 0))
        assert steps(chunk(third, "a", steps=8)) == 10
