"""A new replica gets its share of the clients that keep their connections. `make test-all` runs this folder.

The balancer knows only connections, as a Service of Kubernetes does: HAProxy in TCP mode places each new connection on the next replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.servers import free_port
from loadtest.target import Target
from tests import models, proxies
from tests.callers import Caller
from tests.cluster.replicas import Cluster, Replica, clustered
from tests.serving import eventually

BALANCER = """
global
    nbthread 1
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
listen connections
    bind 127.0.0.1:{port}
    balance roundrobin
    option httpchk GET /readyz
    default-server check inter 200ms fall 1 rise 1
{servers}
"""
CONNECTIONS = 16
PAUSE_SECONDS = 0.02
WINDOW_SECONDS = 2.0
GOAL_SECONDS = 30.0
BODY = b'{"model": "accumulator", "inputs": [[2]]}'


@contextmanager
def balanced(cluster: Cluster, scratch: Path) -> Iterator[str]:
    """Run the balancer, and yield its address."""
    port = free_port()
    servers = "\n".join(f"    server s{number} {host}:{cluster.port}" for number, host in enumerate(cluster.hosts[:3]))
    file = scratch / "balancer.cfg"
    file.write_text(BALANCER.format(port=port, servers=servers))
    with proxies.running("haproxy", proxies.arguments("haproxy", file), port, scratch):
        # At first the balancer takes every replica for ready.
        eventually(lambda: "connections/s2 is DOWN" in (scratch / "haproxy.log").read_text())
        yield f"http://127.0.0.1:{port}"


class Clients:
    """Clients that send requests on kept-alive connections, and count their answers."""

    def __init__(self, address: str) -> None:
        self._target = Target.of(address, "/infer")
        self.statuses: Counter[str] = Counter()

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CONNECTIONS)))

    async def _client(self) -> None:
        request, caller = self._target.request(BODY), await Caller.connect(self._target)
        try:
            while True:
                try:
                    if not caller.connected:
                        caller = await Caller.connect(self._target)
                    reply = await caller.ask(request)
                    self.statuses[str(reply.status)] += 1
                except OSError as error:
                    self.statuses[type(error).__name__] += 1
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            caller.hang_up()


def answers(replicas: list[Replica]) -> list[float]:
    return [replica.metric("seqserve_requests_total", outcome="ok") for replica in replicas]


async def share_of_last(replicas: list[Replica]) -> float:
    """Return the newest replica's share of the answers of the next WINDOW_SECONDS."""
    before = await asyncio.to_thread(answers, replicas)
    await asyncio.sleep(WINDOW_SECONDS)
    counts = [after - start for start, after in zip(before, await asyncio.to_thread(answers, replicas), strict=True)]
    return counts[-1] / sum(counts)


async def seconds_until_share(cluster: Cluster, address: str, share: float, limit_seconds: float) -> tuple[float, Counter[str]]:
    """Return the seconds from the readiness of a third replica until it has a share of the answers, and what the clients got."""
    clients = Clients(address)
    running = asyncio.ensure_future(clients.run())
    await asyncio.sleep(1)
    await asyncio.to_thread(cluster.add)
    ready = time.monotonic()
    seconds = float("inf")
    while time.monotonic() - ready < limit_seconds:
        if await share_of_last(cluster.running) >= share:
            seconds = time.monotonic() - ready
            break
    running.cancel()
    await asyncio.wait([running])
    return seconds, clients.statuses


def test_new_replica_has_its_share_of_kept_connections_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.accumulator(tmp_path / "models")
    with clustered(tmp_path / "models", tmp_path, 2, replicated="1") as cluster, balanced(cluster, tmp_path) as address:
        seconds, statuses = asyncio.run(seconds_until_share(cluster, address, 0.8 / 3, 3 * GOAL_SECONDS))
    with capsys.disabled():
        print(f"\nshare after {seconds:.1f} s, {statuses.total()} requests: {dict(statuses)}")
    assert set(statuses) == {"200"}
    assert seconds < GOAL_SECONDS
