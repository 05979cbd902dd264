"""Streams of HTTP/2 that are opened and reset, on successive connections: the service ends each connection after some streams.

100,000 streams of many clients cost the device next to nothing. A single client can reset only few streams, and delays no other client.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from socket import SHUT_WR, create_connection
from urllib.parse import urlsplit

import pytest

from loadtest.oip_requests import PATH
from service.frontend.http2.floods import HOLD_SECONDS, RESETS, RESETS_PER_SECOND, WINDOW_SECONDS
from service.frontend.oip.protobuf import METHODS
from tests import models
from tests.frontend.http2 import peer
from tests.long.fuzz.wire import grpc
from tests.long.others import ROWS_AT_ONCE, UsualClients, on_planted_device
from tests.serving import LIMIT_SECONDS, Server, eventually, serving

STREAMS = 100_000
BURST = 2_000
"""Streams of one connection: more than the service allows at once."""
SOURCES = [f"127.0.2.{number}" for number in range(1, 251)]
"""Addresses of the clients. The service holds a client that connects again, so each address has one connection or two."""
ATTEMPTS, ROUNDS, PHASE_SECONDS = 3, 3, 8.0
FIRST_RESETS = 1_300
"""Resets that the service allows on one connection: its burst, and some more per second."""
MOST_RATIO = 1.5
"""How many times as long half of the usual requests may take."""
FIELDS = ((b"te", b"trailers"), (b"content-type", b"application/grpc"))


def message() -> bytes:
    request = METHODS["ModelInfer"].request_type(model_name="sensors", raw_input_contents=[struct.pack("<6f", *range(6))])
    request.inputs.add(name="inputs", datatype="FP32", shape=[2, 3])
    serialised: bytes = request.SerializeToString()
    return struct.pack(">BI", 0, len(serialised)) + serialised


HEAD, DATA = peer.block(*FIELDS, path=PATH.encode()), message()


def opened(stream: int) -> bytes:
    """Return a stream that is reset before its message."""
    return peer.frame(peer.HEADERS, peer.END_HEADERS, stream, HEAD) + peer.reset(stream)


def asked(stream: int) -> bytes:
    """Return a stream that is reset once its request is complete."""
    call = peer.frame(peer.HEADERS, peer.END_HEADERS, stream, HEAD) + peer.frame(peer.DATA, peer.END_STREAM, stream, DATA)
    return call + peer.reset(stream)


class Resets:
    """Clients that connect again whenever the service ends their connection. streams: number of streams that the service has handled."""

    def __init__(self, server: Server, make: Callable[[int], bytes], sources: Sequence[str]) -> None:
        """sources: addresses of the clients, which take turns."""
        self._address = urlsplit(f"//{server.grpc}")
        self._data = peer.PREFACE + peer.settings() + b"".join(map(make, range(1, 2 * BURST, 2)))
        self._sources = cycle(sources)
        self._ended = threading.Event()
        self.streams = self.connections = 0
        self.seconds = 0.0

    def send(self, most: float = math.inf) -> None:
        """Send until the service has handled `most` streams, or until the end of `running`."""
        began = time.monotonic()
        while self.streams < most and not self._ended.is_set():
            self._connect()
        self.seconds += time.monotonic() - began

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send during the context."""
        self._ended.clear()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.send)
            try:
                yield
            finally:
                self._ended.set()
                sending.result()

    def _connect(self) -> None:
        self.connections += 1
        received, address = b"", (self._address.hostname, self._address.port or 0)
        with (
            create_connection(address, LIMIT_SECONDS, source_address=(next(self._sources), 0)) as client,
            suppress(OSError),
        ):
            client.sendall(self._data)
            client.shutdown(SHUT_WR)
            while part := client.recv(1 << 16):
                received += part
        self.streams += handled(received)

    def __str__(self) -> str:
        return f"{self.streams} streams on {self.connections} connections in {self.seconds:.1f} s"


def handled(received: bytes) -> int:
    """Return how many streams a service has handled: its GOAWAY names the last stream."""
    last = [struct.unpack(">I", frame.payload[:4])[0] for frame in grpc.frames_of(received) if frame.kind == peer.GOAWAY]
    return (last[0] + 1) // 2 if last else BURST


def rows(server: Server) -> float:
    """Return the sequences of `sensors` that the device has run: no other test of this file uses the model."""
    return server.metric("seqserve_batch_sequences_sum", model="sensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.words(root)
    models.sensors(root, hidden=8)
    return root


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(folder, tmp_path_factory.mktemp("log"), idle_seconds="600") as running:
        yield running


def rows_of_resets(server: Server, make: Callable[[int], bytes], show: Callable[[object], None]) -> float:
    """Return how many sequences the device runs for STREAMS streams."""
    resets, before = Resets(server, make, SOURCES), rows(server)
    resets.send(STREAMS)
    eventually(lambda: server.metric("seqserve_requests_in_flight") == 0)
    show(f"{resets}: {rows(server) - before:.0f} rows")
    return rows(server) - before


@pytest.mark.parametrize("make, share", [(opened, 0.0), (asked, 0.01)])
def test_streams_that_are_reset_cost_the_device_next_to_nothing(
    server: Server, make: Callable[[int], bytes], share: float, show: Callable[[object], None]
) -> None:
    """A request that is complete runs if it reaches the engine before its reset arrives: a read may end between the two.

    Reads are shorter while other processes take the cores, so the least of ATTEMPTS counts.
    """
    assert any(rows_of_resets(server, make, show) <= share * STREAMS for _ in range(ATTEMPTS))
    assert server.infer("words", ["how far"]).status_code == 200


def most_streams(resets: Resets) -> float:
    """Return how many streams the service may handle for one client in the time that it sent."""
    floods = 1 + resets.seconds / (HOLD_SECONDS + WINDOW_SECONDS)
    again = RESETS + RESETS_PER_SECOND * resets.seconds + resets.connections
    return FIRST_RESETS * floods + again


def test_client_that_resets_and_connects_again_delays_nobody(tmp_path: Path, show: Callable[[object], None]) -> None:
    with on_planted_device("slow-device", tmp_path, max_batch_sequences=str(ROWS_AT_ONCE)) as server:
        usual, resets = UsualClients.of(server, PHASE_SECONDS), Resets(server, opened, ["127.0.0.1"])
        comparison = usual.compare(resets.running, ROUNDS)
        show(f"{comparison}\n{resets}")
        assert not comparison.failures
        assert resets.connections <= 2 * ROUNDS + resets.seconds / HOLD_SECONDS
        assert resets.streams <= most_streams(resets)
        assert comparison.holds(MOST_RATIO)
