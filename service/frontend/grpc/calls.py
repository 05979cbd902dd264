"""Shared by the gRPC methods: reading a message, counting the call, running inference and writing an error."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from service.errors import TooLarge
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.grpc.messages import field_start, output_parts
from service.frontend.grpc.wire import PREFIX
from service.frontend.oip import protobuf
from service.frontend.oip.protobuf import MethodMessages, ProtoMessage
from service.frontend.oip.types import InferResponse
from service.frontend.run.exchange import AwaitedExchange
from service.frontend.run.frontend import Frontend
from service.frontend.run.large_answers import LARGE_ANSWER_BYTES

GrpcContext = Any
"""The grpc.aio.ServicerContext of one call."""
RECEIVE_LIMIT_FACTOR = 2
"""gRPC accepts messages of up to this many times the size limit: its own error for larger messages names no setting."""


@dataclass(slots=True, eq=False)
class GrpcShutdown:
    """The progress of the server's shutdown.

    begun: streams read no more messages. over: cancelled calls were cancelled by the server, not by their clients.
    open_calls: the inference calls that still need a reply.
    """

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    open_calls: set[asyncio.Task[Any]] = field(default_factory=set)

    def wait_for_this_call(self) -> None:
        """Add the current task to `open_calls` until it is done."""
        task = asyncio.current_task()
        assert task is not None
        self.open_calls.add(task)
        task.add_done_callback(self.open_calls.discard)


def read_message(messages: MethodMessages, data: bytes) -> ProtoMessage:
    """Parse the request message of a method without tensors; raises TooLarge or InvalidRequest."""
    if len(data) > MAX_LOOP_BODY_BYTES:
        raise TooLarge(
            f"the message has {len(data)} bytes, but at most {MAX_LOOP_BODY_BYTES} are allowed: send a smaller message"
        )
    return messages.parse(data)


class CallExchange(AwaitedExchange):
    """The exchange of a request on a gRPC call."""

    def __init__(self, context: GrpcContext, shutdown: GrpcShutdown) -> None:
        super().__init__(context.identity)
        self._shutdown = shutdown

    @property
    def disconnected(self) -> bool:
        """Whether the client has cancelled the call."""
        return not self._shutdown.over


def message_parts(response: InferResponse, field: int = 0) -> list[bytes | memoryview]:
    """Return the parts of a ModelInferResponse. field: of the message that contains it, if there is one."""
    start = protobuf.infer_response(msgspec.structs.replace(response, outputs=[])).SerializeToString()
    parts = [start, *output_parts(response)]
    return [field_start(field, sum(map(len, parts))), *parts] if field else parts


async def write_message(frontend: Frontend, response: InferResponse, field: int = 0) -> bytes | memoryview:
    """Return a ModelInferResponse, as `frame_message` takes it. field: of the message that contains it, if there is one."""
    parts = message_parts(response, field)
    size = sum(map(len, parts))
    if size <= LARGE_ANSWER_BYTES:
        return b"".join(parts)
    return memoryview(await frontend.large_answers.join([PREFIX.pack(0, size), *parts]))
