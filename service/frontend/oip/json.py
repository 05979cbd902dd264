"""The JSON of the Open Inference Protocol V2, and the raw bytes of tensors behind it. Bytes to values and back; nothing here knows HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.errors import InvalidInput, InvalidRequest, ServiceError
from service.frontend.head_outputs import shortest
from service.frontend.oip import types
from service.frontend.oip.tensors import BYTES, Tensor, decode, encode, listed, wrong
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.wording import kind, shown
from service.modeling.spec import ModelSpec

T = TypeVar("T")
HEADER_LENGTH = "Inference-Header-Content-Length"
SIZE = "binary_data_size"
VECTORS = ("embedding", "sequence")
"""Outputs of many numbers, of which the shortest decimals would take too long to find."""

Name = Annotated[str, Meta(description="Of the tensor, as the model's metadata has it.")]
Datatype = Annotated[str, Meta(description="BOOL, INT8 to INT64, UINT8 to UINT64, FP16 to FP64, BF16 or BYTES.")]
Shape = Annotated[list[int], Meta(description="Rows come first.")]
Parameters = Annotated[
    dict[str, Any] | None, Meta(description="A string, a number or a boolean each. Those that are not known are ignored.")
]


class InputTensor(msgspec.Struct):
    """One input. Its values are in `data`, or raw behind the JSON: parameters.binary_data_size says how many bytes."""

    name: Name
    datatype: Datatype
    shape: Shape
    parameters: Parameters = None
    data: Annotated[list[Any], Meta(description="Flat and row-major, or nested as the shape is.")] | UnsetType = UNSET


class RequestedOutput(msgspec.Struct):
    """One output. parameters.binary_data says whether it comes raw, parameters.classification how many of the best classes are wanted."""

    name: Name
    parameters: Parameters = None


class InferBody(msgspec.Struct):
    """A request for an answer."""

    inputs: list[InputTensor]
    id: Annotated[str | None, Meta(description="The answer has it too.")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        Meta(description="Among others sequence_id, sequence_start, sequence_end, priority, timeout and binary_data_output."),
    ] = None
    outputs: Annotated[list[RequestedOutput] | None, Meta(description="All that the model's head says when left out.")] = None


class OutputTensor(msgspec.Struct, omit_defaults=True):
    """One output. Its values are in `data`, or raw behind the JSON: parameters.binary_data_size says how many bytes."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[Any] | UnsetType = UNSET


class InferAnswer(msgspec.Struct, omit_defaults=True):
    """An answer. parameters: of a sequence, how many steps it has had."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str = ""
    parameters: dict[str, int] = {}


class Asked(NamedTuple):
    """A request, and which of the outputs its caller wants raw."""

    request: InferRequest
    raw: Callable[[str], bool]


def parse(wanted: type[T], data: bytes | memoryview) -> T:
    """Raises InvalidRequest for what is not JSON, InvalidInput naming the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=wanted)
    except msgspec.ValidationError as fault:
        raise _complaint(str(fault)) from None
    except RecursionError:
        raise InvalidRequest("the body is JSON that is nested too deeply: send what the API describes") from None
    except ValueError as fault:
        raise InvalidRequest(f"the body is not JSON: {shown(str(fault))}") from None


def read(body: bytes, header: int | None, model: str, version: str) -> Asked:
    """A request in JSON, which has so many bytes, or, None, is the whole body; raises a ServiceError. Tensors are not copied."""
    end = len(body) if header is None else header
    if end > len(body):
        told = f"{HEADER_LENGTH} is {end} and the body has {len(body)} bytes: it says how many of these are JSON"
        raise InvalidRequest(told)
    whole = memoryview(body)
    said = parse(InferBody, whole[:end])
    parameters = said.parameters or {}
    all_raw = types.flag(parameters, "binary_data_output")
    named = {one.name: types.flag(one.parameters or {}, "binary_data", one.name, all_raw) for one in said.outputs or []}
    request = InferRequest(
        model=model,
        version=version,
        id=said.id or "",
        parameters=parameters,
        inputs=_inputs(said.inputs, whole[end:]),
        outputs=[types.wanted(one.name, one.parameters or {}) for one in said.outputs or []],
    )
    return Asked(request, lambda name: named.get(name, all_raw))


