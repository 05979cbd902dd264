"""No body occupies the event loop for long, whatever its content. Each test measures the longest callback of a whole request."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray

from service.errors import InvalidRequest, ServiceError, TooLarge
from service.frontend.app import build_app
from service.frontend.catalog import Catalog, ServedModel
from service.frontend.dispatch.dispatcher import Dispatcher
from service.frontend.inference import Frontend, SupervisorClient
from service.frontend.oip import wire
from service.frontend.oip.grpc_calls import read_request
from service.frontend.oip.limits import MAX_CLASSES, MAX_PARTS, MAX_TEXTS
from service.frontend.oip.protobuf import METHODS
from service.ipc.channel import Frame, encode
from service.ipc.messages import Answer, Request
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec import ModelSpec
from service.settings import Settings
from tests import models
from tests.frontend.callbacks import Callbacks, measured_callbacks, with_short_callbacks
from tests.frontend.dispatch.test_dispatcher import EngineProcess, meet, requests_of, run
from tests.frontend.test_request_path import connection

MIB = 1 << 20
FEATURES = 64
INFER = "/v2/models/sensors/infer"


class Engine:
    """Answers each request with zeros, in the place of a dispatcher."""

    ready = True

    def __init__(self) -> None:
        self.received: list[int] = []

    async def submit(self, request: Request, tail: bytes | memoryview) -> tuple[Answer, bytes]:
        self.received.append(len(tail))
        scores, steps = (len(request.lengths), 3), sum(request.lengths)
        sequence = (steps, 8) if request.returns.sequence else ()
        answer = Answer(scores=scores, steps=request.lengths, sequence=sequence)
        return answer, bytes(4 * (scores[0] * 3 + steps * 8 * bool(sequence)))


class Service:
    """A frontend in this process."""

    def __init__(self, specs: list[ModelSpec], runner: asyncio.Runner) -> None:
        self.engine, self.runner = Engine(), runner
        catalog = Catalog([ServedModel(spec, "1", None) for spec in specs], {})
        self.frontend = Frontend(
            Settings(), catalog, cast(Dispatcher, self.engine), Metrics(), Log("frontend"), cast(SupervisorClient, None)
        )
        self.app: FastAPI = build_app(self.frontend)

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Send a request. Return the status and the body of the reply, after a check of the callbacks."""

        def measure() -> tuple[tuple[int, Any], Callbacks]:
            with measured_callbacks() as callbacks:
                return self.send(path, body, **headers), callbacks

        return with_short_callbacks(measure)

    def send(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Send a request in pieces as uvicorn would. Return the status and the body of the reply."""
        sent_headers = {"host": "localhost", **headers}
        names = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent_headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": names,
        }
        pieces = [body[start : start + (MIB >> 2)] for start in range(0, len(body), MIB >> 2)] or [b""]
        events = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        events[-1]["more_body"] = False
        sent: list[Any] = []

        async def run() -> None:
            replied, waiting = asyncio.Event(), iter(events)

            async def receive() -> Any:
                await asyncio.sleep(0)
                event = next(waiting, None)
                if event is None:
                    await replied.wait()
                return event or {"type": "http.disconnect"}

            async def send(event: Any) -> None:
                sent.append(event)

            await self.app(cast(Any, scope), receive, send)
            replied.set()

        self.runner.run(run())
        return sent[0]["status"], json.loads(sent[1]["body"])

    def call_grpc(self, message: bytes) -> ServiceError | None:
        """Read a ModelInferRequest. Return its error, after a check of the callbacks."""

        async def run() -> ServiceError | None:
            await asyncio.sleep(0)
            try:
                async with read_request(message, self.frontend):
                    return None
            except ServiceError as error:
                return error

        def measure() -> tuple[ServiceError | None, Callbacks]:
            with measured_callbacks() as callbacks:
                return self.runner.run(run()), callbacks

        return with_short_callbacks(measure)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root: Path = tmp_path_factory.mktemp("models")
    specs = [models.sensors(root, features=FEATURES), models.sensors(root, "narrow", features=1), models.words(root)]
    with asyncio.Runner() as runner:
        made = Service(specs, runner)
        made.send("/infer", b"[" + b" " * MIB)  # starts the decoder, and completes the application
        yield made

        async def close() -> None:
            made.frontend.decoder.close()

        runner.run(close())


def rows(size: int, value: bytes = b"0.25") -> bytes:
    """Return rows of FEATURES numbers as JSON, about `size` bytes of it."""
    row = b"[" + b",".join([value] * FEATURES) + b"]"
    return b"[" + b",".join([row] * (size // (len(row) + 1))) + b"]"


def test_large_floats_of_infer(service: Service) -> None:
    text = rows(15 * MIB)
    status, reply = service.post("/infer", b'{"model":"sensors","inputs":[%b]}' % text)
    assert (status, len(reply["outputs"])) == (200, 1)
    assert service.engine.received[-1] == 4 * FEATURES * text.count(b"],[") + 4 * FEATURES


@pytest.mark.parametrize("element", [b"[]", b"0", b'""', b"{}"])
def test_millions_of_small_values_in_infer(service: Service, element: bytes) -> None:
    text = b",".join([element] * (2 * MIB // len(element)))
    status, reply = service.post("/infer", b'{"model":"sensors","inputs":[%b]}' % text)
    assert (status, reply["code"]) == (413, "too_large")


def test_large_floats_of_oip(service: Service) -> None:
    text = rows(8 * MIB)
    steps = text.count(b"],[") + 1
    tensor = b'{"name":"inputs","datatype":"FP32","shape":[1,%d,%d],"data":[%b]}' % (steps, FEATURES, text)
    status, reply = service.post(INFER, b'{"inputs":[%b]}' % tensor)
    assert (status, reply["outputs"][0]["name"]) == (200, "label"), reply
    assert service.engine.received[-1] == 4 * FEATURES * steps


@pytest.mark.parametrize("mebibytes", [1, 15])
def test_large_raw_tensor_over_rest(service: Service, mebibytes: int) -> None:
    values = np.ones((1, mebibytes * MIB // (4 * FEATURES), FEATURES), np.float32)
    parameters = {"binary_data_size": values.nbytes}
    header = json.dumps(
        {"inputs": [{"name": "inputs", "datatype": "FP32", "shape": values.shape, "parameters": parameters}]}
    ).encode()
    headers = {"inference_header_content_length": str(len(header))}
    status, reply = service.post(INFER, header + values.tobytes(), **headers)
    assert status == 200, reply
    assert service.engine.received[-1] == values.nbytes
    values[0, -1, -1] = np.nan
    status, reply = service.post(INFER, header + values.tobytes(), **headers)
    assert (status, reply["field"]) == (400, f"inputs[0][{values.shape[1] - 1}][{FEATURES - 1}]")


def test_mebibyte_of_raw_floats_takes_little_time(tmp_path: Path) -> None:
    """The processor time of the frontend from the first byte to the last write, without reading the socket of the client.

    The least of several requests counts. This process, unlike a frontend (FRONTEND_ENVIRONMENT), returns freed memory
    to the kernel and gets it again for each request: that costs up to another millisecond.
    """
    spec = models.sensors(tmp_path, features=FEATURES)
    values = np.ones((1, MIB // (4 * FEATURES), FEATURES), np.float32)
    message = raw_request(values)
    pieces = [message[start : start + (1 << 16)] for start in range(0, len(message), 1 << 16)]
    times: list[float] = []

    async def test(dispatcher: Dispatcher, metrics: Metrics) -> None:
        engine = await meet(dispatcher)
        catalog = Catalog([ServedModel(spec, "1", None)], {})
        frontend = Frontend(Settings(), catalog, dispatcher, metrics, Log("frontend"), cast(SupervisorClient, None))
        protocol = connection(frontend)
        for _ in range(20):
            with measured_callbacks() as callbacks:
                start = time.thread_time()
                for piece in pieces:
                    protocol.data_received(piece)
                seconds = time.thread_time() - start
                [block] = await asyncio.to_thread(read_frames, engine)
            [frame] = requests_of(block)
            assert frame.tail == values.tobytes()
            engine.send(encode(Answer(scores=(1, 3), steps=[values.shape[1]]), frame.id, (bytes(12),)))
            while protocol._call is not None:
                await asyncio.sleep(0)
            times.append(seconds + callbacks.total_seconds)

    run(test, channel_bytes=64 * MIB)
    assert min(times) < 0.004, "twice what it takes here, for a machine that is half as fast"


def read_frames(engine: EngineProcess) -> list[Frame]:
    """Return the next frames that the frontend sends. In a thread this takes no processor time of the frontend's."""
    frames: list[Frame] = []
    while not frames:
        frames = engine.channel.receive()
        time.sleep(0.0001)
    return frames


def raw_request(values: NDArray[np.float32]) -> bytes:
    parameters = {"binary_data_size": values.nbytes}
    tensor = {"name": "inputs", "datatype": "FP32", "shape": values.shape, "parameters": parameters}
    header = json.dumps({"inputs": [tensor]}).encode()
    lengths = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n" % (len(header), len(header) + values.nbytes)
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n%b%b" % (INFER.encode(), lengths, header, values.tobytes())


def test_large_raw_tensor_over_grpc(service: Service) -> None:
    message = METHODS["ModelInfer"].request_type(model_name="sensors")
    steps = 15 * MIB // (4 * FEATURES)
    message.inputs.add(name="inputs", datatype="FP32", shape=[1, steps, FEATURES])
    message.raw_input_contents.append(bytes(4 * FEATURES * steps))
    assert service.call_grpc(message.SerializeToString()) is None


def test_large_typed_tensor_over_grpc(service: Service) -> None:
    message = METHODS["ModelInfer"].request_type(model_name="sensors")
    tensor = message.inputs.add(name="inputs", datatype="FP32", shape=[1, MIB // FEATURES, FEATURES])
    tensor.contents.fp32_contents.extend([0.5] * MIB)
    assert service.call_grpc(message.SerializeToString()) is None


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_gzip_of_a_million_parts(service: Service, part: str) -> None:
    parts: dict[str, bytes] = {"inputs": b"[]", "outputs": b"[]"}
    element = {"inputs": b'{"name":"","datatype":"","shape":[]}', "outputs": b'{"name":""}'}[part]
    parts[part] = b"[%b]" % b",".join([element] * (15 * MIB // (len(element) + 1)))
    body = gzip.compress(b'{"inputs":%b,"outputs":%b}' % (parts["inputs"], parts["outputs"]), 9)
    assert len(body) < 64 << 10
    status, reply = service.post(INFER, body, content_encoding="gzip")
    assert (status, reply["field"]) == (413, part)


def test_gzip_of_nothing_but_zeros(service: Service) -> None:
    status, reply = service.post(INFER, gzip.compress(bytes(16 * MIB)), content_encoding="gzip")
    assert (status, reply["code"]) == (400, "invalid_request")


def test_small_json_with_many_parts(service: Service) -> None:
    for part in ("inputs", "outputs"):
        body: dict[str, Any] = {"inputs": [], "outputs": []}
        body[part] = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}] * (MAX_PARTS + 1)
        status, reply = service.post(INFER, json.dumps(body).encode())
        assert (status, reply["field"]) == (413, part)
        assert str(MAX_PARTS) in reply["error"]
    status, reply = service.post(INFER, json.dumps({"inputs": [], "parameters": {str(i): 1 for i in range(65)}}).encode())
    assert (status, reply["field"]) == (413, "parameters")


def test_millions_of_raw_texts(service: Service) -> None:
    """Each element of BYTES takes only 4 bytes or more, but becomes a bytes object."""
    count = 3 * MIB
    tensor = {"name": "text", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    header = json.dumps({"inputs": [tensor]}).encode()
    length = str(len(header))
    status, reply = service.post(INFER, header + bytes(4 * count), inference_header_content_length=length)
    assert (status, reply["field"]) == (413, "text")
    assert str(MAX_TEXTS) in reply["error"]


def test_classification_of_many_entries(service: Service) -> None:
    values = {"name": "inputs", "datatype": "FP32", "shape": [1, 1, FEATURES], "data": [1] * FEATURES}
    request = {"inputs": [values], "outputs": [{"name": "scores", "parameters": {"classification": 10**9}}]}
    status, reply = service.post(INFER, json.dumps(request).encode())
    assert status == 200, "all three labels"
    assert len(reply["outputs"][0]["data"]) == 3
    assert MAX_CLASSES < 64 * 1000


FIELD_TAGS = {"parameters": b"\x22", "inputs": b"\x2a", "outputs": b"\x32", "raw_input_contents": b"\x3a"}


@pytest.mark.parametrize("part", FIELD_TAGS)
def test_message_of_a_million_empty_parts(service: Service, part: str) -> None:
    error = service.call_grpc((FIELD_TAGS[part] + b"\0") * MIB)
    assert isinstance(error, TooLarge)
    assert error.field == part


def test_message_of_a_million_unknown_fields(service: Service) -> None:
    assert isinstance(service.call_grpc(b"\xf8\x7f\0" * MIB), TooLarge)


@pytest.mark.parametrize("end", [b"\x2a\xff\xff\xff\xff\x0f", b"\x2a\x05", b"\x80" * 12, b"\x2b", b"\x0d\0", b"\x09\0\0"])
def test_broken_message_is_refused_as_by_the_library(service: Service, end: bytes) -> None:
    start = METHODS["ModelInfer"].request_type(id="x" * wire.MAX_UNSCANNED_BYTES).SerializeToString()
    assert isinstance(service.call_grpc(start + end), InvalidRequest)
    assert isinstance(service.call_grpc(end), InvalidRequest), "the library"


def test_split_message_is_the_message() -> None:
    whole = METHODS["ModelInfer"].request_type(model_name="m", id="ä" * 40)
    whole.parameters["a"].double_param = 2.5
    for index in range(5):
        whole.inputs.add(name=f"x{index}", shape=[1, 300])
        whole.raw_input_contents.append(bytes([index]) * index * 100)
    data = whole.SerializeToString() + struct.pack("<BI", 0xFD, 1)[:1] + b"\x7f\1\2\3\4"
    split = wire.split(data)
    assert [bytes(raw) for raw in split.raw_contents] == list(whole.raw_input_contents)
    rest = METHODS["ModelInfer"].request_type.FromString(split.message)
    del whole.raw_input_contents[:]
    assert (rest.inputs, rest.parameters["a"], rest.id) == (whole.inputs, whole.parameters["a"], whole.id)
    assert wire.request_id(data) == whole.id
    assert wire.request_id(data[:-1]) == "", "not a message"
    assert wire.structured_bytes(data) == len(split.message)


def test_management_requests_are_small(service: Service) -> None:
    for path in ("/v2/repository/index", "/v2/repository/models/sensors/load", "/sessions/a/fork"):
        status, reply = service.post(path, b" " * (64 << 10) + b"{}", content_type="application/json")
        assert (status, reply["code"]) == (413, "too_large")


def test_large_sequence_of_a_reply(service: Service) -> None:
    body = {"model": "narrow", "inputs": [[[0.5]] * 8000], "return": ["sequence"]}
    status, reply = service.post("/infer", json.dumps(body).encode())
    assert status == 200
    assert np.shape(reply["outputs"][0]["sequence"]) == (8000, 8)
