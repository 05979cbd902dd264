"""The JSON bodies of the Open Inference Protocol V2, and the raw tensor bytes after the JSON. Nothing here knows HTTP."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.errors import InvalidInput, InvalidRequest, ServiceError
from service.frontend.oip import metadata
from service.frontend.oip.inputs import InputTensors
from service.frontend.oip.limits import check_parts
from service.frontend.oip.parameters import boolean, check_no_shared_memory, requested_output
from service.frontend.oip.tensors import BYTES, Tensor, decode, encode, from_list, tensor_error
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run.head_outputs import json_numbers, number_pieces
from service.frontend.run.large_answers import PIECE_VALUES
from service.frontend.run.quoting import describe_value, quote
from service.modeling.spec import ModelSpec

T = TypeVar("T")
HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_SIZE = "binary_data_size"

Name = Annotated[str, Meta(description="Name of the tensor in the model's metadata.")]
Datatype = Annotated[str, Meta(description="BOOL, INT8 to INT64, UINT8 to UINT64, FP32, FP64, BYTES; as raw bytes FP16, BF16.")]
Shape = Annotated[list[int], Meta(description="Dimensions of the tensor. The first counts the sequences.")]
Parameters = Annotated[
    dict[str, Any] | None, Meta(description="Parameters by name: strings, numbers and booleans. Unknown names are ignored.")
]


class InputTensorJson(msgspec.Struct):
    """An input. Its values are in `data`, or follow the JSON as raw bytes: parameters.binary_data_size is their size."""

    name: Name
    datatype: Datatype
    shape: Shape
    parameters: Parameters = None
    data: Annotated[list[Any], Meta(description="Values, flat and row-major or nested like the shape.")] | UnsetType = UNSET


class RequestedOutputJson(msgspec.Struct):
    """A requested output. parameters.binary_data returns raw bytes, parameters.classification the best classes only."""

    name: Name
    parameters: Parameters = None


class InferRequestJson(msgspec.Struct):
    """An inference request."""

    inputs: list[InputTensorJson]
    id: Annotated[str | None, Meta(description="Identifier of the request. The response repeats it.")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        Meta(
            description="sequence_id, sequence_start, sequence_end, priority, timeout, binary_data_output. Others are ignored."
        ),
    ] = None
    outputs: Annotated[
        list[RequestedOutputJson] | None, Meta(description="Outputs to return. Without it, all outputs of the model's head.")
    ] = None


class OutputTensorJson(msgspec.Struct, omit_defaults=True):
    """An output. Its values are in `data`, or follow the JSON as raw bytes: parameters.binary_data_size is their size."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[Any] | UnsetType = UNSET


class InferResponseJson(msgspec.Struct, omit_defaults=True):
    """An inference response. For a session, parameters.sequence_steps counts its time steps so far."""

    model_name: str
    model_version: str
    outputs: list[OutputTensorJson]
    id: str = ""
    parameters: dict[str, int] = {}


def parse(body: type[T], data: bytes | memoryview) -> T:
    """Decode a JSON body; raises InvalidRequest for invalid JSON, and InvalidInput that names an invalid field."""
    try:
        return msgspec.json.decode(data, type=body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the JSON body is nested too deeply: send a body as the API description defines it") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {quote(str(error))}") from None


def parse_request(body: bytes, header_length: int | None, model: str, version: str) -> tuple[InferRequest, InputTensors]:
    """Parse an inference request; raises a ServiceError. Raw tensors are not copied.

    header_length: the size of the JSON in bytes, or None if the whole body is JSON.
    """
    end = len(body) if header_length is None else header_length
    if end > len(body):
        problem = f"{HEADER_LENGTH} is {end}, but the body has {len(body)} bytes"
        raise InvalidRequest(f"{problem}: send the size of the JSON at the start of the body")
    whole = memoryview(body)
    parsed = parse(InferRequestJson, whole[:end])
    parameters = parsed.parameters or {}
    check_parts(inputs=parsed.inputs, outputs=parsed.outputs, parameters=parameters)
    all_raw = boolean(parameters, "binary_data_output")
    outputs = [(output.name, output.parameters or {}) for output in parsed.outputs or ()]
    raw = [boolean(more, "binary_data", name, all_raw) for name, more in outputs]
    inputs = InputTensors(_input_tensors(parsed.inputs, whole[end:]))
    requested = [requested_output(*output, each) for output, each in zip(outputs, raw, strict=True)]
    request = InferRequest(model, version, parsed.id or "", parameters, requested, inputs.values_name, inputs.ragged, all_raw)
    return request, inputs


