"""What the gRPC methods share: reading a message, counting the call, running inference and writing an error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from service.errors import STATUS, ServiceError, TooLarge
from service.frontend.inference import ClientDisconnected, Frontend, TrackedRequest, track_request
from service.frontend.oip import infer, protobuf
from service.frontend.oip.protobuf import MethodMessages, ProtoMessage
from service.frontend.oip.types import InferRequest

GrpcContext = Any
"""The grpc.aio.ServicerContext of one call."""
RECEIVE_LIMIT_FACTOR = 2
"""gRPC accepts messages of up to this many times the size limit: its own error for larger messages names no setting."""
MAX_DETAILS_CHARACTERS = 2000
"""Longer error messages are cut: a client rejects a status that exceeds its header limit."""


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
def track_call(frontend: Frontend, shutdown: GrpcShutdown, arrived: float) -> Iterator[TrackedRequest]:
    """Track an inference request in the metrics; raises ClientDisconnected if its client cancels it."""
    with track_request(frontend.metrics, arrived) as tracked:
        try:
            yield tracked
        except asyncio.CancelledError:
            if shutdown.over:
                raise
            raise ClientDisconnected from None


def read_message(messages: MethodMessages, data: bytes, frontend: Frontend) -> ProtoMessage:
    """Parse a request message; raises TooLarge or InvalidRequest."""
    limit = frontend.settings.max_body_bytes
    if len(data) > limit:
        raise TooLarge(
            f"the message has {len(data)} bytes, but SEQSERVE_MAX_BODY_BYTES is {limit}: "
            "send a smaller message, or raise SEQSERVE_MAX_BODY_BYTES"
        )
    return messages.parse(data)


async def infer_message(
    frontend: Frontend, tracked: TrackedRequest, request: InferRequest, context: GrpcContext
) -> ProtoMessage:
    """Run a request and return its ModelInferResponse; raises a ServiceError. The call's gRPC deadline limits the request's."""
    seconds = context.time_remaining()
    return protobuf.infer_response(await infer.infer(frontend, tracked, request, math.inf if seconds is None else seconds))


async def abort_with(context: GrpcContext, error: ServiceError) -> NoReturn:
    """End a call with the status of an error. Its code, field and retry delay follow in the trailing metadata."""
    values = {"seqserve-code": error.code, "seqserve-field": error.field, "retry-after": error.retry_after}
    metadata = tuple((name, str(value)) for name, value in values.items() if value is not None)
    status = grpc.StatusCode[STATUS[type(error)].grpc]
    await context.abort(status, error.message[:MAX_DETAILS_CHARACTERS], trailing_metadata=metadata)
    raise AssertionError("abort raises")
