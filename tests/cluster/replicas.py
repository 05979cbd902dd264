"""Replicas of the service: one real server on each address of loopback, all on the same ports, as pods of one service are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from loadtest.servers import free_ports
from tests.serving import Server, alive, eventually

HOSTS = tuple(f"127.0.0.{number}" for number in range(2, 10))
"""Addresses of the replicas, in the order in which they are used."""
EVERYWHERE = "0.0.0.0"
DEFAULTS = {
    "device": "cpu",
    "allowed_hosts": "*",
    "insecure": "1",
    "lame_duck_seconds": "2",
    "drain_seconds": "10",
    "session_idle_seconds": "600",
}
"""Settings of every replica: it answers every client, under any host name. A drain is short, and no session expires while a test waits."""


class Replica(Server):
    """A running server with a separate address, one frontend and one engine."""

    def __init__(self, host: str, port: int, grpc_port: int, models: Path, scratch: Path, **variables: str) -> None:
        self.host = host
        flags = ("--host", host, "--port", str(port), "--grpc-port", str(grpc_port))
        super().__init__(models, scratch, *flags, **(DEFAULTS | variables))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End all processes at once, as if the machine failed."""
        children = {event["pid"] for event in self.events("started")}
        # The supervisor is first: it would start the others again.
        self.process.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        eventually(lambda: not any(map(alive, children)))

    def drain(self) -> None:
        """Send SIGTERM and return at once. The replica ends after its lame duck and its drain."""
        self.process.send_signal(signal.SIGTERM)

    def await_end(self) -> int:
        """Return the exit status of a drained replica."""
        return self.process.wait(60)


class Cluster:
    """Replicas with the same models and settings. A test puts a proxy before `hosts`, some of which may have no replica yet."""

    def __init__(self, models: Path, scratch: Path, **variables: str) -> None:
        """variables: settings of every replica, without the prefix SEQSERVE_."""
        self._models, self._scratch, self._variables = models, scratch, variables
        self.hosts = HOSTS
        self.port, self.grpc_port = free_ports(2, EVERYWHERE)
        self.replicas: list[Replica] = []
        """Every replica that was started, in this order, including those that ended."""

    @property
    def running(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.alive]

    def start(self, count: int, **variables: str) -> list[Replica]:
        """Start replicas at the same time. Returns them when all are ready."""
        first = len(self.replicas)
        with ThreadPoolExecutor(count) as starting:
            started = list(starting.map(lambda host: self._start(host, variables), self.hosts[first : first + count]))
        self.replicas += started
        return started

    def add(self, **variables: str) -> Replica:
        """Start one replica at the next address that was never used. Returns it when it is ready."""
        [replica] = self.start(1, **variables)
        return replica

    def again(self, replica: Replica, **variables: str) -> Replica:
        """Start a new replica at the address of a replica that ended."""
        started = self._start(replica.host, variables)
        self.replicas.append(started)
        return started

    def close(self) -> None:
        """End every replica and print the logs, which pytest shows for a failed test."""
        for replica in self.running:
            replica.process.send_signal(signal.SIGINT)
        for replica in self.replicas:
            try:
                replica.stop(signal.SIGINT)
            finally:
                print(f"{replica.host}:\n{replica.log_file.read_text()}")

    def _start(self, host: str, variables: dict[str, str]) -> Replica:
        return Replica(host, self.port, self.grpc_port, self._models, self._scratch, **(self._variables | variables))


@contextmanager
def clustered(models: Path, scratch: Path, count: int = 3, **variables: str) -> Iterator[Cluster]:
    """Run a cluster of `count` replicas until the end of the block."""
    cluster = Cluster(models, scratch, **variables)
    try:
        cluster.start(count)
        yield cluster
    finally:
        cluster.close()
