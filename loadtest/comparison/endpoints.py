"""The endpoints that are compared, and the bytes of their requests. Each request has one text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from loadtest.callers import JSON, Target
from loadtest.oip_requests import METHOD, PATH
from service.frontend.oip.json import HEADER_LENGTH

HTTP, GRPC = "http", "grpc"
BINARY = "Content-Type: application/octet-stream"
TEXT_INPUT, SCORES = "text", "scores"

WriteRequest = Callable[[str, str], bytes]
"""Returns the bytes of a request from the model's name and a text."""


class Endpoint(NamedTuple):
    """One endpoint of a server. transport, reader: as in `generator.job.Job`; model: its name in requests, if not the model's own."""

    name: str
    transport: str
    reader: str
    write: WriteRequest
    model: str | None = None


def infer(model: str, text: str) -> bytes:
    return _post("/infer", json.dumps({"model": model, "inputs": [text]}).encode(), JSON)


def predict(model: str, text: str) -> bytes:
    return _post("/predict", json.dumps({"text": text}).encode(), JSON)


def prediction(model: str, text: str) -> bytes:
    return _post(f"/predictions/{model}", text.encode(), "Content-Type: text/plain")


def health(model: str, text: str) -> bytes:
    return b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def oip_binary(model: str, text: str) -> bytes:
    raw = _bytes_tensor(text)
    tensor = {"name": TEXT_INPUT, "shape": (1, 1), "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    outputs = [{"name": SCORES, "parameters": {"binary_data": True}}]
    header = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    return _post(f"/v2/models/{model}/infer", header + raw, BINARY, f"{HEADER_LENGTH}: {len(header)}")


def oip_json(model: str, text: str) -> bytes:
    """Without an id MLServer would invent one: answers to equal requests would differ."""
    tensor = {"name": TEXT_INPUT, "shape": (1, 1), "datatype": "BYTES", "data": [text]}
    return _post(f"/v2/models/{model}/infer", json.dumps({"id": "1", "inputs": [tensor]}).encode(), JSON)


def oip_message(model: str, text: str) -> bytes:
    request = METHOD.request_type(model_name=model, id="1", raw_input_contents=[_bytes_tensor(text)])
    request.inputs.add(name=TEXT_INPUT, datatype="BYTES", shape=(1, 1))
    request.outputs.add(name=SCORES)
    serialised: bytes = request.SerializeToString()
    return serialised


def _post(path: str, body: bytes, *headers: str) -> bytes:
    return Target("127.0.0.1", 0, path).request(body, *headers)


def _bytes_tensor(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(4, "little") + encoded


INFER = Endpoint("/infer", HTTP, "infer", infer)
OIP_BINARY = Endpoint("OIP binary", HTTP, "last floats", oip_binary)
OIP_GRPC = Endpoint("gRPC", GRPC, "last floats", oip_message)
PREDICT = Endpoint("HTTP", HTTP, "scores", predict)
GRPC_METHOD = PATH
