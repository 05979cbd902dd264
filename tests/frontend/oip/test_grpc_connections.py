"""Connections to the gRPC port of a running server: hostile clients, limits, and the addresses that it listens on."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from service.frontend.oip.protobuf import METHODS
from tests.frontend.http2.peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    block,
    frame,
    request,
    settings,
    window,
)
from tests.planted import constants
from tests.serving import LIMIT_SECONDS, Server, check_unharmed, eventually, serving

MAX_CONNECTIONS = 20
GOING_AWAY = frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4))
Connect = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def served(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits, folder = {"service.frontend.connection_guard.RECEIVE_SECONDS": 1}, tmp_path_factory.mktemp("log")
    with constants(limits), serving(models_folder, folder, max_connections=str(MAX_CONNECTIONS)) as running:
        yield running


def connect(server: Server) -> socket.socket:
    host, port = server.grpc.rsplit(":", 1)
    client = socket.create_connection((host, int(port)), LIMIT_SECONDS)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def infer(server: Server) -> int:
    """Return the number of outputs of a call on a new connection."""
    with triton.InferenceServerClient(server.grpc) as client:
        rows = triton.InferInput("inputs", [1, 2, 3], "FP32").set_data_from_numpy(np.ones((1, 2, 3), np.float32))
        return len(client.infer("sensors", [rows]).get_response().outputs)


def read_to_end(client: socket.socket, data: bytes = b"") -> list[tuple[int, bytes]]:
    """Return the types and payloads of all frames until the server closes the connection. data: bytes that were read before."""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass  # the server closed it while this client still sent
    frames = []
    while len(data) >= 9:
        upper, lower, kind, _, _ = struct.unpack_from(">BHBBI", data)
        end = 9 + (upper << 16 | lower)
        frames.append((kind, data[9:end]))
        data = data[end:]
    return frames


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        PREFACE + frame(99, 0, 0),
        PREFACE + settings() + frame(0, 0, 1, b"x"),
        PREFACE + settings() + frame(HEADERS, END_HEADERS, 1, b"\xff" * 100),
    ],
)
def test_invalid_bytes_end_the_connection_and_are_counted(served: Server, data: bytes) -> None:
    before = served.metric("seqserve_connections_closed_total", reason="invalid_request")
    with closing(connect(served)) as client:
        client.sendall(data)
        kind, payload = read_to_end(client)[-1]
    assert kind == GOAWAY and struct.unpack_from(">I", payload, 4)[0] != 0
    assert served.metric("seqserve_connections_closed_total", reason="invalid_request") == before + 1
    assert infer(served) == 3
    check_unharmed(served)


@pytest.mark.parametrize("data", [b"", PREFACE[:9], PREFACE + settings() + request(1)[:12]])
def test_client_that_stops_in_the_middle_is_disconnected(served: Server, data: bytes) -> None:
    with closing(connect(served)) as client:
        client.sendall(data)
        assert read_to_end(client)[-1][0] == GOAWAY
    assert served.metric("seqserve_connections_closed_total", reason="slow_request") >= 1


def test_idle_connections_make_room(served: Server) -> None:
    """Connections of HTTP and of gRPC count together. Idle connections close for new connections."""
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connect(served))) for _ in range(2 * MAX_CONNECTIONS)]
        for client in clients:
            with suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(PREFACE + settings())
        assert infer(served) == 3
        assert served.metric("seqserve_connections_closed_total", reason="too_many") >= MAX_CONNECTIONS
        assert read_to_end(clients[0])


def test_flood_of_requests_does_not_keep_others_waiting(served: Server) -> None:
    """A client sends calls that fail as fast as it can, and resets them. Another client gets its answers meanwhile."""
    fields = block((b"content-type", b"application/grpc"), path=b"/inference.GRPCInferenceService/ModelInfer")
    ids = range(1, 40_000, 2)
    burst = b"".join(frame(HEADERS, END_HEADERS, id, fields) + frame(RST_STREAM, 0, id, bytes(4)) for id in ids)
    with closing(connect(served)) as client:
        client.sendall(PREFACE + settings())
        with suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(burst)
        assert infer(served) == 3
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 0, 5)
    check_unharmed(served)


def test_calls_on_one_connection_survive_another_that_breaks_the_protocol(served: Server) -> None:
    with grpc.insecure_channel(served.grpc) as channel, closing(connect(served)) as hostile:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        assert ready(b"", timeout=60)
        hostile.sendall(PREFACE + settings() + frame(0, 0, 0, b"x"))
        assert read_to_end(hostile)[-1][0] == GOAWAY
        assert ready(b"", timeout=60)


# Shutdown.


def test_reply_that_waits_for_its_client_survives_the_shutdown(models_folder: Path, tmp_path: Path) -> None:
    """The client opens the window of its call only after the server's GOAWAY."""
    message = METHODS["ModelInfer"].request_type(model_name="sensors", raw_input_contents=[bytes(12)])
    message.inputs.add(name="inputs", datatype="FP32", shape=[1, 1, 3])
    data = message.SerializeToString()
    fields = block((b"content-type", b"application/grpc"), path=b"/inference.GRPCInferenceService/ModelInfer")
    call = frame(HEADERS, END_HEADERS, 1, fields) + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(data)) + data)
    with serving(models_folder, tmp_path, lame_duck_seconds="0.1") as server, closing(connect(server)) as client:
        client.sendall(PREFACE + settings((4, 10)) + call)
        eventually(lambda: server.metric("seqserve_requests_total", outcome="ok") == 1)
        server.process.terminate()
        received = b""
        while GOING_AWAY not in received:
            received += client.recv(1 << 16)
        client.sendall(window(1, 1 << 20))
        frames = read_to_end(client, received)
        assert server.process.wait(LIMIT_SECONDS) == 0
    reply = b"".join(payload for kind, payload in frames if kind == DATA)
    assert struct.unpack(">BI", reply[:5]) == (0, len(reply) - 5)
    assert b"grpc-status\x010" in [payload for kind, payload in frames if kind == HEADERS][-1]
