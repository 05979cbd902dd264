"""The gRPC API of the Open Inference Protocol, with Triton's client and with invalid messages. The engine is a stand-in."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from service.frontend.inference import Frontend
from service.frontend.oip.grpc_calls import GrpcShutdown
from service.frontend.oip.grpc_methods import rpc_handlers
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests.frontend.conftest import BODY_BYTES
from tests.frontend.in_process import InProcess
from tests.frontend.oip.library import LibraryHandlers
from tests.serving import eventually

SERVICE = "/inference.GRPCInferenceService"
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who wrote Faust ?"]
ROWS = np.array([[0.1 * step, -0.5, 1 / step] for step in range(1, 13)], np.float32)
LIMIT = BODY_BYTES
InferMessage = service_pb2.ModelInferRequest
Outputs = dict[str, Any]


@pytest.fixture
def client(heads: InProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(heads.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def channel(heads: InProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(heads.grpc) as channel:
        yield channel


def tensor(name: str, array: Any) -> Any:
    """Return an input for Triton's client."""
    array = np.asarray(array)
    return triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def infer(client: Any, model: str, *inputs: Any, outputs: Any = (), **options: Any) -> Outputs:
    """Return all outputs of an answer by name."""
    requested = [triton.InferRequestedOutput(name) if isinstance(name, str) else name for name in outputs]
    answer = client.infer(model, list(inputs), outputs=requested or None, **options)
    return {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}


def call(channel: grpc.Channel, message: Any, method: str = "ModelInfer", **options: Any) -> Any:
    """Call a method without Triton's client. A message of type bytes is sent unchanged."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    answer = getattr(service_pb2, f"{method}Response").FromString
    return channel.unary_unary(f"{SERVICE}/{method}", response_deserializer=answer)(data, timeout=60, **options)


def refusal(channel: grpc.Channel, message: Any, method: str = "ModelInfer") -> tuple[str, str, dict[str, str]]:
    """Return status, details and trailing metadata of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call(channel, message, method)
    error: Any = raised.value
    return error.code().name, error.details(), dict(error.trailing_metadata())


def typed(name: str, datatype: str, shape: list[int], model: str = "sensors", **contents: Any) -> Any:
    """Return a request with one input whose values are in typed contents."""
    input = InferMessage.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=contents or None)
    return InferMessage(model_name=model, id="mine", inputs=[input])


def raw(name: str, datatype: str, shape: list[int], *data: bytes, model: str = "sensors") -> Any:
    """Return a request with one input whose values are raw bytes."""
    message = typed(name, datatype, shape, model)
    message.raw_input_contents.extend(data)
    return message


# Answers.


def test_triton_client_over_grpc(heads: InProcess, client: Any) -> None:
    """tests/long/test_triton_grpc.py has every datatype and layout."""
    texts = tensor("text", np.array([[text] for text in QUESTIONS], np.object_))
    best = triton.InferRequestedOutput("scores", class_count=2)
    answer = infer(client, "words", texts, outputs=["label", best], compression_algorithm="gzip")
    expected = heads.infer("words", QUESTIONS).json()["outputs"]
    assert list(answer) == ["label", "scores"]
    assert [label.decode() for label in answer["label"][:, 0]] == [output["label"] for output in expected]
    assert [line.decode().split(":")[2] for line in answer["scores"][:, 0]] == [output["label"] for output in expected]


TYPED: dict[str, tuple[str, list[int], str, str, Any]] = {
    "FP32": ("inputs", [1, 12, 3], "forecaster", "fp32_contents", ROWS),
    "FP64": ("inputs", [1, 12, 3], "forecaster", "fp64_contents", ROWS.astype(np.float64)),
    "INT32": ("ids", [1, 3], "speller", "int_contents", np.array([1, 2, 3], np.int32)),
    "INT64": ("ids", [3], "speller", "int64_contents", np.array([1, 2, 3])),
}


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_get_the_response_of_raw_contents(channel: grpc.Channel, client: Any, datatype: str) -> None:
    name, shape, model, field, values = TYPED[datatype]
    answer = call(channel, typed(name, datatype, shape, model, **{field: values.ravel()}))
    assert answer.id == "mine" and not any(output.HasField("contents") for output in answer.outputs)
    expected = client.infer(model, [tensor(name, values.reshape(shape))]).get_response()
    assert [output.name for output in answer.outputs] == [output.name for output in expected.outputs]
    assert answer.raw_output_contents == expected.raw_output_contents


