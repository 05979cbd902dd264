"""The messages of `inference.proto`, as `make proto` has compiled it.

They stand in a pool of their own: whoever loads a client of the protocol beside them has others of the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from service.errors import InvalidRequest

SERVICE = "inference.GRPCInferenceService"
Message = Any
"""Its fields come and go with the file."""


class Method(NamedTuple):
    """What a method of the service takes and gives; streams: one after the other."""

    takes: type[Message]
    gives: type[Message]
    streams: bool

    def read(self, data: bytes) -> Message:
        """Raises InvalidRequest for what is no such message."""
        try:
            return self.takes.FromString(data)
        except DecodeError:
            name = self.takes.DESCRIPTOR.full_name
            raise InvalidRequest(f"the request is no {name}: send it as inference.proto has it") from None


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(Path(__file__).with_name("inference.binpb").read_bytes()).file:
        pool.Add(file)
    return pool


POOL = _pool()
METHODS = {
    one.name: Method(GetMessageClass(one.input_type), GetMessageClass(one.output_type), one.server_streaming)
    for one in POOL.FindServiceByName(SERVICE).methods
}
