"""The gRPC door as a house has it: its port, its health, what it says of itself, and how it closes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from tritonclient.grpc import service_pb2

from service.errors import StartError
from service.frontend.oip.grpc_server import GrpcServer
from service.settings import Settings
from tests.serving import Server, eventually, serving
from tests.supervisor.test_processes import start

HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
SERVICE = "inference.GRPCInferenceService"


@pytest.fixture
def own(models_folder: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(models_folder, tmp_path, "--frontends", "2", lame_duck_seconds="0.5") as running:
        yield running


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as made:
        yield made


def rows(steps: int) -> Any:
    """One input for the sensors model."""
    array = np.full((1, steps, 3), 0.1, np.float32)
    return triton.InferInput("inputs", list(array.shape), "FP32").set_data_from_numpy(array)


def listeners(port: int) -> int:
    """Sockets that listen on a port; gRPC's are of IPv6 in any case."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()]
    return sum(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


def status(channel: grpc.Channel, service: str = "") -> str:
    answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


# Health and reflection.


def test_health_is_that_of_the_service(channel: grpc.Channel) -> None:
    assert status(channel) == status(channel, SERVICE) == "SERVING"
    with pytest.raises(grpc.RpcError) as unknown:
        status(channel, "nobody")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    watched = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watched.cancel()


def test_health_turns_when_the_engine_goes_and_when_it_is_back(own: Server) -> None:
    with grpc.insecure_channel(own.grpc) as channel:
        watched = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        subprocess.run(["kill", "-KILL", str(own.pid("engine-0"))], check=True)
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()


def test_reflection_describes_every_service(channel: grpc.Channel) -> None:
    def ask(**asked: str) -> Any:
        [answer] = ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(**asked)]), timeout=10
        )
        return answer

    listed = [one.name for one in ask(list_services="").list_services_response.service]
    assert listed == [HEALTH, REFLECTION, SERVICE]
    pool = DescriptorPool()
    for name in listed:
        for file in ask(file_containing_symbol=name).file_descriptor_response.file_descriptor_proto:
            pool.Add(FileDescriptorProto.FromString(file))
        assert pool.FindServiceByName(name).methods
    assert ask(file_containing_symbol="inference.ModelInferRequest").HasField("file_descriptor_response")
    assert ask(file_containing_symbol="inference.Nothing").error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_what_is_no_method_is_unimplemented(channel: grpc.Channel) -> None:
    for path in (f"/{SERVICE}/Nothing", "/nobody/ModelInfer"):
        with pytest.raises(grpc.RpcError) as unknown:
            channel.unary_unary(path)(b"", timeout=10)
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED


# The port.


def test_fronts_share_the_port_and_a_new_one_takes_its_part(own: Server) -> None:
    port = int(own.grpc.rpartition(":")[2])
    assert listeners(port) == 2
    for gone in ("frontend-0", "frontend-1"):
        subprocess.run(["kill", "-KILL", str(own.pid(gone))], check=True)
        eventually(lambda: listeners(port) == 1, 5)
        eventually(lambda: listeners(port) == 2, 10)
        eventually(own.ready, 10)
        for _ in range(10):
            with triton.InferenceServerClient(own.grpc) as client:
                assert client.infer("sensors", [rows(3)]).as_numpy("label").shape == (1, 1)


def test_a_port_that_is_taken_stops_the_start_and_names_the_way_out(server: Server, models_folder: Path) -> None:
    port = server.grpc.rpartition(":")[2]
    with socket.create_server(("127.0.0.1", 0)) as other:
        for taken in (port, str(other.getsockname()[1])):
            ended = start(models_folder, "--port", "0", "--grpc-port", taken)
            assert ended.returncode == 1
            assert f"cannot listen on 127.0.0.1 port {taken}" in ended.stderr
            assert "--grpc-port" in ended.stderr


def test_a_door_that_cannot_open_says_so() -> None:
    frontend: Any = SimpleNamespace(settings=Settings())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError, match="--grpc-port"):
        asyncio.run(GrpcServer(frontend, f"127.0.0.1:{taken.getsockname()[1]}").open())


def test_one_port_for_both_is_refused(models_folder: Path) -> None:
    ended = start(models_folder, "--port", "9123", "--grpc-port", "9123")
    assert ended.returncode == 2
    assert "port and grpc_port are both 9123" in ended.stderr


def test_a_port_is_free_again_as_soon_as_the_service_has_ended(models_folder: Path, tmp_path: Path) -> None:
    port = ""
    for _ in range(2):
        with serving(models_folder, tmp_path, *(["--grpc-port", port] if port else [])) as running:
            port = running.grpc.rpartition(":")[2]
            with triton.InferenceServerClient(running.grpc) as client:
                client.infer("sensors", [rows(3)])
                assert running.stop() == 0