def test_metadata_equals_that_of_http(heads: InProcess, client: Any) -> None:
    def http(path: str, message: Any) -> Any:
        return ParseDict(heads.client.get(f"/v2{path}").json(), message)

    assert client.get_server_metadata() == http("", service_pb2.ServerMetadataResponse())
    for model in ("words", "sensors", "tagger"):
        metadata, config = service_pb2.ModelMetadataResponse(), model_config_pb2.ModelConfig()
        assert client.get_model_metadata(model, "1") == http(f"/models/{model}", metadata)
        assert client.get_model_config(model, "1").config == http(f"/models/{model}/config", config)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("words", "1")
    index = ParseDict({"models": heads.client.post("/v2/repository/index").json()}, service_pb2.RepositoryIndexResponse())
    assert client.get_model_repository_index() == index


def test_statistics_equal_those_of_http(heads: InProcess, client: Any) -> None:
    infer(client, "tagger", tensor("ids", np.array([1, 2, 3], np.int32)))

    def over_http() -> Any:
        return ParseDict(heads.client.get("/v2/models/tagger/stats").json(), service_pb2.ModelStatisticsResponse())

    assert client.get_inference_statistics("tagger", "1") == over_http()
    assert over_http().model_stats[0].inference_stats.success.count > 0
    assert {model.name for model in client.get_inference_statistics().model_stats} >= {"tagger", "words", "sensors"}
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.get_inference_statistics("nobody")


def test_models_are_unloaded_and_loaded(heads: InProcess, client: Any) -> None:
    rows = tensor("inputs", ROWS[None, :, :2])
    expected = infer(client, "halver", rows)
    client.unload_model("halver")
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model halver"):
        infer(client, "halver", rows)
    assert "halver" not in {entry.name for entry in client.get_model_repository_index().models if entry.state == "READY"}
    client.load_model("halver")
    assert infer(client, "halver", rows)["sequence"].tolist() == expected["sequence"].tolist()
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*copy them to the models folder"):
        client.load_model("halver", config="{}", files={"file:1/model.bin": b"1"})
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.load_model("nobody")


# Errors.


