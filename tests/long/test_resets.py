"""100,000 streams of HTTP/2 that are opened and reset, on one connection after the other: the service ends each after some."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from socket import SHUT_WR, create_connection
from urllib.parse import urlsplit

import pytest

from loadtest.oip_requests import PATH
from service.frontend.oip.protobuf import METHODS
from tests import models
from tests.frontend.http2 import peer
from tests.fuzz.wire import grpc
from tests.serving import LIMIT_SECONDS, Server, eventually, serving

STREAMS = 100_000
BURST = 2_000
"""Streams of one connection: more than the service allows at once."""
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
    """One client, which connects again whenever the service ends its connection. streams: those that the service has handled."""

    def __init__(self, server: Server, make: Callable[[int], bytes]) -> None:
        self._address = urlsplit(f"//{server.grpc}")
        self._data = peer.PREFACE + peer.settings() + b"".join(map(make, range(1, 2 * BURST, 2)))
        self.streams = self.connections = 0

    def send(self, most: int) -> None:
        while self.streams < most:
            self.connections += 1
            received = b""
            with (
                create_connection((self._address.hostname, self._address.port or 0), LIMIT_SECONDS) as client,
                suppress(OSError),
            ):
                client.sendall(self._data)
                client.shutdown(SHUT_WR)
                while part := client.recv(1 << 16):
                    received += part
            self.streams += handled(received)


def handled(received: bytes) -> int:
    """Return how many streams a service has handled: its GOAWAY names the last one."""
    last = [struct.unpack(">I", frame.payload[:4])[0] for frame in grpc.frames_of(received) if frame.kind == peer.GOAWAY]
    return (last[0] + 1) // 2 if last else BURST


def rows(server: Server) -> float:
    """Return the sequences of `sensors` that the device has run: no other test of this file asks for them."""
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


@pytest.mark.parametrize("make, share", [(opened, 0.0), (asked, 0.01)])
def test_streams_that_are_reset_cost_the_device_next_to_nothing(
    server: Server, make: Callable[[int], bytes], share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that is complete runs if it reaches the engine before its reset arrives: a read may end between the two."""
    resets, before = Resets(server, make), rows(server)
    resets.send(STREAMS)
    eventually(lambda: server.metric("seqserve_requests_in_flight") == 0)
    with capsys.disabled():
        print(f"\n{resets.streams} streams on {resets.connections} connections: {rows(server) - before:.0f} rows", end="")
    assert rows(server) - before <= share * STREAMS
    assert server.infer("words", ["how far"]).status_code == 200
