"""Connections end at their longest age and at SIGTERM, so that clients connect again, and nothing on them is lost."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect

from service.frontend import connection_guard
from tests.frontend.in_process import InProcess, in_process
from tests.serving import LIMIT_SECONDS, eventually

AGE = 0.4
SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def aging(heads_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_guard, "REPLICA_CONNECTION_SECONDS", AGE)
        with in_process(heads_folder, tmp_path_factory.mktemp("log"), replicated=True) as running:
            yield running


def opened(aging: InProcess) -> socket.socket:
    address = urlsplit(aging.address)
    return socket.create_connection((address.hostname, address.port), LIMIT_SECONDS)


def message(path: str) -> bytes:
    """Return a request for the hot path or for the general path."""
    if path != "/infer":
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    body = b'{"model": "accumulator", "inputs": [[1]]}'
    return b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def reply(client: socket.socket) -> bytes:
    """Return one reply, or nothing at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part:
            return data
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < size:
        body += client.recv(1 << 16)
    return head.lower() + b"\r\n\r\n" + body


@contextmanager
def grown_old(aging: InProcess, path: str) -> Iterator[socket.socket]:
    """A connection with one reply, older than AGE. On a busy machine the reply may come so late that the connection closes with it."""

    def with_reply() -> socket.socket | None:
        client = opened(aging)
        client.sendall(message(path))
        if b"connection: close" not in reply(client):
            return client
        client.close()
        return None

    with eventually(with_reply) as client:
        time.sleep(AGE * 1.2)
        yield client


@pytest.mark.parametrize("path", ["/infer", "/healthz"])
def test_old_connection_closes_after_a_reply(aging: InProcess, path: str) -> None:
    with grown_old(aging, path) as client:
        client.sendall(message(path))
        last = reply(client)
        assert last.startswith(b"http/1.1 200") and b"connection: close" in last
        assert reply(client) == b""


@pytest.mark.parametrize("path", ["/infer", "/healthz"])
def test_request_that_has_arrived_keeps_an_old_connection(aging: InProcess, path: str) -> None:
    with grown_old(aging, path) as client:
        client.sendall(message("/infer") + message(path))
        data = b""
        while part := client.recv(1 << 16):
            data += part
        assert data.lower().count(b"http/1.1 200") == 2 and data.lower().count(b"connection: close") == 1


class StreamCall:
    """A ModelStreamInfer call with one sequence."""

    def __init__(self, channel: grpc.Channel) -> None:
        method = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        self.steps = 0
        self._requests: queue.Queue[Any] = queue.Queue()
        self._answers = method(iter(self._requests.get, None), metadata=[("x-session-id", "a")], wait_for_ready=True)

    def chunk(self) -> None:
        """Send a chunk of one step, and read its answer."""
        request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\2\0\0\0"])
        request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
        request.parameters["sequence_start"].bool_param = self.steps == 0
        self._requests.put(request)
        answer = next(self._answers)
        assert not answer.error_message
        self.steps += 1
        assert answer.infer_response.parameters["sequence_steps"].int64_param == self.steps

    def close(self) -> None:
        self._requests.put(None)


def test_streams_outlive_the_age(aging: InProcess) -> None:
    url = aging.address.replace("http", "ws") + "/stream?model=accumulator"
    with connect(url, proxy=None) as stream, grpc.insecure_channel(aging.grpc) as channel:
        call, until, sent = StreamCall(channel), time.monotonic() + 3 * AGE, 0
        while time.monotonic() < until:
            stream.send('{"input": [1]}')
            sent += 1
            assert json.loads(stream.recv(timeout=60))["session"]["steps"] == sent
            call.chunk()
            time.sleep(0.05)
        call.close()


def test_drain_ends_connections_after_their_replies(heads_folder: Path, tmp_path: Path) -> None:
    """A stream continues, an HTTP connection closes after its reply, and a gRPC client connects again."""
    with in_process(heads_folder, tmp_path) as service, opened(service) as client:
        client.sendall(message("/infer"))
        assert b"connection: close" not in reply(client)
        with grpc.insecure_channel(service.grpc) as channel:
            states: list[grpc.ChannelConnectivity] = []
            channel.subscribe(states.append)
            call = StreamCall(channel)
            call.chunk()
            service.call(lambda: setattr(service.frontend, "draining", True))  # as the supervisor asks at SIGTERM
            client.sendall(message("/infer"))
            assert b"connection: close" in reply(client)
            eventually(lambda: states and states[-1] is grpc.ChannelConnectivity.IDLE)
            for _ in range(20):
                call.chunk()
            call.close()