@pytest.mark.parametrize(
    ("message", "status", "code", "text"),
    [
        (raw("inputs", "FP32", [1, 1, 3], bytes(12), model="nobody"), "NOT_FOUND", "unknown_model", "are served"),
        (b"\xff\xff", "INVALID_ARGUMENT", "invalid_request", "not a valid inference.ModelInferRequest"),
        (raw("inputs", "FP32", [1, 1, 3], bytes(12), bytes(4)), "INVALID_ARGUMENT", "invalid_input", "2 entries for 1 inputs"),
        (raw("inputs", "FP32", [1, 1, 3], bytes(13)), "INVALID_ARGUMENT", "invalid_input", "13 bytes"),
        (raw("inputs", "FP32", [1, -1, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "[1, -1, 3]"),
        (raw("inputs", "FP32", [1 << 62, 1 << 62, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "each dimension"),
        (raw("inputs", "FP32", [1] * 99, bytes(4)), "INVALID_ARGUMENT", "invalid_input", "99 dimensions"),
        (raw("inputs", "FP33", [1, 1, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "FP33"),
        (raw("inputs", "INT32", [1, 1, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "send it as FP32"),
        (raw("ids", "INT32", [1], b"\x63\0\0\0", model="speller"), "INVALID_ARGUMENT", "invalid_input", "ids[0][0] is 99"),
        (raw("text", "BYTES", [1], b"\x09\0\0\0abc", model="words"), "INVALID_ARGUMENT", "invalid_input", "declares 9 bytes"),
        (typed("inputs", "FP32", [1, 1, 3]), "INVALID_ARGUMENT", "invalid_input", "0 values"),
        (typed("inputs", "FP32", [1, 1, 3], fp64_contents=[1, 2, 3]), "INVALID_ARGUMENT", "invalid_input", "0 values"),
        (typed("inputs", "FP16", [1, 1, 3], fp32_contents=[1, 2, 3]), "INVALID_ARGUMENT", "invalid_input", "only as raw bytes"),
        (typed("inputs", "INT8", [1, 1, 1], int_contents=[300]), "INVALID_ARGUMENT", "invalid_input", "cannot hold"),
        (InferMessage(model_name="sensors"), "INVALID_ARGUMENT", "invalid_input", "inputs is missing"),
    ],
)
def test_invalid_request_gets_an_error_status(channel: grpc.Channel, message: Any, status: str, code: str, text: str) -> None:
    actual, details, trailing = refusal(channel, message)
    assert (actual, trailing["seqserve-code"]) == (status, code)
    assert text in details


@pytest.mark.parametrize("kind", ["bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes"])
def test_every_field_of_typed_contents_is_read(channel: grpc.Channel, kind: str) -> None:
    """No model has such an input: the error shows that the contents were read before the name was checked."""
    datatype = {"int": "INT16", "uint": "UINT8"}.get(kind, kind.upper())
    value = b"words" if kind == "bytes" else True if kind == "bool" else 7
    contents: dict[str, Any] = {f"{kind}_contents": [value]}
    _, details, trailing = refusal(channel, typed("other", datatype, [1], **contents))
    assert trailing["seqserve-field"] == "other"
    assert "other is not an input of sensors" in details


def test_typed_and_raw_contents_cannot_be_combined(channel: grpc.Channel) -> None:
    message = typed("inputs", "FP32", [1, 1, 3], fp32_contents=[1, 2, 3])
    message.raw_input_contents.append(bytes(12))
    status, details, trailing = refusal(channel, message)
    assert (status, trailing["seqserve-field"]) == ("INVALID_ARGUMENT", "inputs")
    assert "has contents, but the request has raw_input_contents too" in details


def test_message_over_the_limit_is_rejected(channel: grpc.Channel, heads: InProcess) -> None:
    before = heads.metric("seqserve_requests_total", outcome="too_large")
    status, details, trailing = refusal(channel, raw("inputs", "FP32", [1, 1, 3], bytes(LIMIT)))
    assert (status, trailing["seqserve-code"]) == ("RESOURCE_EXHAUSTED", "too_large")
    assert f"SEQSERVE_MAX_BODY_BYTES is {LIMIT}" in details
    assert refusal(channel, raw("inputs", "FP32", [1, 1, 3], bytes(2 * LIMIT)))[0] == "RESOURCE_EXHAUSTED"
    with pytest.raises(grpc.RpcError, match="larger than max"):
        call(channel, raw("inputs", "FP32", [1, 1, 3], bytes(8 * LIMIT)), compression=grpc.Compression.Gzip)
    assert heads.metric("seqserve_requests_total", outcome="too_large") == before + 1
    assert len(call(channel, raw("inputs", "FP32", [1, 1, 3], bytes(12))).outputs) == 3


@pytest.mark.parametrize("method", ["SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"])
def test_unsupported_methods_are_unimplemented(channel: grpc.Channel, method: str) -> None:
    status, details, trailing = refusal(channel, b"", method)
    assert (status, trailing["seqserve-code"]) == ("UNIMPLEMENTED", "unsupported")
    assert "shared memory, trace settings and log settings are not supported" in details


def test_unknown_model_is_not_found_by_any_method(client: Any) -> None:
    for method in (client.get_model_metadata, client.get_model_config, client.is_model_ready):
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model nobody"):
            method("nobody")


def test_internal_error_reveals_no_details(capfd: pytest.CaptureFixture[str]) -> None:
    """A frontend without a catalog fails at the first access."""
    missing: Any = None
    frontend = Frontend(Settings(), missing, missing, Metrics(), Log("frontend"), missing)
    request = raw("inputs", "FP32", [1, 1, 3], bytes(12)).SerializeToString()

    async def call_methods() -> list[grpc.RpcError]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((LibraryHandlers(rpc_handlers(frontend, GrpcShutdown())),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [channel.unary_unary(f"{SERVICE}/{method}")(request) for method in ("ModelInfer", "ModelMetadata")]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([request]))
            answer = service_pb2.ModelStreamInferResponse.FromString(await stream.read())
        await server.stop(None)
        assert (answer.infer_response.id, answer.error_message) == (
            "mine",
            "the service failed on this request: see its log",
        )
        return errors

    for error in asyncio.run(call_methods()):
        assert (error.code(), error.details()) == (
            grpc.StatusCode.INTERNAL,
            "the service failed on this request: see its log",
        )
    assert capfd.readouterr().err.count('"event": "bug"') == 3
    assert dict(frontend.metrics.requests.values)[("unknown", "unknown", "inference_failed")] == [2]


# Cancelled calls and deadlines.


def outcomes(heads: InProcess, outcome: str) -> float:
    return heads.metric("seqserve_requests_total", outcome=outcome)


def test_cancelled_calls_and_streams_are_cancelled_in_the_engine(heads: InProcess, client: Any) -> None:
    gone, message = outcomes(heads, "client_gone"), raw("inputs", "FP32", [1, 1, 3], bytes(12))
    with heads.held() as engine, grpc.insecure_channel(heads.grpc) as channel:
        cancelled = engine.cancelled
        single = client.async_infer("sensors", [tensor("inputs", ROWS[None])], lambda *_: None)
        stream = stream_of(channel, [message] * 5)
        eventually(lambda: len(engine.waiting) == 6)
        single.cancel()
        stream.cancel()
        eventually(lambda: engine.cancelled == cancelled + 6)
    eventually(lambda: outcomes(heads, "client_gone") == gone + 6)
    assert heads.metric("seqserve_requests_in_flight") == 0


def test_shorter_deadline_of_call_and_request_applies(heads: InProcess, client: Any) -> None:
    rows = tensor("inputs", ROWS[None])
    with heads.held():
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            client.infer("sensors", [rows], client_timeout=0.1)
        eventually(lambda: heads.metric("seqserve_requests_in_flight") == 0)
        before = outcomes(heads, "deadline_exceeded")
        with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED.*allow more time"):
            client.infer("sensors", [rows], timeout=50_000)
    with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*SEQSERVE_MAX_DEADLINE_MS"):
        client.infer("sensors", [rows], timeout=10**9)
    assert outcomes(heads, "deadline_exceeded") == before + 1


# Streams.


class TritonStream:
    """A stream of Triton's client and its replies: (id, response or error)."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._replies: queue.Queue[Any] = queue.Queue()

    def send(self, model: str, *inputs: Any, id: str = "", **options: Any) -> None:
        self._client.async_stream_infer(model, list(inputs), request_id=id, **options)

    def handle_reply(self, result: Any, error: Any) -> None:
        self._replies.put((result.get_response().id if result else "", result or error))

    def next(self) -> tuple[str, Any]:
        reply: tuple[str, Any] = self._replies.get(timeout=60)
        return reply


@contextmanager
def open_stream(heads: InProcess, **options: Any) -> Iterator[TritonStream]:
    with triton.InferenceServerClient(heads.grpc) as client:
        stream = TritonStream(client)
        client.start_stream(stream.handle_reply, **options)
        yield stream


def test_sessions_on_one_stream_get_the_outputs_of_the_whole(heads: InProcess) -> None:
    sequences: dict[int | str, Any] = {1: ROWS, 2: -ROWS, "three": ROWS[::-1] * 2, 2**63 - 1: ROWS * 0}
    outputs = heads.infer("forecaster", [sequence.tolist() for sequence in sequences.values()]).json()["outputs"]
    with open_stream(heads) as stream:
        for step in range(len(ROWS)):
            for id, rows in sequences.items():
                flags: dict[str, Any] = {"sequence_start": step == 0, "sequence_end": step == len(ROWS) - 1}
                chunk = tensor("inputs", rows[None, step : step + 1])
                stream.send("forecaster", chunk, id=f"{id}:{step}", sequence_id=id, **flags)
        replies = [stream.next() for _ in range(len(ROWS) * len(sequences))]
    assert [id for id, _ in replies] == [f"{id}:{step}" for step in range(len(ROWS)) for id in sequences]
    last = [answer.as_numpy("value")[0].tolist() for _, answer in replies[-len(sequences) :]]
    assert last == [pytest.approx(output["value"], abs=1e-5) for output in outputs]
    assert {answer.get_response().parameters["sequence_steps"].int64_param for _, answer in replies[-4:]} == {len(ROWS)}


def test_ended_session_restarts_on_the_same_stream(heads: InProcess) -> None:
    with open_stream(heads) as stream:
        for step in range(60):
            flags: dict[str, Any] = {"sequence_start": step % 3 == 0, "sequence_end": step % 3 == 2}
            stream.send("sensors", tensor("inputs", ROWS[None, :1]), sequence_id=9, **flags)
        steps = [stream.next()[1].get_response().parameters["sequence_steps"].int64_param for _ in range(60)]
    assert steps == [1, 2, 3] * 20


def test_stream_replies_in_the_order_of_the_requests(heads: InProcess) -> None:
    """The engine answers the last request first."""
    with open_stream(heads) as stream:
        with heads.held() as engine:
            for number in range(10):
                stream.send("sensors", tensor("inputs", ROWS[None]), id=str(number))
            eventually(lambda: len(engine.waiting) == 10)
        replies = [stream.next() for _ in range(10)]
    assert [id for id, _ in replies] == [str(number) for number in range(10)]


def test_error_on_a_stream_does_not_end_the_call(heads: InProcess) -> None:
    requests = [
        raw("inputs", "FP32", [1, 1, 3], bytes(12)),
        raw("inputs", "FP32", [1, 1, 3], bytes(13)),
        raw("inputs", "FP32", [1, 1, 3], bytes(LIMIT)),
        raw("inputs", "FP32", [1, 1, 3], bytes(12), model="nobody"),
        raw("inputs", "FP32", [1, 1, 3], bytes(12)),
    ]
    requests[3].parameters["sequence_id"].int64_param = 4
    with grpc.insecure_channel(heads.grpc) as channel:
        answers = list(stream_of(channel, requests))
    replies = [(answer.infer_response.id, answer.error_message) for answer in answers]
    assert [id for id, _ in replies] == ["mine"] * 5
    assert replies[0][1] == replies[4][1] == ""
    for (_, message), text in zip(replies[1:4], ("13 bytes", "SEQSERVE_MAX_BODY_BYTES", "nobody"), strict=True):
        assert text in message


def stream_of(channel: grpc.Channel, requests: Iterable[Any], **options: Any) -> Any:
    """Send all requests, close the sending side, and return the responses."""
    method = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer", InferMessage.SerializeToString, service_pb2.ModelStreamInferResponse.FromString
    )
    return method(iter(requests), timeout=60, **options)


def test_first_error_ends_the_stream_with_grpc_errors(channel: grpc.Channel) -> None:
    good, bad = raw("inputs", "FP32", [1, 1, 3], bytes(12)), raw("inputs", "FP32", [1, 1, 3], bytes(13))
    answers = stream_of(channel, [good, bad, good], metadata=[("triton_grpc_error", "true")])
    assert next(answers).infer_response.id == "mine"
    with pytest.raises(grpc.RpcError) as ended:
        next(answers)
    assert (ended.value.code(), "13 bytes" in ended.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_responses_are_marked_final_on_request(heads: InProcess) -> None:
    with open_stream(heads) as stream:
        stream.send("sensors", tensor("inputs", ROWS[None]), enable_empty_final_response=True)
        stream.send("sensors", tensor("inputs", ROWS[None]))
        final, plain = [stream.next()[1].get_response().parameters for _ in range(2)]
    assert final["triton_final_response"].bool_param
    assert "triton_final_response" not in plain
