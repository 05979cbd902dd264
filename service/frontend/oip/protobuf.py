"""The protobuf messages of `inference.proto`. Nothing here knows gRPC.

`make proto` compiles inference.proto to inference.binpb. The messages are in a separate descriptor pool: a client library in the same
process registers messages with the same names in the default pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.errors import InvalidInput, InvalidRequest
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
        return parse_message(self.request_type, data)

    def write(self, fields: Mapping[str, Any]) -> bytes:
        """Return the response message with these fields."""
        message: bytes = ParseDict(fields, self.response_type()).SerializeToString()
        return message


def parse_message(kind: type[ProtoMessage], data: bytes) -> ProtoMessage:
    """Return a message; raises InvalidRequest for bytes that are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise invalid_message(kind) from None


def invalid_message(kind: type[ProtoMessage]) -> InvalidRequest:
    """Return the error for bytes that are not a message of this type."""
    descriptor = kind.DESCRIPTOR
    file = "inference.proto defines it" if descriptor.file.name == "inference.proto" else "its .proto file defines it"
    return InvalidRequest(f"the request is not a valid {descriptor.full_name}: encode it as {file}")


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
PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def parameter_values(parameters: Mapping[str, ProtoMessage]) -> dict[str, Any]:
    """Return the values of parameters by name; raises InvalidInput for a parameter without a value."""
    return {name: _parameter_value(name, parameter) for name, parameter in parameters.items()}


def _parameter_value(name: str, parameter: ProtoMessage) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        field = f"parameters.{quote(name)}"
        raise InvalidInput(f"{field} has no value: set a value, or leave the parameter out", field=field)
    return getattr(parameter, choice)
