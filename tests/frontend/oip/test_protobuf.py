"""The messages are what their file says, and what the protocol's own clients send and read."""

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

FACES = Path(protobuf.__file__).parent
OURS = POOL.FindFileByName("inference.proto")
OF_THE_OPEN_PROTOCOL_ALONE = {"ModelMetadataResponse.properties"}


def fields(kind: Any) -> dict[str, tuple[Any, ...]]:
    """All that the wire knows of a message: number, type and place of its fields, by name."""
    found = {}
    for one in kind.fields:
        of = one.message_type or one.enum_type
        choice = one.containing_oneof
        found[one.name] = (one.number, one.type, one.is_repeated, of and of.full_name, choice and choice.name)
    return found


def kinds(descriptor: Any) -> list[Any]:
    """A message and those within it."""
    return [descriptor, *(kind for nested in descriptor.nested_types for kind in kinds(nested))]


def values(enum: Any) -> dict[str, int]:
    return {one.name: one.number for one in enum.values}


def test_what_is_compiled_is_what_the_file_says(tmp_path: Path) -> None:
    compiled = tmp_path / "inference.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={FACES}", f"--descriptor_set_out={compiled}"]
    subprocess.run([*command, "inference.proto"], check=True)
    assert compiled.read_bytes() == (FACES / "inference.binpb").read_bytes(), "run make proto"


def test_every_method_of_the_clients_is_there_and_no_other() -> None:
    def methods(service: Any) -> set[tuple[str, str, str, bool, bool]]:
        return {
            (one.name, one.input_type.full_name, one.output_type.full_name, one.client_streaming, one.server_streaming)
            for one in service.methods
        }

    theirs = service_pb2.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]]
    assert methods(POOL.FindServiceByName(SERVICE)) == methods(theirs)


@pytest.mark.parametrize("name", OURS.message_types_by_name)
def test_every_field_is_the_clients_field(name: str) -> None:
    modules = (service_pb2, model_config_pb2)
    [theirs] = [one.DESCRIPTOR.message_types_by_name[name] for one in modules if name in one.DESCRIPTOR.message_types_by_name]
    known = {kind.full_name: kind for kind in kinds(theirs)}
    for kind in kinds(OURS.message_types_by_name[name]):
        if kind.full_name not in known:
            assert f"{name}.properties" in OF_THE_OPEN_PROTOCOL_ALONE
            continue
        expected = fields(known[kind.full_name])
        for field, said in fields(kind).items():
            assert f"{name}.{field}" in OF_THE_OPEN_PROTOCOL_ALONE or said == expected[field], f"{kind.full_name}.{field}"
        for enum in kind.enum_types:
            assert values(enum) == values(Default().FindEnumTypeByName(enum.full_name))


def test_every_datatype_has_the_clients_number() -> None:
    [enum] = OURS.enum_types_by_name.values()
    assert values(enum) == values(model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"])


def test_bytes_that_are_no_message_are_refused() -> None:
    for data in (b"\xff", b"\x0a\x05abc", b"\x0a\x01\xff"):
        with pytest.raises(InvalidRequest, match=r"no inference\.ModelInferRequest"):
            METHODS["ModelInfer"].read(data)
