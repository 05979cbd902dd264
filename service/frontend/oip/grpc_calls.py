"""What the gRPC methods share: a message is read and counted, its caller may leave, an answer or an error is written."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from service.errors import STATUS, ServiceError, TooLarge
from service.frontend.inference import Call, CallerGone, Frontend, counted
from service.frontend.oip import protobuf_codec, types
from service.frontend.oip.protobuf import Message, Method

Context = Any
"""gRPC's view of one call."""
DISCARDED_MESSAGES = 2
"""A message over the limit is read and thrown away up to this many times the limit: gRPC's own refusal names no setting."""
TOLD_CHARACTERS = 2000
"""Of an error's message: a client gives up a status that is longer than the headers that he takes."""


@dataclass(slots=True, eq=False)
class Ending:
    """How far the end of the service has come. begun: streams take no more messages; over: calls end, and not as their callers left.

    open: the calls whose callers wait for an answer.
    """

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    open: set[asyncio.Task[Any]] = field(default_factory=set)

    def waits_for_me(self) -> None:
        """The call that this task serves, until its answer is written, is one of them."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        task.add_done_callback(self.open.discard)


@contextmanager
def accepted(frontend: Frontend, ending: Ending, arrived: float) -> Iterator[Call]:
    """A request for an answer, counted; raises CallerGone when its caller ends it first."""
    with counted(frontend.metrics, arrived) as call:
        try:
            yield call
        except asyncio.CancelledError:
            if ending.over:
                raise
            raise CallerGone from None


def read(method: Method, data: bytes, frontend: Frontend) -> Message:
    """The message that a caller sent; raises TooLarge or InvalidRequest."""
    limit = frontend.settings.max_body_bytes
    if len(data) > limit:
        raise TooLarge(
            f"the message has {len(data)} bytes and SEQSERVE_MAX_BODY_BYTES is {limit}: send less at once, or raise the limit"
        )
    return method.read(data)


async def answer(frontend: Frontend, call: Call, asked: types.InferRequest, context: Context) -> Message:
    """The ModelInferResponse; raises a ServiceError. The call's own deadline is one more that the request has."""
    left = context.time_remaining()
    return protobuf_codec.response(await types.infer(frontend, call, asked, math.inf if left is None else left))


async def refuse(context: Context, fault: ServiceError) -> NoReturn:
    """End a call with the status of an error. What else there is to it stands in the trailing metadata."""
    said = {"seqserve-code": fault.code, "seqserve-field": fault.field, "retry-after": fault.retry_after}
    metadata = tuple((name, str(value)) for name, value in said.items() if value is not None)
    status = grpc.StatusCode[STATUS[type(fault)].grpc]
    await context.abort(status, fault.message[:TOLD_CHARACTERS], trailing_metadata=metadata)
    raise AssertionError("abort raises")
