"""The protobuf messages of `inference.proto`, and their conversion to requests and from responses. Nothing here knows gRPC.

`make proto` compiles inference.proto to inference.binpb. The messages are in a separate descriptor pool: a client library in the same
process registers messages with the same names in the default pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.errors import InvalidInput, InvalidRequest
from service.frontend.oip.limits import check_parts
from service.frontend.oip.parameters import check_no_shared_memory, requested_output
from service.frontend.oip.tensors import Tensor, decode, encode, from_list, tensor_error
from service.frontend.oip.types import InferRequest, InferResponse
from service.frontend.run.quoting import quote

SERVICE = "inference.GRPCInferenceService"
ProtoMessage = Any
"""A message class is built at run time, so its fields have no static types."""


class MethodMessages(NamedTuple):
    """The request and response messages of a method."""

    request_type: type[ProtoMessage]
    response_type: type[ProtoMessage]

    def parse(self, data: bytes) -> ProtoMessage:
        """Return the request message; raises InvalidRequest for bytes that are not such a message."""
        try:
            return self.request_type.FromString(data)
        except DecodeError:
            raise self.invalid() from None

    def write(self, fields: Mapping[str, Any]) -> bytes:
        """Return the response message with these fields."""
        message: bytes = ParseDict(fields, self.response_type()).SerializeToString()
        return message

    def invalid(self) -> InvalidRequest:
        """Return the error for bytes that are not a request message."""
        name = self.request_type.DESCRIPTOR.full_name
        return InvalidRequest(f"the request is not a valid {name}: encode it as inference.proto defines it")


def parse_message(kind: type[ProtoMessage], data: bytes) -> ProtoMessage:
    """Return a message of another service; raises InvalidRequest for bytes that are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidRequest(f"the request is not a valid {name}: encode it as its .proto file defines it") from None


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(Path(__file__).with_name("inference.binpb").read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _pool()
METHODS = {
    method.name: MethodMessages(GetMessageClass(method.input_type), GetMessageClass(method.output_type))
    for method in POOL.FindServiceByName(SERVICE).methods
}
CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of InferTensorContents for each datatype."""
RAW_CONTENTS = "raw_input_contents"
PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def infer_request(message: ProtoMessage, raw_contents: Sequence[bytes | memoryview] | None = None) -> InferRequest:
    """Convert a ModelInferRequest; raises a ServiceError that names the invalid field.

    raw_contents: its raw_input_contents, if they are not in the message.
    """
    raw = message.raw_input_contents if raw_contents is None else raw_contents
    check_parts(inputs=message.inputs, outputs=message.outputs, parameters=message.parameters, raw_input_contents=raw)
    for tensor in (*message.inputs, *message.outputs):
        check_parts(parameters=tensor.parameters)
    for tensor in message.inputs:
        check_no_shared_memory(tensor.name, tensor.parameters)
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters=parameter_values(message.parameters),
        inputs=_raw_tensors(message.inputs, raw) if raw else [_typed_tensor(tensor) for tensor in message.inputs],
        outputs=[requested_output(output.name, parameter_values(output.parameters)) for output in message.outputs],
    )


def infer_response(response: InferResponse) -> ProtoMessage:
    """Convert to a ModelInferResponse. Values are raw bytes: existing clients read only raw_output_contents."""
    message = METHODS["ModelInfer"].response_type(model_name=response.model, model_version=response.version, id=response.id)
    for name, value in response.parameters.items():
        setattr(message.parameters[name], PARAMETER_FIELDS[type(value)], value)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(bytes(encode(tensor)))
    return message


def parameter_values(parameters: Mapping[str, ProtoMessage]) -> dict[str, Any]:
    """Return the values of parameters by name; raises InvalidInput for a parameter without a value."""
    return {name: _parameter_value(name, parameter) for name, parameter in parameters.items()}


def _parameter_value(name: str, parameter: ProtoMessage) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        field = f"parameters.{quote(name)}"
        raise InvalidInput(f"{field} has no value: set a value, or leave the parameter out", field=field)
    return getattr(parameter, choice)


def _raw_tensors(inputs: Sequence[ProtoMessage], contents: Sequence[bytes | memoryview]) -> list[Tensor]:
    """Return the inputs of a request with values in raw_input_contents."""
    for tensor in inputs:
        if tensor.HasField("contents") and tensor.contents.ByteSize():
            raise tensor_error(tensor.name, f"has contents, but the request has {RAW_CONTENTS} too: send only one of them")
    if len(contents) != len(inputs):
        problem = f"{RAW_CONTENTS} has {len(contents)} entries for {len(inputs)} inputs: send one entry for each input"
        raise InvalidInput(problem, field=RAW_CONTENTS)
    return [
        decode(tensor.name, tensor.datatype, tuple(tensor.shape), data) for tensor, data in zip(inputs, contents, strict=True)
    ]


def _typed_tensor(tensor: ProtoMessage) -> Tensor:
    """Return an input with values in the contents field for its datatype."""
    field = CONTENTS_FIELDS.get(tensor.datatype)
    values = list(getattr(tensor.contents, field)) if field else []
    return from_list(tensor.name, tensor.datatype, tuple(tensor.shape), values)
