"""The endpoints that are compared, and the bytes of their requests. Each request has one text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from loadtest import oip_requests
from loadtest.target import JSON, Target

HTTP, GRPC = "http", "grpc"

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


def _post(path: str, body: bytes, *headers: str) -> bytes:
    return Target("127.0.0.1", 0, path).request(body, *headers)


INFER = Endpoint("/infer", HTTP, "infer", infer)
OIP_BINARY = Endpoint("OIP binary", HTTP, "last floats", oip_requests.binary_text)
OIP_GRPC = Endpoint("gRPC", GRPC, "last floats", oip_requests.text_message)
PREDICT = Endpoint("HTTP", HTTP, "scores", predict)
