"""Sessions move between real replicas: while these are replaced, stop, and crash. `make cluster-test` runs this folder."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.access import peer_keys
from tests import models
from tests.cluster.replicas import HOSTS, Cluster, Replica, clustered, free_ports_everywhere
from tests.cluster.streams import Streams, quantile
from tests.serving import eventually

REPLICAS = 3
SESSIONS, SOCKETS, INTERVAL = 450, 50, 1.0
PAUSE_SECONDS = 0.2
"""Longest pause of 99 of 100 moved sessions. The replicas and the clients of this test share the cores of one machine."""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The settings with which the replicas of a test find each other."""
    models.accumulator(tmp_path / "models")
    peer_keys.create(tmp_path / "peer-keys")
    [port] = free_ports_everywhere(1)
    peers = ",".join(f"{host}:{port}" for host in HOSTS[: 2 * REPLICAS])
    return {"peers": peers, "peer_keys": str(tmp_path / "peer-keys"), "peer_port": str(port)}


@pytest.fixture
def cluster(tmp_path: Path, settings: dict[str, str]) -> Iterator[Cluster]:
    with clustered(tmp_path / "models", tmp_path, REPLICAS, **settings) as started:
        eventually(lambda: all(knows(replica, REPLICAS - 1) for replica in started.replicas))
        yield started


def knows(replica: Replica, count: int) -> bool:
    """Return whether a replica has connections to so many others, and knows of no other."""
    return (replica.metric("seqserve_peers", state="reachable"), replica.metric("seqserve_peers", state="unreachable")) == (
        count,
        0,
    )


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


def test_rolling_update_moves_every_session(cluster: Cluster) -> None:
    """Three replicas are replaced one after the other, each by one at a new address, while 500 sessions stream."""
    replaced: list[tuple[float, float]] = []

    async def update() -> Streams:
        addresses = [f"{host}:{cluster.port}" for host in HOSTS[: 2 * REPLICAS]]
        async with Streams(addresses, http=SESSIONS, sockets=SOCKETS, interval=INTERVAL) as streams:
            await asyncio.sleep(3 * INTERVAL)
            for old in list(cluster.running):
                new = await asyncio.to_thread(cluster.add)
                await asyncio.to_thread(eventually, lambda new=new: knows(new, REPLICAS))
                ready = time.monotonic()
                old.drain()
                assert await asyncio.to_thread(old.await_end) == 0
                replaced.append((ready, time.monotonic()))
                await asyncio.sleep(2 * INTERVAL)
        return streams

    report = asyncio.run(update()).report
    while_replacing = [pause for began, pause in report.pauses if any(begin <= began <= end for begin, end in replaced)]
    print(
        f"{report.answered} chunks, {len(report.pauses)} to another replica than before, {len(while_replacing)} of them during a drain: "
        f"pause p50 {1000 * quantile(while_replacing, 0.5):.1f} ms, p99 {1000 * quantile(while_replacing, 0.99):.1f} ms; "
        f"all moves p99 {1000 * quantile([pause for _, pause in report.pauses], 0.99):.1f} ms; other chunks p50 "
        f"{1000 * quantile(report.others, 0.5):.1f} ms, p99 {1000 * quantile(report.others, 0.99):.1f} ms; "
        f"{report.reconnected} sockets reconnected; sent again: {dict(report.refused)}"
    )
    assert not report.failed and not report.wrong, (report.failed[:5], report.wrong[:5])
    assert report.reconnected >= SOCKETS, "every socket was closed at least once"
    assert len(while_replacing) > SESSIONS
    assert quantile(while_replacing, 0.99) < PAUSE_SECONDS
    handed_over = [event for replica in cluster.replicas[:REPLICAS] for event in replica.events("sessions handed over")]
    assert all(event["left"] == 0 for event in handed_over)
