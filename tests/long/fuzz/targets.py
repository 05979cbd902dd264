"""The parsers of bytes from clients, each as a function that parses them and packs the inputs for models of every kind of input.

The first bytes of an input of some targets select values outside the body: the kind of a WebSocket message, the header of a binary body.
"""

from __future__ import annotations

import json as standard_json
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from service.errors import ModelError, ServiceError
from service.frontend.grpc.messages import read_request, split_request
from service.frontend.oip import infer as oip_infer
from service.frontend.oip import json
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.parameters import session_id
from service.frontend.oip.types import InferRequest
from service.frontend.rest.chunks import ChunkBody
from service.frontend.rest.infer import InferBody, engine_request, pack_inputs
from service.frontend.run import validation
from service.frontend.run.catalog import ServedModel
from service.frontend.run.head_outputs import input_field
from service.ipc import session_file
from service.modeling import spec as specs
from service.modeling.spec import ModelSpec
from service.modeling.tokenizer import Tokenizer
from service.settings import Settings

MODELS = Path(__file__).resolve().parents[3] / "models"
IDS = {
    "name": "speller",
    "precision": "float32",
    "input": {"kind": "ids", "vocabulary": 12, "max_steps": 50},
    "layers": [{"kind": "embedding", "width": 4}, {"kind": "lstm", "hidden": 5}],
    "head": {"kind": "next", "top": 4},
}
MAX_SECONDS = 0.25
"""Processor time of one parse, with the instrumented code, which is several times as slow."""
SETTINGS = Settings()


class TooSlow(Exception):
    """A parse took more processor time than MAX_SECONDS."""


def checked(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return the target as the fuzzer calls it. It raises an exception for a finding."""

    def run(data: bytes) -> None:
        began = time.thread_time()
        with suppress(ServiceError):
            target(data)
        seconds = time.thread_time() - began
        if seconds > MAX_SECONDS:
            raise TooSlow(f"{seconds:.2f} s of processor time for {len(data)} bytes")

    return run


def session_state(data: bytes) -> None:
    session_file.read(data)


def infer_body(data: bytes) -> None:
    body = InferBody.parse(data)
    for model in served_models():
        with suppress(ServiceError):
            engine_request(body, pack_inputs(body, model, SETTINGS), model, SETTINGS, 0.0, input_field)


def websocket_message(data: bytes) -> None:
    chunk = ChunkBody.parse(data[1:]) if data[:1] == b"t" else ChunkBody(data[1:])
    for model in served_models():
        with suppress(ServiceError):
            validation.pack_input(chunk.input, "input", model)


def oip_json(data: bytes) -> None:
    _run_oip(*json.parse_request(data, None, "model", ""))


def oip_binary(data: bytes) -> None:
    """The first two bytes are the header with the size of the JSON."""
    _run_oip(*json.parse_request(data[2:], int.from_bytes(data[:2], "little"), "model", ""))


def oip_raw(data: bytes) -> None:
    for model in served_models():
        with suppress(ServiceError):
            _run_oip(*json.parse_raw_sequence(data, model.spec, "model", ""))


def oip_protobuf(data: bytes) -> None:
    _run_oip(*read_request(split_request(data)))


def model_toml(data: bytes) -> None:
    folder = _model_folder()
    (folder / specs.MODEL).write_bytes(data)
    with suppress(ModelError):
        specs.read(folder)


def _run_oip(request: InferRequest, inputs: InputTensors) -> None:
    session = session_id(request.parameters)
    for model in served_models():
        with suppress(ServiceError):
            oip_infer.build_request(request, inputs, session, model, SETTINGS, arrived=0.0)


@cache
def served_models() -> list[ServedModel]:
    """Return three models, which take text, ids and features."""
    text, features = (specs.read(MODELS / name / "1") for name in ("question-type-lstm", "sensor-forecast"))
    tokenizer = Tokenizer.read(MODELS / text.name / "1", text)
    ids = ModelSpec.model_validate_json(standard_json.dumps(IDS))
    return [ServedModel(text, "1", tokenizer), ServedModel(ids, "1", None), ServedModel(features, "1", None)]


@cache
def _model_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="seqserve-fuzz-")) / "model" / "1"
    folder.mkdir(parents=True)
    return folder


TARGETS: dict[str, Callable[[bytes], None]] = {
    "session-state": session_state,
    "infer-body": infer_body,
    "websocket-message": websocket_message,
    "oip-json": oip_json,
    "oip-binary": oip_binary,
    "oip-raw": oip_raw,
    "oip-protobuf": oip_protobuf,
    "model-toml": model_toml,
}
