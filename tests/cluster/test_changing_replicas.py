"""Sessions stream over HTTP, WebSockets and gRPC while replicas are replaced, added and removed. `make test-all` runs this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import models
from tests.cluster.replicas import HOSTS, Cluster, Replica, clustered
from tests.cluster.shipped import shipped
from tests.cluster.streams import Balancer, Place, Rendezvous, Report, Streams, ThroughProxy
from tests.proxies import PROXIES

REPLICAS = 3
HTTP, SOCKETS, CALLS, INTERVAL = 400, 50, 50, 1.0
SESSIONS = HTTP + SOCKETS + CALLS
CHECKED_SECONDS = 3.0
"""Longer than a proxy needs to notice a replica that is ready or not."""
CHECKING = ("envoy", "haproxy")
"""Proxies with health checks. nginx sends chunks to a replica that starts, which refuses them until it is ready."""
Change = Callable[[Cluster], Awaitable[None]]


@contextmanager
def sharing(folder: Path) -> Iterator[Cluster]:
    """Run three replicas with one session store."""
    models.accumulator(folder / "models")
    with clustered(folder / "models", folder, REPLICAS, replicated="1", session_store=str(folder / "sessions")) as cluster:
        yield cluster


def everywhere(cluster: Cluster, most: int) -> Rendezvous:
    """Return a balancer over the first `most` addresses."""
    return Rendezvous([Place(f"{host}:{cluster.port}", f"{host}:{cluster.grpc_port}") for host in HOSTS[:most]])


async def end(replica: Replica) -> None:
    """Drain a replica."""
    replica.drain()
    assert await asyncio.to_thread(replica.await_end) == 0


def stream(cluster: Cluster, balancer: Balancer, change: Change, lost: Callable[[], float] = lambda: 0) -> Report:
    """Stream all sessions during a change of the replicas. At the end the replicas have every session exactly once.

    lost: how many sessions may be lost, each with one report.
    """

    async def streaming() -> Report:
        counts = {"http": HTTP, "sockets": SOCKETS, "calls": CALLS}
        async with Streams(balancer, **counts, interval=INTERVAL) as streams:
            await asyncio.sleep(3 * INTERVAL)
            await change(cluster)
            await asyncio.sleep(2 * INTERVAL)
        return streams.report

    report = asyncio.run(streaming())
    assert not report.wrong and len(report.failed) <= lost(), (report.failed[:5], report.wrong[:5])
    assert len({failure.partition(" at ")[0] for failure in report.failed}) == len(report.failed), "a loss is reported once"
    assert sum(replica.metric("seqserve_sessions") for replica in cluster.running) == SESSIONS
    saved = [event for replica in cluster.replicas for event in replica.events("sessions saved")]
    assert all(event["left"] == 0 for event in saved)
    return report


def check_every_stream_was_ended(report: Report) -> None:
    """A replica that ends asks its clients to return, each stream was at a replica that has ended, and sessions have moved."""
    assert report.reconnected["WebSocket"] >= SOCKETS and report.reconnected["gRPC"] >= CALLS
    assert report.moved.total() > HTTP


def test_rolling_update_moves_every_session(tmp_path: Path) -> None:
    """Three replicas are replaced in turn, each by a replica at a new address."""

    async def update(cluster: Cluster) -> None:
        for old in list(cluster.running):
            await asyncio.to_thread(cluster.add)
            await end(old)
            await asyncio.sleep(2 * INTERVAL)

    with sharing(tmp_path) as cluster:
        check_every_stream_was_ended(stream(cluster, everywhere(cluster, 2 * REPLICAS), update))


@pytest.mark.parametrize("proxy", CHECKING)
def test_rolling_update_behind_a_proxy_moves_every_session(proxy: str, tmp_path: Path) -> None:
    """Three replicas behind a proxy are replaced in turn, each by a replica at the same address."""

    async def update(cluster: Cluster) -> None:
        for old in list(cluster.running):
            await end(old)
            await asyncio.to_thread(cluster.again, old)
            await asyncio.sleep(CHECKED_SECONDS)

    with sharing(tmp_path) as cluster, shipped(proxy, cluster, tmp_path, naming=True) as front:
        check_every_stream_was_ended(stream(cluster, ThroughProxy(front), update))


@pytest.mark.parametrize("proxy", PROXIES)
def test_killed_replica_behind_a_proxy_loses_no_more_than_its_sessions(proxy: str, tmp_path: Path) -> None:
    """Sessions of the other replicas go on. Another replica starts at its address."""
    held: list[float] = []

    async def kill(cluster: Cluster) -> None:
        first = cluster.running[0]
        held.append(await asyncio.to_thread(first.metric, "seqserve_sessions"))
        await asyncio.to_thread(first.kill)
        await asyncio.sleep(CHECKED_SECONDS)
        await asyncio.to_thread(cluster.again, first)
        await asyncio.sleep(CHECKED_SECONDS)

    with sharing(tmp_path) as cluster, shipped(proxy, cluster, tmp_path, naming=proxy in CHECKING) as front:
        stream(cluster, ThroughProxy(front), kill, lambda: held[0])