def parse_raw_sequence(body: bytes, spec: ModelSpec, model: str, version: str) -> tuple[InferRequest, InputTensors]:
    """Parse a body that is the raw values of one sequence, without JSON. All outputs are sent as raw bytes."""
    [(name, datatype, dims)] = metadata.inputs(spec)
    if datatype == BYTES:
        tensor = Tensor(name, datatype, dims, [body])
    else:
        _, *features = dims
        tensor = decode(name, datatype, [len(body) // (4 * math.prod(features)), *features], body)
    return InferRequest(model, version, "", {}, [], tensor.name), InputTensors([tensor])


class ResponsePieces(NamedTuple):
    """The body of a response in pieces: its JSON, and the raw bytes that follow."""

    json: Iterator[bytes]
    tail: list[bytes | memoryview]


def encode_response(response: InferResponse, raw: Callable[[str], bool]) -> tuple[bytes, int | None]:
    """Return the body of a response, and the size of its JSON if raw bytes follow it."""
    header, tail = _encode(response, raw, _json_values)
    return b"".join((header, *tail)), len(header) if tail else None


def response_pieces(response: InferResponse, raw: Callable[[str], bool]) -> ResponsePieces:
    """Return the body of a response in pieces."""
    tensors: list[Tensor] = []

    def mark_values(tensor: Tensor) -> msgspec.Raw:
        tensors.append(tensor)
        return msgspec.Raw(b"\n")  # no other line ends in the JSON

    header, tail = _encode(response, raw, mark_values)
    first, *others = header.split(b"\n")
    values = (chain(_value_pieces(tensor), [text]) for tensor, text in zip(tensors, others, strict=True))
    return ResponsePieces(chain([first], chain.from_iterable(values)), tail)


def _input_tensors(inputs: list[InputTensorJson], tail: memoryview) -> list[Tensor]:
    """Return the tensors of a request. The raw bytes follow each other in the order of the inputs."""
    tensors, offset = [], 0
    for input in inputs:
        parameters = input.parameters or {}
        check_parts(parameters=parameters)
        check_no_shared_memory(input.name, parameters)
        size = parameters.get(BINARY_SIZE)
        if (size is None) == (input.data is UNSET):
            raise tensor_error(input.name, f"needs either data or parameters.{BINARY_SIZE}: send exactly one of them")
        if input.data is not UNSET:
            tensors.append(from_list(input.name, input.datatype, input.shape, input.data))
            continue
        if type(size) is not int or not 0 <= size <= len(tail) - offset:
            problem = (
                f"has {describe_value(size)} as parameters.{BINARY_SIZE}, but {len(tail) - offset} bytes remain after the JSON"
            )
            raise tensor_error(input.name, f"{problem}: send the size of this tensor's raw bytes")
        tensors.append(decode(input.name, input.datatype, input.shape, tail[offset : offset + size]))
        offset += size
    if offset < len(tail):
        raise InvalidRequest(f"{len(tail)} bytes follow the JSON, but the inputs have {offset}: send no other bytes")
    return tensors


def _encode(
    response: InferResponse, raw: Callable[[str], bool], json_values: Callable[[Tensor], Any]
) -> tuple[bytes, list[bytes | memoryview]]:
    """Return the JSON of a response and the raw bytes that follow. json_values: returns the values of a tensor as JSON values."""
    outputs, tail = [], []
    for tensor in response.outputs:
        output = OutputTensorJson(tensor.name, tensor.datatype, list(tensor.shape))
        if raw(tensor.name):
            tail.append(encode(tensor))
            output.parameters = {BINARY_SIZE: len(tail[-1])}
        else:
            output.data = json_values(tensor)
        outputs.append(output)
    reply = InferResponseJson(response.model, response.version, outputs, response.id, dict(response.parameters))
    return msgspec.json.encode(reply), tail


def _value_pieces(tensor: Tensor) -> Iterator[bytes]:
    """Yield the values of a tensor as JSON, in pieces."""
    if not isinstance(tensor.values, list):
        yield from number_pieces(tensor.values.ravel())
        return
    opening = b"["
    for start in range(0, len(tensor.values), PIECE_VALUES):
        elements = [element.decode() for element in tensor.values[start : start + PIECE_VALUES]]
        yield opening + msgspec.json.encode(elements)[1:-1]
        opening = b","
    yield b"]" if tensor.values else b"[]"


def _json_values(tensor: Tensor) -> Any:
    """Return the values of a tensor as JSON values; msgspec writes the values of an array as they are."""
    if isinstance(tensor.values, list):
        return [element.decode() for element in tensor.values]
    return msgspec.Raw(json_numbers(tensor.values.ravel()))


def _validation_error(text: str) -> ServiceError:
    """Return the service's error for a validation error of msgspec."""
    message, _, path = text.partition(" - at `$")
    field = path.removesuffix("`").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return InvalidInput(f"{field} is missing: send it", field=field)
    reason = message[0].lower() + message[1:]
    if not field:
        return InvalidRequest(f"the body is not an object as the API description defines it: {reason}")
    return InvalidInput(f"{field}: {reason}", field=field)
