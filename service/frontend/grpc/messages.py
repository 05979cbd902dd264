"""Usual ModelInfer messages, read and written by hand, which costs a tenth of message objects.

A message with anything unusual in it is left to `protobuf`, which decides what is valid. Both return the same for the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from service.frontend.oip.binary_forms import MAX_FORM_BYTES
from service.frontend.oip.tensors import BYTES, Tensor, decode, encode
from service.frontend.oip.types import InferRequest, InferResponse, RequestedOutput
from service.frontend.oip.wire import NotAMessage, read_number
from service.frontend.run.catalog import ServedModel
from service.ipc.messages.inference import FEATURES, Answer
from service.modeling.spec.heads import ClassifyHead

MAX_SIMPLE_FIELDS = 16
"""Requests with more than this are not read by hand."""
MAX_KEPT_BYTES = 256
"""Descriptions of tensors up to this size are remembered."""
MAX_DIMENSION = 2**63 - 1
"""Larger numbers are negative, or invalid."""
_LENGTH_DELIMITED = 2
_NAME, _VERSION, _ID, _INPUTS, _OUTPUTS, _RAW = 1, 2, 3, 5, 6, 7
_OUTPUT_CONTENTS = 6
_ID_TAG, _RAW_TAG = _ID << 3 | _LENGTH_DELIMITED, _RAW << 3 | _LENGTH_DELIMITED


class _Unusual(Exception):
    """A message that is not read by hand."""


def read_request(data: bytes) -> InferRequest | None:
    """Return a request of names, tensors with raw contents and requested outputs, None for any other; raises a ServiceError."""
    try:
        return _read_request(data)
    except (_Unusual, NotAMessage, IndexError, UnicodeDecodeError):
        return None


class MessageHead(NamedTuple):
    """A request in parts. key: all fields but the id, byte for byte, without the values and with their size."""

    key: bytes
    id: str
    values: memoryview


def split_head(data: bytes) -> MessageHead | None:
    """Return the parts of a request that ends with its only raw contents; None for other requests, and for long heads."""
    try:
        return _split_head(data)
    except (_Unusual, NotAMessage, IndexError, UnicodeDecodeError):
        return None


def _split_head(data: bytes) -> MessageHead:
    at, id, id_start, id_end = 0, "", 0, 0
    while at <= MAX_FORM_BYTES:
        tag, size, content = data[at], data[at + 1], at + 2
        if size > 127:
            size, content = read_number(data, at + 1)
        end = content + size
        if tag == _RAW_TAG:
            if end != len(data):
                break
            key = data[:id_start] + data[id_end:content] if id_end else data[:content]
            return MessageHead(key, id, memoryview(data)[content:])
        if tag & 7 != _LENGTH_DELIMITED or tag > 127:
            break
        if tag == _ID_TAG:
            if id_end:
                break
            id, id_start, id_end = data[content:end].decode(), at, end
        at = end
    raise _Unusual


def _read_request(data: bytes) -> InferRequest:
    texts = {_NAME: "", _VERSION: "", _ID: ""}
    descriptions: list[tuple[str, str, tuple[int, ...]]] = []
    outputs: list[RequestedOutput] = []
    contents: list[memoryview] = []
    whole, at, end, fields = memoryview(data), 0, len(data), 0
    while at < end:
        tag, size = data[at], data[at + 1]
        at += 2
        if size > 127:
            size, at = read_number(data, at - 1)
        field, fields = tag >> 3, fields + 1
        if tag & 7 != _LENGTH_DELIMITED or tag > 127 or at + size > end or fields > MAX_SIMPLE_FIELDS:
            raise _Unusual
        if field == _RAW:
            contents.append(whole[at : at + size])
        elif field <= _ID and field in texts:
            texts[field] = data[at : at + size].decode()
        elif field == _INPUTS and size <= MAX_KEPT_BYTES:
            descriptions.append(_description(data[at : at + size]))
        elif field == _OUTPUTS and size <= MAX_KEPT_BYTES:
            outputs.append(_requested(data[at : at + size]))
        else:
            raise _Unusual
        at += size
    if not contents or len(contents) != len(descriptions):
        raise _Unusual
    inputs = [decode(*description, raw) for description, raw in zip(descriptions, contents, strict=True)]
    return InferRequest(texts[_NAME], texts[_VERSION], texts[_ID], {}, inputs, outputs)


@lru_cache(maxsize=1024)
def _description(data: bytes) -> tuple[str, str, tuple[int, ...]]:
    """Return name, datatype and shape of an input without parameters and typed contents."""
    name = datatype = ""
    shape: list[int] = []
    for field, value in _strings(data):
        if field == 1:
            name = value.decode()
        elif field == 2:
            datatype = value.decode()
        elif field == 3:
            at = 0
            while at < len(value):
                size, at = read_number(value, at)
                if size > MAX_DIMENSION:
                    raise _Unusual
                shape.append(size)
        else:
            raise _Unusual
    return name, datatype, tuple(shape)


@lru_cache(maxsize=1024)
def _requested(data: bytes) -> RequestedOutput:
    """Return a requested output without parameters."""
    name = ""
    for field, value in _strings(data):
        if field != 1:
            raise _Unusual
        name = value.decode()
    return RequestedOutput(name)


def _strings(data: bytes) -> list[tuple[int, bytes]]:
    """Return the fields of a small message, which must all be strings, messages or packed numbers."""
    fields, at = [], 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        if tag & 7 != _LENGTH_DELIMITED or tag > 127:
            raise _Unusual
        if size > 127:
            size, at = read_number(data, at + 1)
        else:
            at += 2
        if at + size > len(data):
            raise _Unusual
        fields.append((tag >> 3, data[at : at + size]))
        at += size
    return fields


def write_response(response: InferResponse) -> bytes:
    """Return a ModelInferResponse without parameters."""
    assert not response.parameters
    return b"".join((write_start(response.model, response.version, response.id), *output_parts(response)))


def output_parts(response: InferResponse) -> list[bytes | memoryview]:
    """Return the outputs of a ModelInferResponse, in parts. Large arrays are not copied."""
    parts: list[bytes | memoryview] = [_output(tensor.name, tensor.datatype, tensor.shape) for tensor in response.outputs]
    for tensor in response.outputs:
        data = encode(tensor)
        parts += field_start(_OUTPUT_CONTENTS, len(data)), data
    return parts


def write_start(model: str, version: str, id: str) -> bytes:
    """Return the fields of a response that come before its outputs."""
    return _identity(model, version) + (_text(_ID, id) if id else b"")


class ClassifyWriter:
    """Writes the responses of one model with a classify head to requests for all outputs of the head.

    Everything that does not depend on the answer is prepared here.
    """

    def __init__(self, model: ServedModel, head: ClassifyHead) -> None:
        self._identity = _identity(model.spec.name, model.version)
        self._labels = [encode(Tensor("label", BYTES, (1,), [label.encode()])) for label in head.labels]
        self._row_bytes = len(head.labels) * np.dtype(FEATURES).itemsize

    def write_all(self, answers: Sequence[tuple[str, Answer, bytes | memoryview]]) -> list[bytes] | None:
        """Return the response to each request, of its id, its answer and the arrays; None if a score is not finite."""
        data = b"".join([data for _, _, data in answers])
        if len(data) % self._row_bytes:
            return None
        scores = np.frombuffer(data, FEATURES).reshape(-1, len(self._labels))
        if not np.isfinite(scores).all():
            return None
        picks, best = scores.argmax(axis=1).tolist(), scores.max(axis=1).tobytes()
        responses, row = [], 0
        for id, answer, part in answers:
            count = answer.scores[0]
            labels = b"".join([self._labels[pick] for pick in picks[row : row + count]])
            heads = _classify_outputs(count, len(self._labels))
            values = _field(6, labels) + _field(6, best[4 * row : 4 * (row + count)]) + _field(6, part)
            responses.append(self._identity + (_text(_ID, id) if id else b"") + heads + values)
            row += count
        return responses

    def accepts(self, answer: Answer, data: bytes | memoryview) -> bool:
        """Return whether an answer has scores and nothing else, and belongs to no session."""
        return len(answer.scores) == 2 and answer.scores[0] * self._row_bytes == len(data) and not answer.session_steps


@lru_cache(maxsize=1024)
def _classify_outputs(count: int, labels: int) -> bytes:
    return (
        _output("label", BYTES, (count, 1)) + _output("score", "FP32", (count, 1)) + _output("scores", "FP32", (count, labels))
    )


@lru_cache(maxsize=1024)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return the description of an output."""
    dimensions = b"".join([_number(size) for size in shape])
    return _field(5, _text(1, name) + _text(2, datatype) + (_field(3, dimensions) if dimensions else b""))


@lru_cache(maxsize=256)
def _identity(model: str, version: str) -> bytes:
    return _text(1, model) + _text(2, version)


def _text(number: int, value: str) -> bytes:
    """Return a string field, which is left out if it is empty."""
    return _field(number, value.encode()) if value else b""


def _field(number: int, value: bytes | memoryview) -> bytes:
    return field_start(number, len(value)) + value


def field_start(number: int, size: int) -> bytes:
    """Return the bytes before the content of a field of bytes."""
    if size < 128:
        return bytes((number << 3 | _LENGTH_DELIMITED, size))
    return bytes((number << 3 | _LENGTH_DELIMITED,)) + _number(size)


def _number(value: int) -> bytes:
    octets = bytearray()
    while value > 127:
        octets.append(value & 127 | 128)
        value >>= 7
    octets.append(value)
    return bytes(octets)
