"""The messages of ModelInfer. A request is split by hand and its head read by the protobuf library; a response is written by hand.

The library copies the tensors of a request, and takes seconds for a message of two megabytes with a million empty inputs. Its objects for
a response cost ten times as much as the bytes. What does not depend on values is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from service.errors import InvalidInput, TooLarge
from service.frontend.http2.header_blocks import groups_of_seven_bits
from service.frontend.oip.inputs import InputTensors, values_name
from service.frontend.oip.limits import MAX_PARTS, check_parts, too_many
from service.frontend.oip.metadata import OFFSETS
from service.frontend.oip.parameters import check_no_shared_memory, requested_output
from service.frontend.oip.protobuf import METHODS, PARAMETER_FIELDS, ProtoMessage, invalid_message, parameter_values
from service.frontend.oip.templates import MAX_HEAD_BYTES
from service.frontend.oip.tensors import BYTES, DATATYPES, Tensor, decode, encode, from_list, tensor_error
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run.catalog import ServedModel
from service.ipc.messages.inference import FEATURES, Answer
from service.modeling.spec.heads import ClassifyHead

MAX_KEPT_HEADS = 256
"""Heads of requests whose contents are remembered."""
RAW_CONTENTS = "raw_input_contents"
RESPONSE = METHODS["ModelInfer"].response_type
_ID, _RAW = 3, 7
_PARTS = {4: "parameters", 5: "inputs", 6: "outputs", _RAW: RAW_CONTENTS}
"""The repeated fields of a ModelInferRequest by number."""
_MAX_FIELDS = (len(_PARTS) + 1) * MAX_PARTS
_VARINT, _FIXED64, _LENGTH_DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_CONTENTS = 6


class SplitRequest(NamedTuple):
    """A ModelInferRequest in three parts. A client repeats the head: all fields but the id and the raw contents, which are not copied.

    refusal: of a message with too many parts, which is read only as far as its head may be valid.
    """

    head: bytes
    id: str
    contents: list[memoryview]
    refusal: TooLarge | None = None


def split_request(data: bytes) -> SplitRequest:
    """Return the parts of a message; raises InvalidRequest for bytes that are no message."""
    view, end, at, begin, depth = memoryview(data), len(data), 0, 0, 0
    id = ""
    kept: list[memoryview] = []
    contents: list[memoryview] = []
    numbers: list[int] = []
    try:
        while at < end and len(numbers) <= _MAX_FIELDS:
            start, tag = at, data[at]
            at += 1
            if tag > 127:
                tag, at = _read_number(data, start)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == _LENGTH_DELIMITED:
                size, content = data[at], at + 1
                if size > 127:
                    size, content = _read_number(data, at)
                at = content + size
            elif wire_type == _VARINT:
                _, at = _read_number(data, at)
            elif wire_type in (_START_GROUP, _END_GROUP):
                depth += 1 if wire_type == _START_GROUP else -1
            else:
                at += {_FIXED64: 8, _FIXED32: 4}.get(wire_type, end)
            if at > end:
                raise IndexError
            if wire_type != _LENGTH_DELIMITED or depth:
                number = 0
            numbers.append(number)
            if number in (_ID, _RAW):
                kept.append(view[begin:start])
                begin = at
                if number == _ID:
                    id = data[content:at].decode()
                else:
                    contents.append(view[content:at])
    except (IndexError, UnicodeDecodeError):
        raise invalid_message(METHODS["ModelInfer"].request_type) from None
    kept.append(view[begin:])
    return SplitRequest(b"".join(kept), id, contents, _excess(numbers) if len(numbers) > MAX_PARTS else None)


def _excess(numbers: list[int]) -> TooLarge | None:
    """Return the error for a message with fields of these numbers, if they are too many."""
    for number, noun in _PARTS.items():
        if numbers.count(number) > MAX_PARTS:
            return too_many(noun)
    if len(numbers) > _MAX_FIELDS:
        return TooLarge(f"the message has more than {_MAX_FIELDS} fields: send each field once")
    return None


def read_request(parts: SplitRequest) -> tuple[InferRequest, InputTensors]:
    """Return a request and its inputs; raises a ServiceError that names the invalid field."""
    if parts.refusal is not None:
        raise parts.refusal
    head = _known_head(parts.head) if len(parts.head) <= MAX_HEAD_BYTES else _Head.read(parts.head)
    request = msgspec.structs.replace(head.request, id=parts.id) if parts.id else head.request
    return request, InputTensors(head.tensors(parts.contents))


class _Head(NamedTuple):
    """The head of a message.

    request: without an id. inputs: name, datatype and shape of each. typed: the name of an input with typed contents, if there is one.
    """

    message: ProtoMessage
    request: InferRequest
    inputs: list[tuple[str, str, tuple[int, ...]]]
    typed: str | None

    @classmethod
    def read(cls, data: bytes) -> _Head:
        message = METHODS["ModelInfer"].parse(data)
        for tensor in (*message.inputs, *message.outputs):
            check_parts(parameters=tensor.parameters)
        for tensor in message.inputs:
            check_no_shared_memory(tensor.name, tensor.parameters)
        names = [tensor.name for tensor in message.inputs]
        request = InferRequest(
            model=message.model_name,
            version=message.model_version,
            id="",
            parameters=parameter_values(message.parameters),
            outputs=[requested_output(output.name, parameter_values(output.parameters)) for output in message.outputs],
            values_name=values_name(names),
            ragged=OFFSETS in names,
        )
        inputs = [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.inputs]
        typed = (tensor.name for tensor in message.inputs if tensor.HasField("contents") and tensor.contents.ByteSize())
        return cls(message, request, inputs, next(typed, None))

    def tensors(self, contents: Sequence[memoryview]) -> list[Tensor]:
        """Return the inputs with their values, which are in the head if there are no raw contents."""
        if not contents:
            return [_typed_tensor(tensor) for tensor in self.message.inputs]
        if self.typed is not None:
            raise tensor_error(self.typed, f"has contents, but the request has {RAW_CONTENTS} too: send only one of them")
        if len(contents) != len(self.inputs):
            problem = f"{RAW_CONTENTS} has {len(contents)} entries for {len(self.inputs)} inputs: send one entry for each input"
            raise InvalidInput(problem, field=RAW_CONTENTS)
        return [decode(*input, data) for input, data in zip(self.inputs, contents, strict=True)]


_known_head = lru_cache(MAX_KEPT_HEADS)(_Head.read)


def _typed_tensor(tensor: ProtoMessage) -> Tensor:
    """Return an input with values in the contents field for its datatype."""
    datatype = DATATYPES.get(tensor.datatype)
    values = list(getattr(tensor.contents, datatype.contents)) if datatype is not None and datatype.contents else []
    return from_list(tensor.name, tensor.datatype, tuple(tensor.shape), values)


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the position after it; raises IndexError for one that does not end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError


def response_parts(response: InferResponse, field: int = 0) -> list[bytes | memoryview]:
    """Return a ModelInferResponse in parts. Large arrays are not copied. field: of the message that contains it, if there is one."""
    parts: list[bytes | memoryview] = [write_start(response.model, response.version, response.id)]
    if response.parameters:
        parts.append(_parameters(response.parameters))
    parts += [_output(tensor.name, tensor.datatype, tensor.shape) for tensor in response.outputs]
    for tensor in response.outputs:
        data = encode(tensor)
        parts += _field_start(_CONTENTS, len(data)), data
    return [_field_start(field, sum(map(len, parts))), *parts] if field else parts


def write_start(model: str, version: str, id: str) -> bytes:
    """Return the fields of a response that come before its outputs."""
    start = _identity(model, version)
    if not id:
        return start
    text = id.encode()
    return start + _field_start(_ID, len(text)) + text


class ClassifyWriter:
    """Writes the responses of one model with a classify head to requests for all outputs of the head.

    All responses of a tick are written at once. Of the 141 Python calls that a request with one text takes otherwise, this saves 27.
    """

    def __init__(self, model: ServedModel, head: ClassifyHead) -> None:
        self._model = model.spec.name, model.version
        self._labels = [encode(Tensor("label", BYTES, (1,), [label.encode()])) for label in head.labels]
        self._row_bytes = len(head.labels) * np.dtype(FEATURES).itemsize

    def write_all(self, answers: Sequence[tuple[str, Answer, bytes | memoryview]]) -> list[bytes] | None:
        """Return the response to each request, of its id, its answer and the arrays.

        None if one of them belongs to a session, has other arrays than scores, or a score that is not finite.
        """
        counts = [-1 if len(answer.scores) != 2 or answer.session_steps else answer.scores[0] for _, answer, _ in answers]
        if [count * self._row_bytes for count in counts] != [len(part) for _, _, part in answers]:
            return None
        scores = np.frombuffer(b"".join([part for _, _, part in answers]), FEATURES).reshape(-1, len(self._labels))
        if not np.isfinite(scores).all():
            return None
        picks, best = scores.argmax(axis=1).tolist(), scores.max(axis=1).tobytes()
        responses, row = [], 0
        for count, (id, _, part) in zip(counts, answers, strict=True):
            labels = b"".join([self._labels[pick] for pick in picks[row : row + count]])
            values = (labels, best[4 * row : 4 * (row + count)], part)
            contents = b"".join([piece for value in values for piece in (_field_start(_CONTENTS, len(value)), value)])
            responses.append(write_start(*self._model, id) + _classify_outputs(count, len(self._labels)) + contents)
            row += count
        return responses


@lru_cache(maxsize=1024)
def _classify_outputs(count: int, labels: int) -> bytes:
    return (
        _output("label", BYTES, (count, 1)) + _output("score", "FP32", (count, 1)) + _output("scores", "FP32", (count, labels))
    )


@lru_cache(maxsize=1024)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return the description of an output."""
    data: bytes = RESPONSE(outputs=[{"name": name, "datatype": datatype, "shape": shape}]).SerializeToString()
    return data


@lru_cache(maxsize=256)
def _identity(model: str, version: str) -> bytes:
    data: bytes = RESPONSE(model_name=model, model_version=version).SerializeToString()
    return data


def _parameters(parameters: Mapping[str, Any]) -> bytes:
    message = RESPONSE()
    for name, value in parameters.items():
        setattr(message.parameters[name], PARAMETER_FIELDS[type(value)], value)
    data: bytes = message.SerializeToString()
    return data


def _field_start(number: int, size: int) -> bytes:
    """Return the bytes before the content of a field of bytes."""
    tag = number << 3 | _LENGTH_DELIMITED
    if size < 128:
        return bytes((tag, size))
    return bytes((tag, *groups_of_seven_bits(size)))