def test_who_wants_no_grpc_has_none(models_folder: Path, tmp_path: Path) -> None:
    with serving(models_folder, tmp_path, grpc="0") as running:
        assert running.grpc == ""
        assert running.infer("sensors", [[[0.1, 0.2, 0.3]]]).status_code == 200


# The end.


@contextmanager
def ending(server: Server) -> Iterator[None]:
    """Whatever fails, the server ends with the block, and with it those who keep asking."""
    try:
        yield
    finally:
        server.process.terminate()


def test_sigterm_drains_and_nothing_is_lost(own: Server) -> None:
    """A call that was accepted is answered, what was sent on a stream too, and who only watches holds nothing up."""
    answered, stopping = [], threading.Event()

    def keep_asking() -> None:
        with triton.InferenceServerClient(own.grpc) as client:
            while True:
                try:
                    answered.append(client.infer("sensors", [rows(5)]).as_numpy("label").shape)
                except triton.InferenceServerException as fault:
                    # When the lame-duck time is over the port closes; what the server had not handed over is cancelled.
                    assert stopping.is_set() and any(one in str(fault) for one in ("UNAVAILABLE", "CANCELLED")), fault
                    return

    with grpc.insecure_channel(own.grpc) as channel, ThreadPoolExecutor(12) as pool, ending(own):
        watched = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        asking = channel.stream_stream(f"/{REFLECTION}/ServerReflectionInfo")(iter(threading.Event().wait, True))
        askers = [pool.submit(keep_asking) for _ in range(4)]
        eventually(lambda: len(answered) > 20, 20)
        slow = [pool.submit(slow_call, own) for _ in range(5)]
        eventually(lambda: own.metric("seqserve_requests_in_flight") >= 5, 10)
        own.process.terminate()
        began = time.monotonic()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert status(channel) == "NOT_SERVING"
        assert httpx.get(f"{own.address}/readyz", trust_env=False).status_code == 503
        so_far = len(answered)
        eventually(lambda: len(answered) > so_far, 1)
        stopping.set()
        eventually(lambda: listeners(int(own.grpc.rpartition(":")[2])) == 0, 2)
        assert not all(one.done() for one in slow)
        assert all(one.result(30) for one in slow)
        for asker in askers:
            asker.result(30)
        assert own.process.wait(30) == 0
        assert time.monotonic() - began < 15, "nobody waits for those who watch"
        asking.cancel()
    assert set(answered) == {(1, 1)}


def test_what_the_drain_does_not_wait_for_is_cut_off(models_folder: Path, tmp_path: Path) -> None:
    with (
        serving(models_folder, tmp_path, lame_duck_seconds="0.1", drain_seconds="0.2") as short,
        triton.InferenceServerClient(short.grpc) as client,
    ):
        heard: Queue[Any] = Queue()

        def handle_reply(result: Any, error: Any) -> None:
            heard.put(error)

        for _ in range(8):
            client.async_infer("sensors", [rows(200_000)], handle_reply)
        eventually(lambda: short.metric("seqserve_requests_in_flight") == 8, 10)
        began = time.monotonic()
        short.process.terminate()
        assert "UNAVAILABLE" in [str(heard.get(timeout=20)) for _ in range(8)][-1]
        assert short.process.wait(30) == 0
        assert time.monotonic() - began < 5
        assert not short.events("bug") + short.events("server said")


def slow_call(server: Server) -> bool:
    with triton.InferenceServerClient(server.grpc) as client:
        return bool(client.infer("sensors", [rows(200_000)]).as_numpy("label").size)


def test_a_stream_is_told_that_the_service_ends_when_all_is_answered(own: Server) -> None:
    request = service_pb2.ModelInferRequest(model_name="sensors", raw_input_contents=[bytes(12 * 150_000)])
    request.inputs.add(name="inputs", datatype="FP32", shape=[1, 150_000, 3])
    hold = threading.Event()

    def requests() -> Iterator[Any]:
        for number in range(5):
            yield service_pb2.ModelInferRequest(id=str(number)).SerializeToString() + request.SerializeToString()
        hold.wait()

    with grpc.insecure_channel(own.grpc) as channel:
        read = service_pb2.ModelStreamInferResponse.FromString
        answers = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", response_deserializer=read)(requests())
        assert next(answers).infer_response.id == "0"
        own.process.terminate()
        heard: list[str] = []
        with pytest.raises(grpc.RpcError) as ended:
            heard.extend(answer.infer_response.id for answer in iter(lambda: next(answers), None))
        assert (ended.value.code(), ended.value.details()[:17]) == (grpc.StatusCode.UNAVAILABLE, "the service ends:")
        hold.set()
        assert heard == [str(number) for number in range(1, 5)]
        assert own.process.wait(30) == 0
