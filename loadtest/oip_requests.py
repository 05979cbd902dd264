"""Rows of float32 as requests of the Open Inference Protocol have them raw: behind JSON, and in a gRPC message."""

from __future__ import annotations

import json
from typing import Any

from numpy.typing import NDArray

from service.frontend.oip.protobuf import METHODS, SERVICE

INPUT = "inputs"
METHOD = METHODS["ModelInfer"]
PATH = f"/{SERVICE}/ModelInfer"


def behind_json(rows: NDArray[Any]) -> tuple[bytes, int]:
    """The body, and how many bytes of it are JSON. The answer is to be raw, too."""
    tensor = {"name": INPUT, "datatype": "FP32", "shape": rows.shape, "parameters": {"binary_data_size": rows.nbytes}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + rows.tobytes(), len(header)


def message(model: str, rows: NDArray[Any]) -> bytes:
    """A ModelInferRequest as it goes over the wire."""
    asked = METHOD.takes(model_name=model, raw_input_contents=[rows.tobytes()])
    asked.inputs.add(name=INPUT, datatype="FP32", shape=rows.shape)
    serialised: bytes = asked.SerializeToString()
    return serialised
