"""The gRPC port with the gRPC library's and Triton's clients: methods, streams, health, hostile clients, and the shutdown.

The engine is a stand-in. tests/long/test_triton.py has every option of Triton's client.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from service.frontend.grpc.server import GrpcServer
from service.frontend.guards import connection_guard
from service.frontend.oip.protobuf import METHODS
from tests.frontend.conftest import BODY_BYTES
from tests.frontend.http2 import peer
from tests.frontend.http2.peer import DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, Frames, frame, settings, window
from tests.frontend.in_process import InProcess, in_process
from tests.frontend.oip.messages import tensors, typed, with_parameters
from tests.serving import LIMIT_SECONDS, eventually

SERVICE, HEALTH = "/inference.GRPCInferenceService", "/grpc.health.v1.Health"
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who wrote Faust ?"]
ROWS = np.array([[0.1 * step, -0.5, 1 / step] for step in range(1, 13)], np.float32)
GOING_AWAY = frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4))
CALL = peer.block((b"content-type", b"application/grpc"), path=f"{SERVICE}/ModelInfer".encode())


def rows(data: bytes = bytes(12), model: str = "sensors", **parameters: Any) -> Any:
    """Return a request with one row of three features."""
    return with_parameters(tensors(("inputs", "FP32", [1, 1, 3], data), model=model, id="mine"), **parameters)


@pytest.fixture(scope="module")
def client(heads: InProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(heads.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def channel(heads: InProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(heads.grpc) as channel:
        yield channel


def serialised(message: Any) -> bytes:
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def call(channel: grpc.Channel, message: Any, method: str = "ModelInfer", **options: Any) -> Any:
    """Call a method. A message of type bytes is sent unchanged."""
    answer = METHODS[method].response_type.FromString
    return channel.unary_unary(f"{SERVICE}/{method}", response_deserializer=answer)(serialised(message), timeout=60, **options)


def stream_of(channel: grpc.Channel, requests: Iterable[Any], **options: Any) -> Any:
    """Send all requests, close the sending side, and return the responses."""
    answer = METHODS["ModelStreamInfer"].response_type.FromString
    method = channel.stream_stream(f"{SERVICE}/ModelStreamInfer", serialised, answer)
    return method(iter(requests), timeout=60, **options)


def refusal(channel: grpc.Channel, message: Any, method: str = "ModelInfer", **options: Any) -> tuple[str, str, dict[str, str]]:
    """Return status, details and trailing metadata of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call(channel, message, method, **options)
    error: Any = raised.value
    return error.code().name, error.details(), dict(error.trailing_metadata())


def outcomes(heads: InProcess, outcome: str) -> float:
    return heads.metric("seqserve_requests_total", outcome=outcome)


# Methods.


def test_triton_client_over_grpc(heads: InProcess, client: Any) -> None:
    texts = triton.InferInput("text", [2, 1], "BYTES").set_data_from_numpy(np.array([[text] for text in QUESTIONS], object))
    outputs = [triton.InferRequestedOutput("label"), triton.InferRequestedOutput("scores", class_count=2)]
    answer = client.infer("words", [texts], outputs=outputs, compression_algorithm="gzip")
    expected = [output["label"] for output in heads.infer("words", QUESTIONS).json()["outputs"]]
    assert [output.name for output in answer.get_response().outputs] == ["label", "scores"]
    assert [label.decode() for label in answer.as_numpy("label")[:, 0]] == expected
    assert [line.decode().split(":")[2] for line in answer.as_numpy("scores")[:, 0]] == expected


