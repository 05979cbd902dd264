"""Rows of float32 as raw tensors of the Open Inference Protocol: after JSON, and in a gRPC message."""

from __future__ import annotations

import json
from typing import Any

from numpy.typing import NDArray

from service.frontend.oip.protobuf import METHODS, SERVICE

INPUT = "inputs"
METHOD = METHODS["ModelInfer"]
PATH = f"/{SERVICE}/ModelInfer"


def behind_json(rows: NDArray[Any]) -> tuple[bytes, int]:
    """Return a body that asks for raw outputs, and the number of its bytes that are JSON."""
    tensor = {"name": INPUT, "datatype": "FP32", "shape": rows.shape, "parameters": {"binary_data_size": rows.nbytes}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + rows.tobytes(), len(header)


def message(model: str, rows: NDArray[Any]) -> bytes:
    """Return a serialised ModelInferRequest."""
    request = METHOD.request_type(model_name=model, raw_input_contents=[rows.tobytes()])
    request.inputs.add(name=INPUT, datatype="FP32", shape=rows.shape)
    serialised: bytes = request.SerializeToString()
    return serialised
