"""How a message is split without the protobuf library, and how many parts a request may have."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from service.errors import InvalidRequest, TooLarge
from service.frontend.oip import wire
from service.frontend.oip.grpc_calls import read_request
from service.frontend.oip.json import HEADER_LENGTH
from service.frontend.oip.limits import MAX_PARTS, MAX_TEXTS
from service.frontend.oip.protobuf import METHODS
from tests.frontend.in_process import InProcess
from tests.frontend.oip.test_rest import INFER, post

REQUEST = METHODS["ModelInfer"].request_type
FIELD_TAGS = {"parameters": b"\x22", "inputs": b"\x2a", "outputs": b"\x32", "raw_input_contents": b"\x3a"}


def test_json_with_many_parts_is_refused(heads: InProcess) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    for part in ("inputs", "outputs"):
        reply = post(heads, {"inputs": [], "outputs": [], part: [tensor] * (MAX_PARTS + 1)})
        assert (reply.status_code, reply.json()["field"]) == (413, part) and str(MAX_PARTS) in reply.json()["error"]
    reply = post(heads, {"inputs": [], "parameters": {str(number): 1 for number in range(65)}})
    assert (reply.status_code, reply.json()["field"]) == (413, "parameters")


def test_many_raw_texts_are_refused(heads: InProcess) -> None:
    """Each element of BYTES takes only 4 bytes or more, but becomes a bytes object."""
    count = MAX_TEXTS + 1
    tensor = {"name": "text", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    header = json.dumps({"inputs": [tensor]}).encode()
    reply = post(heads, header + bytes(4 * count), INFER, headers={HEADER_LENGTH: str(len(header))})
    assert (reply.status_code, reply.json()["field"]) == (413, "text") and str(MAX_TEXTS) in reply.json()["error"]


def test_management_requests_are_small(heads: InProcess) -> None:
    for path in ("/v2/repository/index", "/v2/repository/models/sensors/load", "/sessions/a/fork"):
        reply = post(heads, b" " * (64 << 10) + b"{}", path, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["code"]) == (413, "too_large")


def refusal(heads: InProcess, message: bytes) -> Exception:
    """Return the error of a ModelInferRequest."""

    async def read() -> None:
        async with read_request(message, heads.frontend):
            pass

    with pytest.raises((InvalidRequest, TooLarge)) as raised:
        heads.run(read())
    return raised.value


def test_message_of_many_parts_is_refused(heads: InProcess) -> None:
    for part, tag in FIELD_TAGS.items():
        error: Any = refusal(heads, (tag + b"\0") * 100_000)
        assert (type(error), error.field) == (TooLarge, part)
    assert isinstance(refusal(heads, b"\xf8\x7f\0" * 100_000), TooLarge), "unknown fields"


@pytest.mark.parametrize("end", [b"\x2a\xff\xff\xff\xff\x0f", b"\x2a\x05", b"\x80" * 12, b"\x2b", b"\x0d\0", b"\x09\0\0"])
def test_broken_message_is_refused_as_by_the_library(heads: InProcess, end: bytes) -> None:
    start = REQUEST(id="x" * wire.MAX_UNSCANNED_BYTES).SerializeToString()
    assert isinstance(refusal(heads, start + end), InvalidRequest)
    assert isinstance(refusal(heads, end), InvalidRequest), "the library"


def test_split_message_is_the_message() -> None:
    whole = REQUEST(model_name="m", id="ä" * 40)
    whole.parameters["a"].double_param = 2.5
    for index in range(5):
        whole.inputs.add(name=f"x{index}", shape=[1, 300])
        whole.raw_input_contents.append(bytes([index]) * index * 100)
    data = whole.SerializeToString() + struct.pack("<BI", 0xFD, 1)[:1] + b"\x7f\1\2\3\4"
    split = wire.split(data)
    assert [bytes(raw) for raw in split.raw_contents] == list(whole.raw_input_contents)
    rest = REQUEST.FromString(split.message)
    del whole.raw_input_contents[:]
    assert (rest.inputs, rest.parameters["a"], rest.id) == (whole.inputs, whole.parameters["a"], whole.id)
    assert wire.request_id(data) == whole.id
    assert wire.request_id(data[:-1]) == "", "not a message"
    assert wire.structured_bytes(data) == len(split.message)