def test_methods_about_server_and_models_reply_as_over_http(heads: InProcess, client: Any) -> None:
    def http(path: str, message: Any) -> Any:
        return ParseDict(heads.client.get(f"/v2{path}").json(), message)

    assert client.get_server_metadata() == http("", service_pb2.ServerMetadataResponse())
    assert client.get_model_metadata("words", "1") == http("/models/words", service_pb2.ModelMetadataResponse())
    assert client.get_model_config("words", "1").config == http("/models/words/config", model_config_pb2.ModelConfig())
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("words", "1")
    index = ParseDict({"models": heads.client.post("/v2/repository/index").json()}, service_pb2.RepositoryIndexResponse())
    assert client.get_model_repository_index() == index
    heads.infer("tagger", [[1, 2, 3]])
    statistics = client.get_inference_statistics("tagger", "1")
    assert statistics == http("/models/tagger/stats", service_pb2.ModelStatisticsResponse())
    assert statistics.model_stats[0].inference_stats.success.count > 0
    assert not client.is_model_ready("nobody") and not client.is_model_ready("words", "2")
    for method in ("get_model_metadata", "get_model_config", "get_inference_statistics"):
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model nobody"):
            getattr(client, method)("nobody")


def test_models_are_unloaded_and_loaded(client: Any) -> None:
    client.unload_model("halver")
    assert not any(entry.name == "halver" for entry in client.get_model_repository_index().models)
    client.load_model("halver")
    assert client.is_model_ready("halver")
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*copy them to the models folder"):
        client.load_model("halver", config="{}", files={"file:1/model.bin": b"1"})
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.load_model("nobody")


def test_errors_have_a_status_and_metadata(heads: InProcess, channel: grpc.Channel) -> None:
    status, details, trailing = refusal(channel, rows(bytes(13)))
    assert (status, trailing["seqserve-code"], trailing["seqserve-field"]) == ("INVALID_ARGUMENT", "invalid_input", "inputs")
    assert "has 13 bytes" in details
    for method in ("SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"):
        status, details, trailing = refusal(channel, b"", method)
        assert (status, trailing["seqserve-code"]) == ("UNIMPLEMENTED", "unsupported")
        assert "shared memory, trace settings and log settings are not supported" in details
    assert refusal(channel, bytes(1 << 17), "ModelReady")[0] == "RESOURCE_EXHAUSTED", "a message without tensors"
    before = outcomes(heads, "too_large")
    assert f"SEQSERVE_MAX_BODY_BYTES is {BODY_BYTES}" in refusal(channel, rows(bytes(BODY_BYTES)))[1]
    assert "larger than max" in refusal(channel, rows(bytes(8 * BODY_BYTES)), compression=grpc.Compression.Gzip)[1]
    assert outcomes(heads, "too_large") == before + 1


def test_cancelled_calls_and_streams_are_cancelled_in_the_engine(heads: InProcess, channel: grpc.Channel) -> None:
    gone, late = outcomes(heads, "client_gone"), outcomes(heads, "deadline_exceeded")
    with heads.held() as engine:
        cancelled = engine.cancelled
        single = channel.unary_unary(f"{SERVICE}/ModelInfer").future(rows().SerializeToString())
        stream = stream_of(channel, [rows()] * 5)
        eventually(lambda: len(engine.waiting) == 6)
        single.cancel()
        stream.cancel()
        eventually(lambda: engine.cancelled == cancelled + 6)
        status, details, _ = refusal(channel, rows(timeout=50_000))
        assert (status, "allow more time" in details) == ("DEADLINE_EXCEEDED", True)
    eventually(lambda: outcomes(heads, "client_gone") == gone + 6)
    assert outcomes(heads, "deadline_exceeded") == late + 1 and heads.metric("seqserve_requests_in_flight") == 0


# Streams.


def test_sessions_on_one_stream_get_the_outputs_of_the_whole(heads: InProcess, channel: grpc.Channel) -> None:
    """A session that has ended starts again."""
    sequences: dict[int | str, Any] = {1: ROWS, "three": ROWS[::-1] * 2, 2**63 - 1: ROWS * 0}
    outputs = heads.infer("forecaster", [sequence.tolist() for sequence in sequences.values()]).json()["outputs"]
    chunks = [
        rows(values[step].tobytes(), "forecaster", sequence_id=id, sequence_start=step == 0, sequence_end=step == 11)
        for _ in range(2)
        for step in range(12)
        for id, values in sequences.items()
    ]
    replies = [answer.infer_response for answer in stream_of(channel, chunks)]
    steps = [reply.parameters["sequence_steps"].int64_param for reply in replies]
    assert steps == [step for step in range(1, 13) for _ in sequences] * 2
    for last in (replies[33:36], replies[69:]):
        values = [np.frombuffer(reply.raw_output_contents[0], "f4").tolist() for reply in last]
        assert values == [pytest.approx(output["value"], abs=1e-5) for output in outputs]


