"""The gRPC face of the Open Inference Protocol, as its own clients and odd ones meet it. What the right answer is, POST /infer says."""

from __future__ import annotations

import asyncio
import queue
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from service.frontend.oip import grpc as oip_grpc
from service.frontend.oip.grpc_calls import Ending
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from tests import models
from tests.serving import Server, eventually, serving

EMBEDDED = Path(__file__).resolve().parents[3] / "models"
SERVICE = "/inference.GRPCInferenceService"
QUESTIONS = ["How far is it from Denver to Aspen ?", "Who wrote Faust ?"]
ROWS = np.array([[0.1 * step, -0.5, 1 / step] for step in range(1, 13)], np.float32)
SLOW = np.full((100_000, 3), 0.1, np.float32)
LIMIT = 2 << 20
Said = service_pb2.ModelInferRequest
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of every head, two that ship and one as slow as is needed, behind two fronts that take messages of 2 MiB."""
    root = tmp_path_factory.mktemp("models")
    for make in models.OF_EVERY_HEAD.values():
        make(root)
    models.sensors(root)
    for name in ("question-type-cnn", "sensor-forecast"):
        shutil.copytree(EMBEDDED / name, root / name)
    with serving(root, tmp_path_factory.mktemp("log"), "--frontends", "2", max_body_bytes=str(LIMIT)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(served.grpc) as made:
        yield made


@pytest.fixture(scope="module")
def channel(served: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.grpc) as made:
        yield made


def given(name: str, array: Any) -> Any:
    """An input as Triton's client sends it."""
    array = np.asarray(array)
    return triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def texts(*questions: str) -> Any:
    return given("text", np.array([[one] for one in questions], np.object_))


def asked(client: Any, model: str, *inputs: Any, outputs: Any = (), **options: Any) -> Answer:
    """All outputs of an answer by their names."""
    wanted = [triton.InferRequestedOutput(name) if isinstance(name, str) else name for name in outputs]
    answer = client.infer(model, list(inputs), outputs=wanted or None, **options)
    return {one.name: answer.as_numpy(one.name) for one in answer.get_response().outputs}


def infer(served: Server, model: str, inputs: list[Any]) -> list[Answer]:
    outputs: list[Answer] = served.infer(model, inputs).json()["outputs"]
    return outputs


