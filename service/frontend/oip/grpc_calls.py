"""Shared by the gRPC methods: reading a message, counting the call, running inference and writing an error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from service.errors import TooLarge
from service.frontend.decoder.client import MAX_LOOP_BODY_BYTES
from service.frontend.inference import ClientDisconnected, Frontend, TrackedRequest, track_request
from service.frontend.large_answers import LARGE_ANSWER_BYTES
from service.frontend.oip import infer, protobuf, wire
from service.frontend.oip.grpc_messages import field_start, output_parts
from service.frontend.oip.grpc_wire import PREFIX
from service.frontend.oip.inputs import text_bytes
from service.frontend.oip.large_requests import DecodedInputs, RequestOptions
from service.frontend.oip.protobuf import METHODS, MethodMessages, ProtoMessage
from service.frontend.oip.types import InferRequest, InferResponse
from service.ipc.messages import Api, DecodeBody

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


@contextmanager
def track_call(
    frontend: Frontend, shutdown: GrpcShutdown, arrived: float, context: GrpcContext, api: Api
) -> Iterator[TrackedRequest]:
    """Track an inference request in the metrics; raises ClientDisconnected if its client cancels it."""
    with track_request(frontend, arrived, context.caller, api, context.identity) as tracked:
        try:
            yield tracked
        except asyncio.CancelledError:
            if shutdown.over:
                raise
            raise ClientDisconnected from None


class ReadRequest(NamedTuple):
    """An inference request. decoded: the only inputs of a large request."""

    request: InferRequest
    decoded: DecodedInputs | None = None


def read_message(messages: MethodMessages, data: bytes) -> ProtoMessage:
    """Parse the request message of a method without tensors; raises TooLarge or InvalidRequest."""
    if len(data) > MAX_LOOP_BODY_BYTES:
        raise TooLarge(
            f"the message has {len(data)} bytes, but at most {MAX_LOOP_BODY_BYTES} are allowed: send a smaller message"
        )
    return messages.parse(data)


@asynccontextmanager
async def read_request(data: bytes, frontend: Frontend) -> AsyncIterator[ReadRequest]:
    """Parse a ModelInferRequest; raises a ServiceError. The inputs of a large request can be packed within the context."""
    limit, messages = frontend.settings.max_body_bytes, METHODS["ModelInfer"]
    if len(data) > limit:
        raise TooLarge(
            f"the message has {len(data)} bytes, but SEQSERVE_MAX_BODY_BYTES is {limit}: "
            "send a smaller message, or raise SEQSERVE_MAX_BODY_BYTES"
        )
    if len(data) <= wire.MAX_UNSCANNED_BYTES:
        yield ReadRequest(protobuf.infer_request(messages.parse(data)))
        return
    try:
        parts = wire.split(data)
    except wire.NotAMessage:
        raise messages.invalid() from None
    if len(parts.message) <= MAX_LOOP_BODY_BYTES:
        request = protobuf.infer_request(messages.parse(parts.message), parts.raw_contents)
        if text_bytes(request.inputs) <= MAX_LOOP_BODY_BYTES:
            yield ReadRequest(request)
            return
    async with frontend.decoder.decode(DecodeBody("oip_protobuf"), data) as body:
        options = msgspec.msgpack.decode(body.options, type=RequestOptions)
        yield ReadRequest(options.request(), DecodedInputs(options, body))


async def infer_message(frontend: Frontend, tracked: TrackedRequest, read: ReadRequest, context: GrpcContext) -> InferResponse:
    """Run a request and return its response; raises a ServiceError. The call's gRPC deadline limits the request's."""
    remaining = context.time_remaining()
    seconds = math.inf if remaining is None else remaining
    return await infer.infer(frontend, tracked, read.request, seconds, read.decoded, context.session)


async def write_message(frontend: Frontend, response: InferResponse, field: int = 0) -> bytes | memoryview:
    """Return a ModelInferResponse, as `frame_message` takes it. field: of the message that contains it, if there is one."""
    start = protobuf.infer_response(msgspec.structs.replace(response, outputs=[])).SerializeToString()
    parts = [start, *output_parts(response)]
    if field:
        parts.insert(0, field_start(field, sum(map(len, parts))))
    size = sum(map(len, parts))
    if size <= LARGE_ANSWER_BYTES:
        return b"".join(parts)
    return memoryview(await frontend.large_answers.join([PREFIX.pack(0, size), *parts]))
