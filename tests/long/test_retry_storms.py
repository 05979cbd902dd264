"""Clients retry at once while one of three replicas is dead: they hardly add to the load, and the service recovers soon after its return.

`make test-all` runs it. The device is planted as in test_overload.py. The clients are gRPC's own, which spread their calls over the
replicas and repeat a refused call at another replica.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest

from loadtest import oip_requests
from tests import planted
from tests.cluster.replicas import Replica, clustered
from tests.long.overload import Overload, grpc_request
from tests.retries import RETRIES
from tests.serving import eventually

REPLICAS = 3
LOAD = 0.85
"""The load, as a share of the capacity of all replicas. It exceeds the capacity of two replicas."""
MOST_AMPLIFICATION = 1.1
RECOVERY_SECONDS = 5.0
"""Time after the return of the replica within which as many requests are answered as before its end."""
LEAST_RECOVERED = 0.95
"""Least part of the earlier share of answered requests. Other processes may take the cores for a moment."""
WATCHED_SECONDS, DEAD_SECONDS = 5.0, 10.0
"""How long the answers are counted before the end of the replica and after the recovery, and how long it is missing at least."""
CONNECTED_SECONDS = 2.0
"""After this time the clients have connected to all replicas."""
TIMEOUT_SECONDS = 5.0
CHANNELS = 4
ROWS = [[0.1, 0.2, 0.3]] * 4
CLIENTS = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}, **RETRIES}
"""Service configuration of the clients: the next attempt goes to the next replica, and no attempt to a replica that is not ready."""
OPTIONS = [
    ("grpc.service_config", json.dumps(CLIENTS)),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@dataclass
class Clients:
    """An open loop of calls, each with the time at which it was due and whether it was answered."""

    request: bytes
    rate: float
    calls: list[tuple[float, bool]] = field(default_factory=list)
    sent: int = 0

    @contextmanager
    def sending(self, target: str) -> Iterator[None]:
        """Send within the context. Then wait for the calls that are open."""
        ended = threading.Event()
        with ExitStack() as channels, ThreadPoolExecutor(1) as pool:
            methods = [
                channels.enter_context(grpc.insecure_channel(target, options=OPTIONS)).unary_unary(oip_requests.PATH)
                for _ in range(CHANNELS)
            ]
            sender = pool.submit(self._send, methods, ended)
            try:
                yield
            finally:
                ended.set()
                sender.result()
                eventually(lambda: len(self.calls) == self.sent)

    def _send(self, methods: list[grpc.UnaryUnaryMultiCallable], ended: threading.Event) -> None:
        due = time.monotonic()
        while not ended.wait(max(0.0, due - time.monotonic())):
            method = methods[self.sent % len(methods)]
            method.future(self.request, timeout=TIMEOUT_SECONDS).add_done_callback(partial(self._end, due))
            self.sent += 1
            due += 1 / self.rate

    def _end(self, due: float, call: grpc.Future) -> None:
        self.calls.append((due, call.exception() is None))

    def answered(self, begin: float, end: float) -> float:
        """Return the share of the calls due between two times that were answered."""
        answered = [answered for due, answered in self.calls if begin <= due < end]
        return sum(answered) / len(answered)


def test_clients_that_retry_at_once_hardly_add_to_the_load(
    folder: Path, tmp_path: Path, show: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def received(*replicas: Replica) -> float:
        """Return how many attempts these replicas have received."""
        return sum(replica.metric("seqserve_requests_accepted_total") for replica in replicas)

    planted.plant("slow-device", monkeypatch)
    limits = {"max_batch_sequences": "4", "max_waiting": "16", "max_inputs": "16"}
    with clustered(folder, tmp_path, REPLICAS, **limits) as cluster:
        first, *others = cluster.replicas
        capacity = Overload.of(first, "grpc", "sensors", ROWS).capacity(WATCHED_SECONDS)
        clients = Clients(grpc_request(first, "sensors", ROWS), LOAD * REPLICAS * capacity)
        with clients.sending("ipv4:" + ",".join(replica.grpc for replica in cluster.replicas)):
            time.sleep(CONNECTED_SECONDS)
            began = time.monotonic()
            time.sleep(WATCHED_SECONDS)
            killed = time.monotonic()
            first.kill()
            sent, attempts = clients.sent, received(*others)
            time.sleep(DEAD_SECONDS)
            again = cluster.again(first)
            time.sleep(RECOVERY_SECONDS)
            sent, attempts = clients.sent - sent, received(*others, again) - attempts
            recovered = time.monotonic()
            time.sleep(WATCHED_SECONDS)
            ended = time.monotonic()
        before, after = clients.answered(began, killed), clients.answered(recovered, ended)
        show(
            f"{clients.rate:.0f} calls/s, {attempts / sent:.2f} attempts for each; {before:.1%} answered before and {after:.1%} after"
        )
        assert attempts <= MOST_AMPLIFICATION * sent
        assert after >= LEAST_RECOVERED * before
        assert sum(replica.metric("seqserve_retries_discouraged_total") for replica in cluster.running) > 0
