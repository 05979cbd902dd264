"""Requests of the Open Inference Protocol with raw tensors: after JSON over REST, and in a gRPC message."""

from __future__ import annotations

import json
from typing import Any

from numpy.typing import NDArray

from loadtest.target import Target
from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.oip.protobuf import METHODS, SERVICE

BINARY = "Content-Type: application/octet-stream"
METHOD = METHODS["ModelInfer"]
PATH = f"/{SERVICE}/ModelInfer"
INPUT, TEXT_INPUT, SCORES = "inputs", "text", "scores"


def message(model: str, rows: NDArray[Any]) -> bytes:
    """Return a serialised ModelInferRequest with rows of float32."""
    request = METHOD.request_type(model_name=model, raw_input_contents=[rows.tobytes()])
    request.inputs.add(name=INPUT, datatype="FP32", shape=rows.shape)
    serialised: bytes = request.SerializeToString()
    return serialised


def text_message(model: str, text: str) -> bytes:
    """Return a serialised ModelInferRequest with one text."""
    request = METHOD.request_type(model_name=model, id="1", raw_input_contents=[_bytes_tensor(text)])
    request.inputs.add(name=TEXT_INPUT, datatype="BYTES", shape=(1, 1))
    request.outputs.add(name=SCORES)
    serialised: bytes = request.SerializeToString()
    return serialised


def binary_text(model: str, text: str) -> bytes:
    """Return the bytes of a POST with one text as a raw tensor, which asks for raw scores."""
    raw = _bytes_tensor(text)
    tensor = {"name": TEXT_INPUT, "shape": (1, 1), "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    outputs = [{"name": SCORES, "parameters": {"binary_data": True}}]
    header = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    target = Target("127.0.0.1", 0, f"/v2/models/{model}/infer")
    return target.request(header + raw, BINARY, f"{HEADER_LENGTH}: {len(header)}")


def _bytes_tensor(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(4, "little") + encoded
