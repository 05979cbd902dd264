"""The JSON bodies of the Open Inference Protocol V2, and the raw tensor bytes after the JSON. Nothing here knows HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.errors import InvalidInput, InvalidRequest, ServiceError
from service.frontend.head_outputs import json_numbers
from service.frontend.oip.parameters import boolean, check_no_shared_memory, requested_output
from service.frontend.oip.tensors import BYTES, Tensor, decode, encode, from_list, tensor_error
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.quoting import describe_value, quote
from service.modeling.spec import ModelSpec

T = TypeVar("T")
HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_SIZE = "binary_data_size"

Name = Annotated[str, Meta(description="Name of the tensor in the model's metadata.")]
Datatype = Annotated[str, Meta(description="BOOL, INT8 to INT64, UINT8 to UINT64, FP16 to FP64, BF16 or BYTES.")]
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


class ParsedRequest(NamedTuple):
    """A request. raw: returns whether an output is sent as raw bytes, by its name."""

    request: InferRequest
    raw: Callable[[str], bool]


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


def parse_request(body: bytes, header_length: int | None, model: str, version: str) -> ParsedRequest:
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
    all_raw = boolean(parameters, "binary_data_output")
    outputs = parsed.outputs or []
    raw = {output.name: boolean(output.parameters or {}, "binary_data", output.name, all_raw) for output in outputs}
    request = InferRequest(
        model=model,
        version=version,
        id=parsed.id or "",
        parameters=parameters,
        inputs=_input_tensors(parsed.inputs, whole[end:]),
        outputs=[requested_output(output.name, output.parameters or {}) for output in outputs],
    )
    return ParsedRequest(request, lambda name: raw.get(name, all_raw))


def parse_raw_sequence(body: bytes, spec: ModelSpec, model: str, version: str) -> ParsedRequest:
    """Parse a body that is the raw values of one sequence, without JSON. All outputs are sent as raw bytes."""
    if spec.input.kind == "text":
        tensor = Tensor("text", BYTES, (1,), [body])
    elif spec.input.features is None:
        tensor = decode("ids", "INT32", [len(body) // 4], body)
    else:
        tensor = decode("inputs", "FP32", [len(body) // (4 * spec.input.features), spec.input.features], body)
    return ParsedRequest(InferRequest(model, version, "", {}, [tensor], []), lambda _: True)


def encode_response(response: InferResponse, raw: Callable[[str], bool]) -> tuple[bytes, int | None]:
    """Return the body of a response, and the size of its JSON if raw bytes follow it."""
    outputs, tail = [], []
    for tensor in response.outputs:
        output = OutputTensorJson(tensor.name, tensor.datatype, list(tensor.shape))
        if raw(tensor.name):
            tail.append(encode(tensor))
            output.parameters = {BINARY_SIZE: len(tail[-1])}
        else:
            output.data = _json_values(tensor)
        outputs.append(output)
    header = msgspec.json.encode(
        InferResponseJson(response.model, response.version, outputs, response.id, dict(response.parameters))
    )
    return b"".join((header, *tail)), len(header) if tail else None


def inline_schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a body without references: the API description does not resolve them."""
    [root], components = msgspec.json.schema_components([body], ref_template="{name}")

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if isinstance(node, dict):
            return resolve(components[node["$ref"]]) if "$ref" in node else {name: resolve(item) for name, item in node.items()}
        return node

    schema: dict[str, Any] = resolve(root)
    return schema


def _input_tensors(inputs: list[InputTensorJson], tail: memoryview) -> list[Tensor]:
    """Return the tensors of a request. The raw bytes follow each other in the order of the inputs."""
    tensors, offset = [], 0
    for input in inputs:
        parameters = input.parameters or {}
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


def _json_values(tensor: Tensor) -> Any:
    """Return the values of a tensor as JSON values; msgspec writes those of an array as they are."""
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
