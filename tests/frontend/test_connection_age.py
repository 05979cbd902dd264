"""Connections end at their longest age and at SIGTERM, so that clients connect again, and nothing on them is lost."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.frontend import connection_guard
from service.frontend.oip.protobuf import METHODS
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.messages import ids
from tests.frontend.ports import hot
from tests.frontend.test_hot_path import count_replies
from tests.raw_websocket import connection
from tests.serving import eventually

HOT, GENERAL = hot(b'{"model": "accumulator", "inputs": [[1]]}'), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CLOSES = b"connection: close"


@pytest.fixture
def service(heads_folder: Path, tmp_path: Path) -> Iterator[InProcess]:
    with in_process(heads_folder, tmp_path, replicated=True) as running:
        yield running


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
        requests: queue.Queue[Any] = queue.Queue()
        method = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = method(iter(requests.get, None), metadata=[("x-session-id", "a")], wait_for_ready=True)
        requests.put(ids(b"\2\0\0\0", "accumulator", parameters={"sequence_start": {"bool_param": True}}).SerializeToString())
        assert next(answers)
        service.call(lambda: setattr(service.frontend, "draining", True))  # as the supervisor asks at SIGTERM
        assert CLOSES in replies(client, HOT, 1)
        eventually(lambda: states and states[-1] is grpc.ChannelConnectivity.IDLE)
        for steps in range(2, 7):
            requests.put(ids(b"\2\0\0\0", "accumulator").SerializeToString())
            answer = METHODS["ModelStreamInfer"].response_type.FromString(next(answers))
            assert answer.infer_response.parameters["sequence_steps"].int64_param == steps
        requests.put(None)