def call(channel: grpc.Channel, message: Any, method: str = "ModelInfer", **options: Any) -> Any:
    """A call without Triton's client; of bytes, one as they are."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    answer = getattr(service_pb2, f"{method}Response").FromString
    return channel.unary_unary(f"{SERVICE}/{method}", response_deserializer=answer)(data, timeout=60, **options)


def refusal(channel: grpc.Channel, message: Any, method: str = "ModelInfer") -> tuple[str, str, dict[str, str]]:
    """Status, message and trailing metadata of a call that fails."""
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, message, method)
    fault: Any = refused.value
    return fault.code().name, fault.details(), dict(fault.trailing_metadata())


def said(name: str, datatype: str, shape: list[int], model: str = "sensors", **contents: Any) -> Any:
    """A request with one input, whose contents are typed."""
    one = Said.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=contents or None)
    return Said(model_name=model, id="mine", inputs=[one])


def raw(name: str, datatype: str, shape: list[int], *data: bytes, model: str = "sensors") -> Any:
    message = said(name, datatype, shape, model)
    message.raw_input_contents.extend(data)
    return message


# Answers.


def test_texts_are_answered_as_post_infer_answers_them(served: Server, client: Any) -> None:
    answer = asked(client, "question-type-cnn", texts(*QUESTIONS))
    expected = infer(served, "question-type-cnn", QUESTIONS)
    assert [label.decode() for label in answer["label"][:, 0]] == [one["label"] for one in expected] == ["NUM", "HUM"]
    assert answer["scores"].tolist() == [pytest.approx([*one["scores"].values()], abs=1e-6) for one in expected]
    assert answer["score"][:, 0].tolist() == pytest.approx([one["score"] for one in expected], abs=1e-6)


def test_rows_of_numbers_are_answered_in_every_datatype_that_is_taken(served: Server, client: Any) -> None:
    [expected] = infer(served, "sensor-forecast", [ROWS.tolist()])
    for dtype, within in ((np.float32, 1e-6), (np.float64, 1e-6), (np.float16, 1e-2), (ml_dtypes.bfloat16, 0.1)):
        answer = asked(client, "sensor-forecast", given("inputs", ROWS[None].astype(dtype)))
        assert answer["value"][0].tolist() == pytest.approx(expected["value"], abs=within)


def test_ids_are_answered_in_every_datatype_that_is_taken(served: Server, client: Any) -> None:
    ids = [1, 5, 11, 0, 3]
    [expected] = infer(served, "speller", [ids])
    for dtype in (np.int32, np.int64):
        assert asked(client, "speller", given("ids", np.array([ids], dtype)))["ids"].tolist() == [expected["ids"]]


@pytest.mark.parametrize(
    "message",
    [
        said("inputs", "FP32", [1, 12, 3], "sensor-forecast", fp32_contents=ROWS.ravel()),
        said("inputs", "FP64", [1, 12, 3], "sensor-forecast", fp64_contents=ROWS.ravel()),
        said("ids", "INT32", [1, 3], "speller", int_contents=[1, 2, 3]),
        said("ids", "INT64", [3], "speller", int64_contents=[1, 2, 3]),
        said("text", "BYTES", [2, 1], "question-type-cnn", bytes_contents=[one.encode() for one in QUESTIONS]),
    ],
    ids=lambda message: message.inputs[0].datatype,
)
def test_typed_contents_are_answered_in_raw_bytes_as_raw_bytes_are(channel: grpc.Channel, client: Any, message: Any) -> None:
    answer, one = call(channel, message), message.inputs[0]
    assert answer.id == "mine"
    assert not any(output.HasField("contents") for output in answer.outputs)
    values = max(([*field] for _, field in one.contents.ListFields()), key=len)
    dtype = {"BYTES": np.object_, "FP32": np.float32, "FP64": np.float64, "INT32": np.int32, "INT64": np.int64}[one.datatype]
    expected = client.infer(message.model_name, [given(one.name, np.array(values, dtype).reshape(one.shape))]).get_response()
    assert [output.name for output in answer.outputs] == [output.name for output in expected.outputs]
    assert answer.raw_output_contents == expected.raw_output_contents


def test_rows_of_several_lengths_come_padded_or_end_to_end(served: Server, client: Any) -> None:
    sequences = [ROWS, ROWS[:5], ROWS[3:4]]
    expected = [one["value"] for one in infer(served, "sensor-forecast", [one.tolist() for one in sequences])]
    padded = np.full((3, 12, 3), 9.0, np.float32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    for inputs in (
        (given("inputs", padded), given("lengths", np.array([[12], [5], [1]], np.int32))),
        (given("inputs", np.concatenate(sequences)[None]), given("offsets", np.array([[0, 12, 17, 18]], np.int32))),
    ):
        answer = asked(client, "sensor-forecast", *inputs)
        assert answer["value"].tolist() == [pytest.approx(one, abs=1e-5) for one in expected]


def test_what_is_said_of_every_step_comes_as_the_rows_came(served: Server, client: Any) -> None:
    one, other = [1, 5, 3, 0, 3], [3, 7, 2]
    expected = [answer["labels"] for answer in infer(served, "tagger", [one, other])]
    padded = asked(client, "tagger", given("ids", np.array([one, [*other, 0, 0]])), given("lengths", np.array([5, 3])))
    assert [[label.decode() for label in row if label] for row in padded["labels"]] == expected
    ragged = asked(client, "tagger", given("ids", np.array([one + other])), given("offsets", np.array([[0, 5, 8]])))
    assert [label.decode() for label in ragged["labels"][0]] == expected[0] + expected[1]
    assert ragged["offsets"].tolist() == [[0, 5, 8]]


def test_outputs_come_in_the_order_in_which_they_are_asked_for(client: Any) -> None:
    best = triton.InferRequestedOutput("scores", class_count=2)
    answer = asked(client, "question-type-cnn", texts(QUESTIONS[0]), outputs=["embedding", best, "label"], request_id="7")
    assert list(answer) == ["embedding", "scores", "label"]
    assert [line.decode().split(":")[1:] for line in answer["scores"][0]] == [["5", "NUM"], ["4", "LOC"]]


def test_the_asynchronous_client_is_answered_too(served: Server) -> None:
    async def ask() -> list[str]:
        async with triton_aio.InferenceServerClient(served.grpc) as client:
            answers = await asyncio.gather(*[client.infer("words", [texts("how far is the sea ?")]) for _ in range(40)])
            return [answer.as_numpy("label").item().decode() for answer in answers]

    assert set(asyncio.run(ask())) == {infer(served, "words", ["how far is the sea ?"])[0]["label"]}


def test_a_message_may_come_compressed(client: Any) -> None:
    for algorithm in ("gzip", "deflate"):
        assert asked(client, "words", texts("who was first"), compression_algorithm=algorithm)["label"].shape == (1, 1)


def test_what_is_said_of_service_and_models_is_what_http_says(served: Server, client: Any) -> None:
    def http(path: str, message: Any) -> Any:
        return ParseDict(served.client.get(f"/v2{path}").json(), message)

    assert client.get_server_metadata() == http("", service_pb2.ServerMetadataResponse())
    for model in ("words", "sensors", "tagger"):
        metadata, config = service_pb2.ModelMetadataResponse(), model_config_pb2.ModelConfig()
        assert client.get_model_metadata(model, "1") == http(f"/models/{model}", metadata)
        assert client.get_model_config(model, "1").config == http(f"/models/{model}/config", config)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("words", "1")
    index = ParseDict({"models": served.client.post("/v2/repository/index").json()}, service_pb2.RepositoryIndexResponse())
    assert client.get_model_repository_index() == index


def test_statistics_are_those_that_http_has(served: Server, client: Any) -> None:
    asked(client, "tagger", texts("who was first"))
    told = client.get_inference_statistics("tagger", "1")
    [tagger] = told.model_stats
    assert tagger.inference_count >= tagger.inference_stats.success.count > 0
    http = ParseDict(served.client.get("/v2/models/tagger/stats").json(), service_pb2.ModelStatisticsResponse())
    assert told == http
    assert {one.name for one in client.get_inference_statistics().model_stats} >= {"tagger", "words", "sensors"}
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.get_inference_statistics("nobody")


def test_models_are_taken_out_of_service_and_back(served: Server, client: Any) -> None:
    rows = given("inputs", ROWS[None, :, :2])
    expected = asked(client, "halver", rows)
    client.unload_model("halver")
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model halver"):
        asked(client, "halver", rows)
    assert "halver" not in {one.name for one in client.get_model_repository_index().models if one.state == "READY"}
    client.load_model("halver")
    assert asked(client, "halver", rows)["sequence"].tolist() == expected["sequence"].tolist()
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*read from the models folder"):
        client.load_model("halver", config="{}", files={"file:1/model.bin": b"1"})
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.load_model("nobody")


# What is refused.


@pytest.mark.parametrize(
    "message, status, code, words",
    [
        (raw("inputs", "FP32", [1, 1, 3], bytes(12), model="nobody"), "NOT_FOUND", "unknown_model", "served are"),
        (b"\xff\xff", "INVALID_ARGUMENT", "invalid_request", "no inference.ModelInferRequest"),
        (raw("inputs", "FP32", [1, 1, 3], bytes(12), bytes(4)), "INVALID_ARGUMENT", "invalid_input", "2 entries for 1 inputs"),
        (raw("inputs", "FP32", [1, 1, 3], bytes(13)), "INVALID_ARGUMENT", "invalid_input", "13 bytes"),
        (raw("inputs", "FP32", [1, -1, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "[1, -1, 3]"),
        (raw("inputs", "FP32", [1 << 62, 1 << 62, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "each dimension"),
        (raw("inputs", "FP32", [1] * 99, bytes(4)), "INVALID_ARGUMENT", "invalid_input", "99 dimensions"),
        (raw("inputs", "FP33", [1, 1, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "FP33"),
        (raw("inputs", "INT32", [1, 1, 3], bytes(12)), "INVALID_ARGUMENT", "invalid_input", "send it as FP32"),
        (raw("ids", "INT32", [1], b"\x63\0\0\0", model="speller"), "INVALID_ARGUMENT", "invalid_input", "ids[0][0] is 99"),
        (raw("text", "BYTES", [1], b"\x09\0\0\0abc", model="words"), "INVALID_ARGUMENT", "invalid_input", "9 bytes"),
        (said("inputs", "FP32", [1, 1, 3]), "INVALID_ARGUMENT", "invalid_input", "0 values"),
        (said("inputs", "FP32", [1, 1, 3], fp64_contents=[1, 2, 3]), "INVALID_ARGUMENT", "invalid_input", "0 values"),
        (said("inputs", "FP16", [1, 1, 3], fp32_contents=[1, 2, 3]), "INVALID_ARGUMENT", "invalid_input", "only raw bytes"),
        (said("inputs", "INT8", [1, 1, 1], int_contents=[300]), "INVALID_ARGUMENT", "invalid_input", "cannot hold"),
        (Said(model_name="sensors"), "INVALID_ARGUMENT", "invalid_input", "inputs is missing"),
    ],
)
def test_what_cannot_be_answered_is_refused(channel: grpc.Channel, message: Any, status: str, code: str, words: str) -> None:
    found, told, trailing = refusal(channel, message)
    assert (found, trailing["seqserve-code"]) == (status, code)
    assert words in told


@pytest.mark.parametrize("kind", ["bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes"])
def test_every_list_of_contents_is_read(channel: grpc.Channel, kind: str) -> None:
    """Those that no model takes are refused for what they are, which is known by then."""
    datatype = {"int": "INT16", "uint": "UINT8"}.get(kind, kind.upper())
    value = b"words" if kind == "bytes" else True if kind == "bool" else 7
    contents: dict[str, Any] = {f"{kind}_contents": [value]}
    _, told, trailing = refusal(channel, said("other", datatype, [1], **contents))
    assert trailing["seqserve-field"] == "other"
    assert "other is no input of sensors" in told


def test_contents_beside_raw_bytes_are_refused(channel: grpc.Channel) -> None:
    message = said("inputs", "FP32", [1, 1, 3], fp32_contents=[1, 2, 3])
    message.raw_input_contents.append(bytes(12))
    status, told, trailing = refusal(channel, message)
    assert (status, trailing["seqserve-field"]) == ("INVALID_ARGUMENT", "inputs")
    assert "contents beside raw_input_contents" in told


def test_a_parameter_without_a_value_is_refused(channel: grpc.Channel) -> None:
    message = raw("inputs", "FP32", [1, 1, 3], bytes(12))
    message.parameters["priority"].SetInParent()
    assert refusal(channel, message)[2]["seqserve-field"] == "parameters.priority"


def test_a_message_over_the_limit_is_refused_and_harms_no_other(channel: grpc.Channel, served: Server) -> None:
    refused = served.metric("seqserve_requests_total", outcome="too_large")
    status, told, trailing = refusal(channel, raw("inputs", "FP32", [1, 1, 3], bytes(LIMIT)))
    assert (status, trailing["seqserve-code"]) == ("RESOURCE_EXHAUSTED", "too_large")
    assert f"SEQSERVE_MAX_BODY_BYTES is {LIMIT}" in told
    assert refusal(channel, raw("inputs", "FP32", [1, 1, 3], bytes(2 * LIMIT)))[0] == "RESOURCE_EXHAUSTED"
    with pytest.raises(grpc.RpcError, match="larger than max"):
        call(channel, raw("inputs", "FP32", [1, 1, 3], bytes(8 * LIMIT)), compression=grpc.Compression.Gzip)
    assert served.metric("seqserve_requests_total", outcome="too_large") == refused + 1
    assert len(call(channel, raw("inputs", "FP32", [1, 1, 3], bytes(12))).outputs) == 3


@pytest.mark.parametrize("method", ["SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"])
def test_what_the_protocol_has_and_the_service_has_not_is_said(channel: grpc.Channel, method: str) -> None:
    status, told, trailing = refusal(channel, b"", method)
    assert (status, trailing["seqserve-code"]) == ("UNIMPLEMENTED", "unsupported")
    assert "shared memory, traces and logs are not" in told


def test_a_tensor_in_shared_memory_is_refused(client: Any) -> None:
    one = triton.InferInput("inputs", [1, 1, 3], "FP32")
    one.set_shared_memory("region", 12)
    with pytest.raises(InferenceServerException, match="shared memory is not supported"):
        client.infer("sensors", [one])


def test_a_model_that_is_not_there_is_unknown_to_every_method(client: Any) -> None:
    for ask in (client.get_model_metadata, client.get_model_config, client.is_model_ready):
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*unknown model nobody"):
            ask("nobody")


def test_a_fault_of_the_service_is_internal_and_says_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A front without anything in it has a fault at the first step."""
    frontend: Any = SimpleNamespace(settings=Settings(), metrics=Metrics(), log=Log("frontend"))
    request = raw("inputs", "FP32", [1, 1, 3], bytes(12)).SerializeToString()

    async def ask() -> list[grpc.RpcError]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((oip_grpc.handlers(frontend, Ending()),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [channel.unary_unary(f"{SERVICE}/{method}")(request) for method in ("ModelInfer", "ModelMetadata")]
            faults = await asyncio.gather(*calls, return_exceptions=True)
            stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([request]))
            answer = service_pb2.ModelStreamInferResponse.FromString(await stream.read())
        await server.stop(None)
        assert (answer.infer_response.id, answer.error_message) == (
            "mine",
            "the service failed on this request: its log says why",
        )
        return faults

    for fault in asyncio.run(ask()):
        assert (fault.code(), fault.details()) == (
            grpc.StatusCode.INTERNAL,
            "the service failed on this request: its log says why",
        )
    assert capsys.readouterr().err.count('"event": "bug"') == 3
    assert dict(frontend.metrics.requests.values)[("unknown", "unknown", "inference_failed")] == [2]


# Callers who leave, and deadlines.


def outcomes(served: Server, outcome: str) -> float:
    return served.metric("seqserve_requests_total", outcome=outcome)


def test_a_call_that_is_cancelled_stops_at_the_engine(served: Server, client: Any) -> None:
    gone, cancelled = outcomes(served, "client_gone"), served.metric("seqserve_cancelled_total")
    answers: queue.Queue[Any] = queue.Queue()

    def handle_reply(result: Any, error: Any) -> None:
        answers.put(error)

    running = client.async_infer("sensors", [given("inputs", SLOW[None])], handle_reply)
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 1, 10)
    running.cancel()
    assert "CANCELLED" in str(answers.get(timeout=10))
    eventually(lambda: outcomes(served, "client_gone") == gone + 1, 5)
    eventually(lambda: served.metric("seqserve_cancelled_total") == cancelled + 1, 5)
    assert served.metric("seqserve_requests_in_flight") == 0


