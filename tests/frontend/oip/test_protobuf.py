"""The messages match inference.proto and the messages of Triton's client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default
from tritonclient.grpc import model_config_pb2, service_pb2

from service.errors import InvalidRequest
from service.frontend.oip import protobuf
from service.frontend.oip.protobuf import METHODS, POOL, SERVICE

FOLDER = Path(protobuf.__file__).parent
FILE = POOL.FindFileByName("inference.proto")
NOT_IN_TRITON = {"ModelMetadataResponse.properties"}
"""Fields of the Open Inference Protocol that Triton's client does not have."""


def fields(message: Any) -> dict[str, tuple[Any, ...]]:
    """Return the properties that determine the wire format, by field: number, type, repeated, type name and oneof."""
    encodings = {}
    for field in message.fields:
        type = field.message_type or field.enum_type
        choice = field.containing_oneof
        encodings[field.name] = (field.number, field.type, field.is_repeated, type and type.full_name, choice and choice.name)
    return encodings


def with_nested(message: Any) -> list[Any]:
    """Return a message descriptor and its nested message descriptors."""
    return [message, *(descriptor for nested in message.nested_types for descriptor in with_nested(nested))]


def values(enum: Any) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


def test_compiled_file_is_up_to_date(tmp_path: Path) -> None:
    compiled = tmp_path / "inference.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={FOLDER}", f"--descriptor_set_out={compiled}"]
    subprocess.run([*command, "inference.proto"], check=True)
    assert compiled.read_bytes() == (FOLDER / "inference.binpb").read_bytes(), "run make proto"


def test_methods_are_those_of_the_client() -> None:
    def methods(service: Any) -> set[tuple[str, str, str, bool, bool]]:
        return {
            (
                *(method.name, method.input_type.full_name, method.output_type.full_name),
                *(method.client_streaming, method.server_streaming),
            )
            for method in service.methods
        }

    triton = service_pb2.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]]
    assert methods(POOL.FindServiceByName(SERVICE)) == methods(triton)


@pytest.mark.parametrize("name", FILE.message_types_by_name)
def test_fields_are_those_of_the_client(name: str) -> None:
    files = [module.DESCRIPTOR.message_types_by_name for module in (service_pb2, model_config_pb2)]
    [triton] = [messages[name] for messages in files if name in messages]
    known = {message.full_name: message for message in with_nested(triton)}
    for message in with_nested(FILE.message_types_by_name[name]):
        if message.full_name not in known:
            assert f"{name}.properties" in NOT_IN_TRITON
            continue
        expected = fields(known[message.full_name])
        for field, encoding in fields(message).items():
            assert f"{name}.{field}" in NOT_IN_TRITON or encoding == expected[field], f"{message.full_name}.{field}"
        for enum in message.enum_types:
            assert values(enum) == values(Default().FindEnumTypeByName(enum.full_name))


def test_datatypes_have_the_numbers_of_the_client() -> None:
    [enum] = FILE.enum_types_by_name.values()
    assert values(enum) == values(model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"])


def test_bytes_that_are_not_a_message_are_rejected() -> None:
    for data in (b"\xff", b"\x0a\x05abc", b"\x0a\x01\xff"):
        with pytest.raises(InvalidRequest, match=r"not a valid inference\.ModelInferRequest"):
            METHODS["ModelInfer"].parse(data)