def read_raw(body: bytes, spec: ModelSpec, model: str, version: str) -> Asked:
    """A request that is nothing but the values of one row; all that is answered is raw, too."""
    if spec.input.kind == "text":
        tensor = Tensor("text", BYTES, (1,), [body])
    elif spec.input.features is None:
        tensor = decode("ids", "INT32", [len(body) // 4], body)
    else:
        tensor = decode("inputs", "FP32", [len(body) // (4 * spec.input.features), spec.input.features], body)
    return Asked(InferRequest(model, version, "", {}, [tensor], []), lambda _: True)


def written(response: InferResponse, raw: Callable[[str], bool]) -> tuple[bytes, int | None]:
    """The answer, and how many bytes of it are JSON when others follow."""
    outputs, tail = [], []
    for tensor in response.outputs:
        output = OutputTensor(tensor.name, tensor.datatype, list(tensor.shape))
        if raw(tensor.name):
            tail.append(encode(tensor))
            output.parameters = {SIZE: len(tail[-1])}
        else:
            output.data = _plain(tensor)
        outputs.append(output)
    answer = InferAnswer(response.model, response.version, outputs, response.id, dict(response.parameters))
    header = msgspec.json.encode(answer)
    return b"".join((header, *tail)), len(header) if tail else None


def schema(described: type[msgspec.Struct]) -> dict[str, Any]:
    """As the API's description has it, which knows no other place for what it refers to."""
    [found], parts = msgspec.json.schema_components([described], ref_template="{name}")

    def whole(node: Any) -> Any:
        if isinstance(node, list):
            return [whole(one) for one in node]
        if isinstance(node, dict):
            return whole(parts[node["$ref"]]) if "$ref" in node else {name: whole(one) for name, one in node.items()}
        return node

    inlined: dict[str, Any] = whole(found)
    return inlined


def _inputs(inputs: list[InputTensor], tail: memoryview) -> list[Tensor]:
    """The tensors of a request; what is raw lies end to end, in their order."""
    tensors, at = [], 0
    for one in inputs:
        parameters = one.parameters or {}
        types.check_place(one.name, parameters)
        size = parameters.get(SIZE)
        if (size is None) == (one.data is UNSET):
            raise wrong(one.name, f"needs either data or parameters.{SIZE}: send one of them")
        if one.data is not UNSET:
            tensors.append(listed(one.name, one.datatype, one.shape, one.data))
            continue
        if type(size) is not int or not 0 <= size <= len(tail) - at:
            left = f"{len(tail) - at} bytes are left behind the JSON"
            raise wrong(one.name, f"has {kind(size)} as parameters.{SIZE} and {left}: send as many as it says")
        tensors.append(decode(one.name, one.datatype, one.shape, tail[at : at + size]))
        at += size
    if at < len(tail):
        raise InvalidRequest(f"{len(tail)} bytes follow the JSON and the inputs have {at} of them: send no others")
    return tensors


def _plain(tensor: Tensor) -> list[Any]:
    """The values as JSON has them."""
    if isinstance(tensor.values, list):
        return [element.decode() for element in tensor.values]
    flat = tensor.values.ravel()
    plain: list[Any] = shortest(flat) if tensor.datatype == "FP32" and tensor.name not in VECTORS else flat.tolist()
    return plain


def _complaint(said: str) -> ServiceError:
    """What msgspec says of a body that is JSON, in our words."""
    message, _, path = said.partition(" - at `$")
    field = path.removesuffix("`").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return InvalidInput(f"{field} is missing: send it", field=field)
    told = message[0].lower() + message[1:]
    if not field:
        return InvalidRequest(f"the body is not an object of the kind that is read here: {told}")
    return InvalidInput(f"{field}: {told}", field=field)