def test_a_deadline_is_the_calls_or_the_requests_whichever_is_sooner(served: Server, client: Any) -> None:
    late = given("inputs", SLOW[None])
    with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
        client.infer("sensors", [late], client_timeout=0.1)
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 0, 2)
    before = outcomes(served, "deadline_exceeded")
    with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED.*allow it more time"):
        client.infer("sensors", [late], timeout=50_000)
    with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*SEQSERVE_MAX_DEADLINE_MS"):
        client.infer("sensors", [late], timeout=10**9)
    assert outcomes(served, "deadline_exceeded") == before + 1


# Streams.


class Streamed:
    """A stream of Triton's client, and what it is told, as (id, answer or error)."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._heard: queue.Queue[Any] = queue.Queue()

    def send(self, model: str, *inputs: Any, id: str = "", **options: Any) -> None:
        self._client.async_stream_infer(model, list(inputs), request_id=id, **options)

    def handle_reply(self, result: Any, error: Any) -> None:
        self._heard.put((result.get_response().id if result else "", result or error))

    def next(self) -> tuple[str, Any]:
        heard: tuple[str, Any] = self._heard.get(timeout=60)
        return heard


@contextmanager
def streamed(served: Server, **options: Any) -> Iterator[Streamed]:
    with triton.InferenceServerClient(served.grpc) as client:
        stream = Streamed(client)
        client.start_stream(stream.handle_reply, **options)
        yield stream


def test_sequences_on_one_stream_are_each_answered_as_the_whole(served: Server) -> None:
    sequences: dict[int | str, Any] = {1: ROWS, 2: -ROWS, "three": ROWS[::-1] * 2, 2**63 - 1: ROWS * 0}
    expected = [one["value"] for one in infer(served, "sensor-forecast", [one.tolist() for one in sequences.values()])]
    with streamed(served) as stream:
        for step in range(len(ROWS)):
            for id, rows in sequences.items():
                flags: dict[str, Any] = {"sequence_start": step == 0, "sequence_end": step == len(ROWS) - 1}
                chunk = given("inputs", rows[None, step : step + 1])
                stream.send("sensor-forecast", chunk, id=f"{id}:{step}", sequence_id=id, **flags)
        heard = [stream.next() for _ in range(len(ROWS) * len(sequences))]
    assert [id for id, _ in heard] == [f"{id}:{step}" for step in range(len(ROWS)) for id in sequences]
    last = [answer.as_numpy("value")[0].tolist() for _, answer in heard[-len(sequences) :]]
    assert last == [pytest.approx(one, abs=1e-5) for one in expected]
    assert {answer.get_response().parameters["sequence_steps"].int64_param for _, answer in heard[-4:]} == {len(ROWS)}
    assert served.metric("seqserve_sessions") == 0


def test_a_sequence_that_ends_begins_anew_on_the_same_stream(served: Server) -> None:
    with streamed(served) as stream:
        for step in range(60):
            flags: dict[str, Any] = {"sequence_start": step % 3 == 0, "sequence_end": step % 3 == 2}
            stream.send("sensors", given("inputs", ROWS[None, :1]), sequence_id=9, **flags)
        steps = [stream.next()[1].get_response().parameters["sequence_steps"].int64_param for _ in range(60)]
    assert steps == [1, 2, 3] * 20


def test_answers_come_in_the_order_of_the_requests_whoever_is_ready_first(served: Server) -> None:
    with streamed(served) as stream:
        stream.send("sensors", given("inputs", SLOW[None, :10_000]), id="slow")
        for number in range(100):
            stream.send("sensors", given("inputs", ROWS[None]), id=str(number))
        assert [stream.next()[0] for _ in range(101)] == ["slow", *map(str, range(100))]


def test_an_error_is_one_answer_of_a_stream_and_its_call_goes_on(served: Server) -> None:
    requests = [
        raw("inputs", "FP32", [1, 1, 3], bytes(12)),
        raw("inputs", "FP32", [1, 1, 3], bytes(13)),
        raw("inputs", "FP32", [1, 1, 3], bytes(LIMIT)),
        raw("inputs", "FP32", [1, 1, 3], bytes(12), model="nobody"),
        raw("inputs", "FP32", [1, 1, 3], bytes(12)),
    ]
    requests[3].parameters["sequence_id"].int64_param = 4
    with grpc.insecure_channel(served.grpc) as channel:
        answers = list(stream_of(channel, requests))
    told = [(answer.infer_response.id, answer.error_message) for answer in answers]
    assert [id for id, _ in told] == ["mine", "mine", "", "mine", "mine"]
    assert told[0][1] == told[4][1] == ""
    assert ["13 bytes" in told[1][1], "SEQSERVE_MAX_BODY_BYTES" in told[2][1], "nobody" in told[3][1]] == [True] * 3


def stream_of(channel: grpc.Channel, requests: list[Any], **options: Any) -> Any:
    """The answers on a call that is half closed when all is sent."""
    opened = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer", Said.SerializeToString, service_pb2.ModelStreamInferResponse.FromString
    )
    return opened(iter(requests), timeout=60, **options)


def test_the_first_error_ends_the_stream_of_who_wants_that(channel: grpc.Channel) -> None:
    good, bad = raw("inputs", "FP32", [1, 1, 3], bytes(12)), raw("inputs", "FP32", [1, 1, 3], bytes(13))
    answers = stream_of(channel, [good, bad, good], metadata=[("triton_grpc_error", "true")])
    assert next(answers).infer_response.id == "mine"
    with pytest.raises(grpc.RpcError) as ended:
        next(answers)
    assert (ended.value.code(), "13 bytes" in ended.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_who_waits_for_a_final_response_is_told_that_each_is_one(served: Server) -> None:
    with streamed(served) as stream:
        stream.send("sensors", given("inputs", ROWS[None]), enable_empty_final_response=True)
        stream.send("sensors", given("inputs", ROWS[None]))
        final, plain = [stream.next()[1].get_response().parameters for _ in range(2)]
    assert final["triton_final_response"].bool_param
    assert "triton_final_response" not in plain


def test_a_stream_that_is_cancelled_gives_up_what_it_asked_for(served: Server) -> None:
    gone = outcomes(served, "client_gone")
    with grpc.insecure_channel(served.grpc) as channel:
        answers = stream_of(channel, [raw("inputs", "FP32", [1, 20_000, 3], SLOW[:20_000].tobytes())] * 20)
        eventually(lambda: served.metric("seqserve_requests_in_flight") >= 15, 10)
        answers.cancel()
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 0, 5)
    assert outcomes(served, "client_gone") >= gone + 15


def test_callers_who_come_and_go_leave_nothing_behind(served: Server) -> None:
    """Cancelled at every moment: before, while and after they are read and answered."""

    async def visit(moment: float) -> None:
        async def requests() -> AsyncIterator[Any]:
            for _ in range(5):
                yield raw("inputs", "FP32", [1, 1, 3], bytes(12))

        async with grpc.aio.insecure_channel(served.grpc) as channel:
            opened = channel.stream_stream(f"{SERVICE}/ModelStreamInfer", Said.SerializeToString)(requests())
            single = channel.unary_unary(f"{SERVICE}/ModelInfer", Said.SerializeToString)(
                raw("inputs", "FP32", [1, 500, 3], SLOW[:500].tobytes())
            )
            await asyncio.sleep(moment)
            opened.cancel()
            single.cancel()

    async def visits() -> None:
        await asyncio.gather(*[visit(0.002 * number) for number in range(40)])

    asyncio.run(visits())
    eventually(lambda: served.metric("seqserve_requests_in_flight") == 0, 5)
    assert not served.events("bug") + served.events("server said")
    accepted, outcomes = served.metric("seqserve_requests_accepted_total"), served.metric("seqserve_requests_total")
    assert accepted == outcomes