def test_stream_replies_in_the_order_of_the_requests(heads: InProcess, channel: grpc.Channel) -> None:
    """The engine answers the last request first. Responses are marked as final on request."""
    requests = [rows() for _ in range(40)]
    for number, request in enumerate(requests):
        request.id = str(number)
    with_parameters(requests[0], triton_enable_empty_final_response=True)
    with heads.held() as engine:
        answers = stream_of(channel, requests)
        eventually(lambda: len(engine.waiting) == 32)  # the others are not read before the first is answered
    replies = [answer.infer_response for answer in answers]
    assert [reply.id for reply in replies] == [str(number) for number in range(40)]
    assert replies[0].parameters["triton_final_response"].bool_param
    assert "triton_final_response" not in replies[1].parameters


def test_error_on_a_stream_does_not_end_the_call(channel: grpc.Channel) -> None:
    """Unless the client asked for gRPC errors."""
    requests = [rows(), rows(bytes(13)), rows(bytes(BODY_BYTES)), rows(model="nobody", sequence_id=4), rows()]
    replies = [(answer.infer_response.id, answer.error_message) for answer in stream_of(channel, requests)]
    assert [id for id, _ in replies] == ["mine"] * 5
    for (_, message), text in zip(replies, ("", "13 bytes", "SEQSERVE_MAX_BODY_BYTES", "nobody", ""), strict=True):
        assert text in message and bool(text) == bool(message)
    answers = stream_of(channel, requests, metadata=[("triton_grpc_error", "true")])
    assert next(answers).infer_response.id == "mine"
    with pytest.raises(grpc.RpcError, match=r"(?s)INVALID_ARGUMENT.*13 bytes"):
        next(answers)


def test_large_messages_of_a_stream_stay_in_order(local: InProcess) -> None:
    """Every second message is large, and takes longer."""
    unknown_field = b"\xfa\x7f\x81\x80\x04" + bytes((1 << 16) + 1)
    typed_rows = typed("inputs", "FP32", [1, 3, 3], "sensors", fp32_contents=[1] * 9)
    flags = [{"sequence_start": True}, *[{}] * 6, {"sequence_end": True}]
    chunks = [with_parameters(copy(typed_rows), sequence_id=7, **flag).SerializeToString() for flag in flags]
    with grpc.insecure_channel(local.grpc) as channel:
        replies = list(stream_of(channel, [chunk + unknown_field * (index % 2) for index, chunk in enumerate(chunks)]))
    assert [reply.infer_response.parameters["sequence_steps"].int64_param for reply in replies] == [*range(3, 25, 3)]


# Health, reflection, and clients that are disconnected.


def test_health_of_server_and_service(heads: InProcess, channel: grpc.Channel) -> None:
    def ask(service: str, method: str = "Check") -> Any:
        replies = getattr(HealthStub(channel), method)(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return replies.status if method == "Check" else next(replies).status

    statuses, since = health_pb2.HealthCheckResponse, heads.log_bytes
    assert ask("") == ask(SERVICE[1:]) == ask("", "Watch") == statuses.SERVING
    assert ask("nobody", "Watch") == statuses.SERVICE_UNKNOWN
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        ask("nobody")
    for method in ("Check", "Watch"):
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            next(channel.unary_stream(f"{HEALTH}/{method}")(b"\xff\xff", timeout=60))
    assert not heads.events("bug", since=since)


def test_streams_without_a_key_are_limited(local: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.frontend.grpc.application.MAX_PUBLIC_STREAMS", 1)
    with grpc.insecure_channel(local.grpc) as channel:
        watching = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            next(HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60))
        watching.cancel()
        eventually(lambda: not local._server._grpc._application.calls)  # type: ignore[union-attr]
        assert next(HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60))


