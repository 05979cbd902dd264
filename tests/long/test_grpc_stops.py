"""The gRPC port of a running service: its health when an engine ends, its frontends, and its shutdown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from tritonclient.grpc import service_pb2

from tests.serving import Server, SharedServer, eventually, serving

HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
SERVICE = "inference.GRPCInferenceService"
DRAIN_SECONDS = 300
LAME_DUCK_SECONDS = 60
"""Long enough for a busy machine to answer the requests that a test sends before the ports close. An interrupt ends it earlier."""


def start(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start a service that is expected to fail. It takes free ports unless the flags name others."""
    command = [sys.executable, "-m", "service", "serve", "--models", str(folder), "--port", "0", "--grpc-port", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables, check=False)


@pytest.fixture(scope="module")
def shared_server(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    variables = {"lame_duck_seconds": str(LAME_DUCK_SECONDS), "drain_seconds": str(DRAIN_SECONDS)}
    # The engine refuses requests that it cannot finish before their deadline: on a busy machine that may be minutes away.
    variables |= dict.fromkeys(("default_deadline_ms", "max_deadline_ms"), str(1000 * DRAIN_SECONDS))
    with closing(SharedServer(models_folder, tmp_path_factory.mktemp("log"), "--frontends", "2", **variables)) as shared:
        yield shared


@pytest.fixture
def own_server(shared_server: SharedServer) -> Iterator[Server]:
    """An idle server, which the test may end."""
    with shared_server.lent() as running:
        yield running


def rows(steps: int) -> Any:
    """Return the input of a request to the sensors model: one sequence."""
    array = np.full((1, steps, 3), 0.1, np.float32)
    return triton.InferInput("inputs", list(array.shape), "FP32").set_data_from_numpy(array)


def listeners(port: int) -> int:
    """Return the number of sockets that listen on a port. gRPC always listens on IPv6."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()]
    return sum(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


def replaced(server: Server, child: str, pid: int) -> bool:
    """Return whether a process has a successor, and the service is ready."""
    return server.pid(child) != pid and server.ready()


def status(channel: grpc.Channel, service: str = "") -> str:
    answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


def test_health_follows_the_engine(own_server: Server) -> None:
    with grpc.insecure_channel(own_server.grpc) as channel:
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        subprocess.run(["kill", "-KILL", str(own_server.pid("engine-0"))], check=True)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


# The port.


def test_frontends_share_the_port_with_their_replacements(own_server: Server) -> None:
    port = int(own_server.grpc.rpartition(":")[2])
    assert listeners(port) == 1
    for name in ("frontend-0", "frontend-1"):
        killed = own_server.pid(name)
        subprocess.run(["kill", "-KILL", str(killed)], check=True)
        eventually(partial(replaced, own_server, name, killed), 10)
        for _ in range(10):
            with triton.InferenceServerClient(own_server.grpc) as client:
                assert client.infer("sensors", [rows(3)]).as_numpy("label").shape == (1, 1)


def test_port_in_use_stops_the_start_and_names_the_flag(server: Server, models_folder: Path) -> None:
    port = server.grpc.rpartition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        for taken in (port, str(busy.getsockname()[1])):
            ended = start(models_folder, "--grpc-port", taken)
            assert ended.returncode == 1
            assert f"cannot listen on 127.0.0.1 port {taken}" in ended.stderr
            assert "--grpc-port" in ended.stderr


# Shutdown.


@contextmanager
def terminated_after(server: Server) -> Iterator[None]:
    """Interrupt the server after the block even if a check fails, so that the client threads end too."""
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGINT)


def test_sigterm_drains_without_loss_and_frees_the_port(own_server: Server) -> None:
    """Accepted calls are answered, also on streams. Clients that only watch the health do not delay the shutdown. The port is free then."""
    answered, port_closing = [], threading.Event()
    text = triton.InferInput("text", [1, 1], "BYTES").set_data_from_numpy(np.array([["how far"]], np.object_))

    def arrived() -> float:
        return own_server.metric("seqserve_stage_seconds_count", model="sensors", stage="channel")

    def keep_calling() -> None:
        with triton.InferenceServerClient(own_server.grpc) as client:
            while True:
                try:
                    answered.append(client.infer("words", [text]).as_numpy("label").shape)
                except triton.InferenceServerException as error:
                    # The port closes after the lame-duck time. gRPC cancels calls that it has not passed to a handler yet.
                    assert port_closing.is_set(), error
                    assert any(status in str(error) for status in ("UNAVAILABLE", "CANCELLED")), error
                    return

    with grpc.insecure_channel(own_server.grpc) as channel, ThreadPoolExecutor(12) as pool, terminated_after(own_server):
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        reflection = channel.stream_stream(f"/{REFLECTION}/ServerReflectionInfo")(iter(threading.Event().wait, True))
        clients = [pool.submit(keep_calling) for _ in range(4)]
        eventually(lambda: len(answered) > 20, 20)
        before = arrived()
        slow = [pool.submit(slow_call, own_server) for _ in range(5)]
        eventually(lambda: arrived() == before + len(slow), 10)
        own_server.process.terminate()
        terminated = time.monotonic()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert status(channel) == "NOT_SERVING"
        assert httpx.get(f"{own_server.address}/readyz", trust_env=False).status_code == 503
        count = len(answered)
        eventually(lambda: len(answered) > count, 1)
        port_closing.set()
        own_server.process.send_signal(signal.SIGINT)
        eventually(lambda: listeners(int(own_server.grpc.rpartition(":")[2])) == 0, 2)
        assert not all(call.done() for call in slow)
        assert all(call.result(DRAIN_SECONDS) for call in slow)
        for client in clients:
            client.result(DRAIN_SECONDS)
        assert own_server.process.wait(DRAIN_SECONDS + 60) == 0
        assert time.monotonic() - terminated < LAME_DUCK_SECONDS + DRAIN_SECONDS, (
            "the service does not wait for clients that watch its health"
        )
        reflection.cancel()
    assert set(answered) == {(1, 1)}
    socket.create_server(("127.0.0.1", int(own_server.grpc.rpartition(":")[2]))).close()


def test_calls_longer_than_the_drain_are_cut_off(models_folder: Path, tmp_path: Path) -> None:
    with (
        serving(models_folder, tmp_path, lame_duck_seconds="0.1", drain_seconds="0.2") as short,
        triton.InferenceServerClient(short.grpc) as client,
    ):
        errors: Queue[Any] = Queue()

        def handle_reply(result: Any, error: Any) -> None:
            errors.put(error)

        os.kill(short.pid("engine-0"), signal.SIGSTOP)  # so that no call ends before the drain
        for _ in range(8):
            client.async_infer("sensors", [rows(1)], handle_reply)
        eventually(lambda: short.metric("seqserve_requests_in_flight") == 8, 10)
        short.process.terminate()
        assert all("UNAVAILABLE" in str(errors.get(timeout=60)) for _ in range(8))
        assert short.process.wait(60) == 0
        assert not short.events("bug") + short.events("library warning")


def slow_call(server: Server) -> bool:
    with triton.InferenceServerClient(server.grpc) as client:
        return bool(client.infer("sensors", [rows(100_000)]).as_numpy("label").size)


def test_stream_ends_with_unavailable_after_its_last_reply(own_server: Server) -> None:
    request = service_pb2.ModelInferRequest(model_name="sensors", raw_input_contents=[bytes(12 * 75_000)])
    request.inputs.add(name="inputs", datatype="FP32", shape=[1, 75_000, 3])
    hold = threading.Event()

    def requests() -> Iterator[Any]:
        for number in range(5):
            yield service_pb2.ModelInferRequest(id=str(number)).SerializeToString() + request.SerializeToString()
        hold.wait()

    with grpc.insecure_channel(own_server.grpc) as channel:
        read = service_pb2.ModelStreamInferResponse.FromString
        answers = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", response_deserializer=read)(requests())
        assert next(answers).infer_response.id == "0"
        own_server.process.send_signal(signal.SIGINT)
        replied: list[str] = []
        with pytest.raises(grpc.RpcError) as ended:
            replied.extend(answer.infer_response.id for answer in iter(lambda: next(answers), None))
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "the service is shutting down" in ended.value.details()
        hold.set()
        assert replied == [str(number) for number in range(1, 5)]
        assert own_server.process.wait(DRAIN_SECONDS + 60) == 0
