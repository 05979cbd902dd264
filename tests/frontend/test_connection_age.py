"""Connections end at their longest age and at SIGTERM, so that clients connect again, and nothing on them is lost."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from service.frontend import connection_guard
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.ports import hot
from tests.frontend.test_hot_path import count_replies
from tests.raw_websocket import connection
from tests.serving import eventually

CHUNK = '{"input": [1]}'
HOT, GENERAL = hot(b'{"model": "accumulator", "inputs": [[1]]}'), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSES = b"connection: close"


@pytest.fixture
def service(heads_folder: Path, tmp_path: Path) -> Iterator[InProcess]:
    with in_process(heads_folder, tmp_path, replicated=True) as running:
        yield running


class StreamCall:
    """A ModelStreamInfer call with one sequence."""

    def __init__(self, channel: grpc.Channel) -> None:
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        self._steps = 0
        self._requests: queue.Queue[Any] = queue.Queue()
        self._answers = method(iter(self._requests.get, None), metadata=[("x-session-id", "a")], wait_for_ready=True)

    def chunk(self) -> None:
        """Send a chunk of one step, and read its answer."""
        request = service_pb2.ModelInferRequest(model_name="accumulator", raw_input_contents=[b"\2\0\0\0"])
        request.inputs.add(name="ids", datatype="INT32", shape=[1, 1])
        request.parameters["sequence_start"].bool_param = self._steps == 0
        self._requests.put(request)
        self._steps += 1
        assert next(self._answers).infer_response.parameters["sequence_steps"].int64_param == self._steps

    def close(self) -> None:
        self._requests.put(None)


def replies(client: Any, requests: bytes, count: int) -> bytes:
    """Send requests and return their replies, and whatever is sent until the end of a connection that closes."""
    client.sendall(requests)
    data = b""
    while (CLOSES in data.lower() or count_replies(data) < count) and (part := client.recv(1 << 16)):
        data += part
    assert count_replies(data.lower()) == count
    return data.lower()


def test_old_connections_close_after_the_replies_to_what_has_arrived(
    service: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "REPLICA_CONNECTION_SECONDS", -1.0)  # old from the beginning
    for last in (HOT, GENERAL):
        with connection(service) as client:
            assert CLOSES in replies(client, last, 1)
        with connection(service) as client:
            assert replies(client, HOT + last, 2).count(CLOSES) == 1


def test_drain_ends_connections_after_their_replies(service: InProcess) -> None:
    """A stream continues, an HTTP connection closes after its reply, and a gRPC client connects again."""
    with connection(service) as client, grpc.insecure_channel(service.grpc) as channel:
        assert CLOSES not in replies(client, HOT, 1)
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        call = StreamCall(channel)
        call.chunk()
        service.call(lambda: setattr(service.frontend, "draining", True))  # as the supervisor asks at SIGTERM
        assert CLOSES in replies(client, HOT, 1)
        eventually(lambda: states and states[-1] is grpc.ChannelConnectivity.IDLE)
        for _ in range(5):
            call.chunk()
        call.close()