def test_reflection_describes_every_service(channel: grpc.Channel) -> None:
    def reflect(**request: str) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        [answer] = ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=10)
        return answer

    listed = [service.name for service in reflect(list_services="").list_services_response.service]
    assert listed == [HEALTH[1:], "grpc.reflection.v1alpha.ServerReflection", SERVICE[1:]]
    pool = DescriptorPool()
    for name in listed:
        for file in reflect(file_containing_symbol=name).file_descriptor_response.file_descriptor_proto:
            pool.Add(FileDescriptorProto.FromString(file))
        assert pool.FindServiceByName(name).methods
    assert reflect(file_containing_symbol="inference.Nothing").error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def connect(service: InProcess) -> socket.socket:
    host, port = service.grpc.rsplit(":", 1)
    return socket.create_connection((host, int(port)), LIMIT_SECONDS)


def read_to_end(client: socket.socket, data: bytes = b"") -> Frames:
    """Return all frames until the server closes the connection. data: bytes that were read before."""
    while part := client.recv(1 << 16):
        data += part
    return peer.split_frames(data)[0]


def test_invalid_and_slow_clients_are_disconnected(
    heads: InProcess, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, and calls on another connection go on."""

    def closed(reason: str) -> float:
        return heads.metric("seqserve_connections_closed_total", reason=reason)

    before = {reason: closed(reason) for reason in ("invalid_request", "slow_request")}
    for data in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", PREFACE + settings() + peer.request(1)[:12]):
        with closing(connect(heads)) as client:
            client.sendall(data)
            last = read_to_end(client)[-1]
            assert last.kind == GOAWAY and last.word
        monkeypatch.setattr(connection_guard, "RECEIVE_SECONDS", 0.1)  # for the slow clients
    assert {reason: closed(reason) - count for reason, count in before.items()} == {"invalid_request": 1, "slow_request": 2}
    assert len(call(channel, rows()).outputs) == 3


# Shutdown.


def test_connections_are_asked_to_end_once_at_sigterm(heads: InProcess) -> None:
    """Later connections of clients that know no other replica stay."""
    server, first, later = GrpcServer(heads.frontend, Mock(), lambda _: True), Mock(), Mock()
    server.connections.add(first)
    server.leave()
    server.connections.add(later)
    server.leave()
    first.drain.assert_called_once_with()
    later.drain.assert_not_called()


def test_shutdown_answers_open_calls(models_folder: Path, tmp_path: Path) -> None:
    """Health is not delayed by it, and a stream ends after its last reply. A reply waits for a client that opens its window late."""
    hold, data = threading.Event(), rows().SerializeToString()

    def requests() -> Iterator[Any]:
        yield from [rows()] * 3
        hold.wait(LIMIT_SECONDS)

    message = frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(data)) + data)
    with in_process(models_folder, tmp_path) as service, grpc.insecure_channel(service.grpc) as channel:
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with closing(connect(service)) as late:
            late.sendall(PREFACE + settings((4, 10)) + frame(HEADERS, END_HEADERS, 1, CALL) + message)
            eventually(lambda: outcomes(service, "ok") == 1)
            with service.held() as engine:
                single = channel.unary_unary(f"{SERVICE}/ModelInfer").future(data, timeout=60)
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
            received = b""
            while GOING_AWAY not in received:
                received += late.recv(1 << 16)
            late.sendall(window(1, 1 << 20))
            frames = read_to_end(late, received)
        reply = frames.body(1)
        assert struct.unpack(">BI", reply[:5]) == (0, len(reply) - 5)
        assert b"grpc-status\x010" in [part.payload for part in frames if part.kind == HEADERS][-1]
        service.stop()
        assert not service.events("bug") + service.events("library warning")


def test_calls_longer_than_the_drain_are_cut_off(models_folder: Path, tmp_path: Path) -> None:
    with (
        in_process(models_folder, tmp_path, drain_seconds=0.2) as service,
        grpc.insecure_channel(service.grpc) as channel,
        service.held() as engine,
    ):
        calls = [channel.unary_unary(f"{SERVICE}/ModelInfer").future(rows().SerializeToString()) for _ in range(3)]
        eventually(lambda: len(engine.waiting) == 3)
        service.stop()
        assert [call.exception(LIMIT_SECONDS).code() for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 3
        assert not service.events("bug") + service.events("library warning")
