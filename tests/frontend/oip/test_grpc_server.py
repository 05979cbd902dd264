"""The gRPC port: health, reflection, hostile clients, limits, and what a shutdown answers. tests/long/test_grpc_stops.py ends processes."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from service.frontend import connection_guard
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
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.test_grpc import SERVICE, call, raw, stream_of
from tests.serving import LIMIT_SECONDS, check_unharmed, eventually

NAME, HEALTH, REFLECTION = SERVICE[1:], "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
MAX_CONNECTIONS = 20
GREETING = PREFACE + settings()
GOING_AWAY = frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4))
ONE_ROW = raw("inputs", "FP32", [1, 1, 3], bytes(12))
CALL = block((b"content-type", b"application/grpc"), path=f"{SERVICE}/ModelInfer".encode())


@pytest.fixture(scope="module")
def channel(heads: InProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(heads.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def limited(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_guard, "RECEIVE_SECONDS", 1)
        with in_process(models_folder, tmp_path_factory.mktemp("log"), max_connections=MAX_CONNECTIONS) as running:
            yield running


# Health and reflection.


def status(channel: grpc.Channel, service: str = "") -> str:
    answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def test_health_of_server_and_service(heads: InProcess, channel: grpc.Channel) -> None:
    assert status(channel) == status(channel, NAME) == "SERVING"
    with pytest.raises(grpc.RpcError) as unknown:
        status(channel, "nobody")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    since = heads.log_bytes
    for method in ("Check", "Watch"):
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.unary_stream(f"/{HEALTH}/{method}")(b"\xff\xff", timeout=60))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not heads.events("bug", since=since)


def test_reflection_describes_every_service(channel: grpc.Channel) -> None:
    def reflect(**request: str) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        [answer] = ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=10)
        return answer

    listed = [service.name for service in reflect(list_services="").list_services_response.service]
    assert listed == [HEALTH, REFLECTION, NAME]
    pool = DescriptorPool()
    for name in listed:
        for file in reflect(file_containing_symbol=name).file_descriptor_response.file_descriptor_proto:
            pool.Add(FileDescriptorProto.FromString(file))
        assert pool.FindServiceByName(name).methods
    assert reflect(file_containing_symbol="inference.Nothing").error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# Connections.


def connect(service: InProcess) -> socket.socket:
    host, port = service.grpc.rsplit(":", 1)
    client = socket.create_connection((host, int(port)), LIMIT_SECONDS)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def infer(service: InProcess) -> int:
    """Return the number of outputs of a call on a new connection."""
    with grpc.insecure_channel(service.grpc) as channel:
        return len(call(channel, ONE_ROW).outputs)


def read_to_end(client: socket.socket, data: bytes = b"") -> list[tuple[int, bytes]]:
    """Return the types and payloads of all frames until the server closes the connection. data: bytes that were read before."""
    with suppress(ConnectionResetError):  # the server closed it while this client still sent
        while part := client.recv(1 << 16):
            data += part
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
        GREETING + frame(0, 0, 1, b"x"),
        GREETING + frame(HEADERS, END_HEADERS, 1, b"\xff" * 100),
    ],
)
def test_invalid_bytes_end_the_connection_and_are_counted(limited: InProcess, data: bytes) -> None:
    """Calls on another connection go on."""
    before = limited.metric("seqserve_connections_closed_total", reason="invalid_request")
    with grpc.insecure_channel(limited.grpc) as other, closing(connect(limited)) as client:
        ready = other.unary_unary(f"{SERVICE}/ServerReady")
        assert ready(b"", timeout=60)
        client.sendall(data)
        kind, payload = read_to_end(client)[-1]
        assert ready(b"", timeout=60)
    assert kind == GOAWAY and struct.unpack_from(">I", payload, 4)[0] != 0
    assert limited.metric("seqserve_connections_closed_total", reason="invalid_request") == before + 1
    check_unharmed(limited)


def test_clients_that_stop_in_the_middle_are_disconnected(limited: InProcess) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connect(limited))) for _ in range(3)]
        for client, data in zip(clients, (b"", PREFACE[:9], GREETING + request(1)[:12]), strict=True):
            client.sendall(data)
        assert [read_to_end(client)[-1][0] for client in clients] == [GOAWAY] * 3
    assert limited.metric("seqserve_connections_closed_total", reason="slow_request") >= 3


def test_idle_connections_make_room(limited: InProcess) -> None:
    """Connections of HTTP and of gRPC count together. Idle connections close for new connections."""
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(connect(limited))) for _ in range(2 * MAX_CONNECTIONS)]
        for client in clients:
            with suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(GREETING)
        assert infer(limited) == 3
        assert limited.metric("seqserve_connections_closed_total", reason="too_many") >= MAX_CONNECTIONS
        assert read_to_end(clients[0])


def test_flood_of_requests_does_not_keep_others_waiting(limited: InProcess) -> None:
    """A client sends calls that fail as fast as it can, and resets them. Another client gets its answers meanwhile."""
    ids = range(1, 10_000, 2)
    burst = b"".join(frame(HEADERS, END_HEADERS, id, CALL) + frame(RST_STREAM, 0, id, bytes(4)) for id in ids)
    with closing(connect(limited)) as client:
        client.sendall(GREETING)
        with suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(burst)
        assert infer(limited) == 3
    eventually(lambda: limited.metric("seqserve_requests_in_flight") == 0)
    check_unharmed(limited)


# Shutdown.


def test_shutdown_answers_open_calls(models_folder: Path, tmp_path: Path) -> None:
    """A client that only watches the health does not delay it. A stream ends after its last reply."""
    hold = threading.Event()

    def requests() -> Iterator[Any]:
        yield from [ONE_ROW] * 3
        hold.wait(LIMIT_SECONDS)

    with in_process(models_folder, tmp_path) as service, grpc.insecure_channel(service.grpc) as channel:
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with service.held() as engine:
            single = channel.unary_unary(f"{SERVICE}/ModelInfer").future(ONE_ROW.SerializeToString(), timeout=60)
            answers = stream_of(channel, requests())
            eventually(lambda: len(engine.waiting) == 4)
            service.begin_to_stop()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        replies = [next(answers) for _ in range(3)]
        with pytest.raises(grpc.RpcError, match="the service is shutting down") as ended:
            next(answers)
        hold.set()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert single.result() and [reply.infer_response.id for reply in replies] == ["mine"] * 3
        service.stop()
        assert not service.events("bug") + service.events("library warning")


def test_calls_longer_than_the_drain_are_cut_off(models_folder: Path, tmp_path: Path) -> None:
    with (
        in_process(models_folder, tmp_path, drain_seconds=0.2) as service,
        grpc.insecure_channel(service.grpc) as channel,
        service.held() as engine,
    ):
        calls = [channel.unary_unary(f"{SERVICE}/ModelInfer").future(ONE_ROW.SerializeToString()) for _ in range(3)]
        eventually(lambda: len(engine.waiting) == 3)
        service.stop()
        assert [call.exception(LIMIT_SECONDS).code() for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 3
        assert not service.events("bug") + service.events("library warning")


def test_reply_that_waits_for_its_client_survives_the_shutdown(models_folder: Path, tmp_path: Path) -> None:
    """The client opens the window of its call only after the server's GOAWAY."""
    data = ONE_ROW.SerializeToString()
    sent = frame(HEADERS, END_HEADERS, 1, CALL) + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(data)) + data)
    with in_process(models_folder, tmp_path) as service, closing(connect(service)) as client:
        client.sendall(PREFACE + settings((4, 10)) + sent)
        eventually(lambda: service.metric("seqserve_requests_total", outcome="ok") == 1)
        service.begin_to_stop()
        received = b""
        while GOING_AWAY not in received:
            received += client.recv(1 << 16)
        client.sendall(window(1, 1 << 20))
        frames = read_to_end(client, received)
    reply = b"".join(payload for kind, payload in frames if kind == DATA)
    assert struct.unpack(">BI", reply[:5]) == (0, len(reply) - 5)
    assert b"grpc-status\x010" in [payload for kind, payload in frames if kind == HEADERS][-1]
