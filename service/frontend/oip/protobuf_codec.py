"""The messages of a request for an answer as the values that `oip` has, and back. Nothing here awaits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.errors import InvalidInput
from service.frontend.oip import types
from service.frontend.oip.protobuf import METHODS, Message
from service.frontend.oip.tensors import Tensor, decode, encode, listed, wrong
from service.frontend.wording import shown

CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where the values of a tensor are that do not come as raw bytes."""
RAW = "raw_input_contents"
PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def request(message: Message) -> types.InferRequest:
    """What a ModelInferRequest says; raises a ServiceError naming the part at fault."""
    for one in message.inputs:
        types.check_place(one.name, one.parameters)
    return types.InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters=plain(message.parameters),
        inputs=_raw(message) if message.raw_input_contents else [_typed(one) for one in message.inputs],
        outputs=[types.wanted(one.name, plain(one.parameters)) for one in message.outputs],
    )


def response(answer: types.InferResponse) -> Message:
    """The ModelInferResponse that says this; values are raw bytes, as clients look for them nowhere else."""
    message = METHODS["ModelInfer"].gives(model_name=answer.model, model_version=answer.version, id=answer.id)
    for name, value in answer.parameters.items():
        setattr(message.parameters[name], PARAMETERS[type(value)], value)
    for tensor in answer.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(encode(tensor))
    return message


def plain(parameters: Mapping[str, Message]) -> dict[str, Any]:
    """Parameters by their values; raises InvalidInput for one that has none."""
    return {name: _value(name, one) for name, one in parameters.items()}


def _value(name: str, parameter: Message) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        field = f"parameters.{shown(name)}"
        raise InvalidInput(f"{field} has no value: give it one, or leave it out", field=field)
    return getattr(parameter, kind)


def _raw(message: Message) -> list[Tensor]:
    """The inputs with the bytes of each."""
    inputs, contents = message.inputs, message.raw_input_contents
    for one in inputs:
        if one.HasField("contents") and one.contents.ByteSize():
            raise wrong(one.name, f"has contents beside {RAW}: send one or the other")
    if len(contents) != len(inputs):
        raise InvalidInput(f"{RAW} has {len(contents)} entries for {len(inputs)} inputs: send one for each", field=RAW)
    return [decode(one.name, one.datatype, tuple(one.shape), data) for one, data in zip(inputs, contents, strict=True)]


def _typed(one: Message) -> Tensor:
    """An input with the list that its datatype names."""
    values = getattr(one.contents, CONTENTS[one.datatype]) if one.datatype in CONTENTS else ()
    return listed(one.name, one.datatype, tuple(one.shape), list(values))
