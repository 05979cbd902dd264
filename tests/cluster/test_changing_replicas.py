"""Sessions stream over HTTP, WebSockets and gRPC while replicas are replaced, added and removed. `make test-all` runs this folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import models
from tests.cluster.replicas import HOSTS, Cluster, Replica, clustered
from tests.cluster.shipped import shipped
from tests.cluster.streams import Balancer, Place, Rendezvous, Report, Streams, ThroughProxy, milliseconds, quantile
from tests.proxies import PROXIES

REPLICAS = 3
HTTP, SOCKETS, CALLS, INTERVAL = 400, 50, 50, 1.0
SESSIONS = HTTP + SOCKETS + CALLS
PAUSE_SECONDS = 0.2
"""Longest pause of 99 of 100 moved sessions, beyond the time for which its steps wait for the cores of the machine."""
MOVE_STEPS = 5
"""Waits, each as long as for a chunk without a move: the end of the stream, the connection, its handshake, the chunk, and the state."""
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


def check_pauses(pauses: Sequence[float], report: Report) -> None:
    assert quantile(pauses, 0.99) < PAUSE_SECONDS + MOVE_STEPS * quantile(report.others, 0.99)


def check_every_stream_was_ended(report: Report) -> None:
    """A replica that ends asks its clients to return, and each stream was at a replica that has ended."""
    assert report.reconnected["WebSocket"] >= SOCKETS and report.reconnected["gRPC"] >= CALLS


def test_rolling_update_moves_every_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three replicas are replaced in turn, each by a replica at a new address."""
    replaced: list[tuple[float, float]] = []

    async def update(cluster: Cluster) -> None:
        for old in list(cluster.running):
            await asyncio.to_thread(cluster.add)
            ready = time.monotonic()
            await end(old)
            replaced.append((ready, time.monotonic()))
            await asyncio.sleep(2 * INTERVAL)

    with sharing(tmp_path) as cluster:
        report = stream(cluster, everywhere(cluster, 2 * REPLICAS), update)
    draining = [pause for began, pause in report.pauses if any(begin <= began <= end for begin, end in replaced)]
    with capsys.disabled():
        print(f"\nwithout a proxy: {report}\n{len(draining)} moves during a drain: {milliseconds(draining)}")
    check_every_stream_was_ended(report)
    assert len(draining) > HTTP
    check_pauses(draining, report)


@pytest.mark.parametrize("proxy", CHECKING)
def test_rolling_update_behind_a_proxy_moves_every_session(
    proxy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three replicas behind a proxy are replaced in turn, each by a replica at the same address."""

    async def update(cluster: Cluster) -> None:
        for old in list(cluster.running):
            await end(old)
            await asyncio.to_thread(cluster.again, old)
            await asyncio.sleep(CHECKED_SECONDS)

    with sharing(tmp_path) as cluster, shipped(proxy, cluster, tmp_path, naming=True) as front:
        report = stream(cluster, ThroughProxy(front), update)
    with capsys.disabled():
        print(f"\n{proxy}: {report}")
    check_every_stream_was_ended(report)
    assert len(report.pauses) > HTTP
    check_pauses([pause for _, pause in report.pauses], report)


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


def test_sessions_follow_three_then_five_then_two_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def grow_and_shrink(cluster: Cluster) -> None:
        await asyncio.to_thread(cluster.start, 2)
        await asyncio.sleep(3 * INTERVAL)
        for old in cluster.running[:3]:
            await end(old)

    with sharing(tmp_path) as cluster:
        report = stream(cluster, everywhere(cluster, REPLICAS + 2), grow_and_shrink)
    with capsys.disabled():
        print(f"\nfrom 3 to 5 to 2 replicas: {report}")
    check_pauses([pause for _, pause in report.pauses], report)
