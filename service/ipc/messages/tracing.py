"""Messages of a frontend to the tracer."""

from __future__ import annotations

from enum import StrEnum

from service.ipc.messages.inference import BatchRun
from service.ipc.messages.message import Message


class Api(StrEnum):
    """The APIs of inference."""

    INFER = "infer"
    STREAM = "stream"
    OIP = "oip"
    GRPC = "grpc"
    GRPC_STREAM = "grpc_stream"


class RequestTrace(Message, frozen=True):
    """A request that ended, from which the tracer makes spans. Moments are seconds on the machine's monotonic clock.

    `trace`, `span` and `parent` are ids in hexadecimal digits; without a `parent` the request begins its trace. `state` is the client's
    tracestate, `status` the code that the client got. `failed` is true if the service is responsible for the outcome.

    `sent`: the request left for an engine; `received`: its answer arrived; `ended`: the reply was written. Moments that a request did
    not reach are 0. `ready`, `queued` and `runs` come from its Answer.
    """

    trace: str
    span: str
    parent: str
    state: str
    request_id: str
    api: Api
    outcome: str
    status: str
    failed: bool
    caller: str
    model: str
    version: str
    sequences: int
    tokens: int
    arrived: float
    sent: float
    received: float
    ready: float
    ended: float
    queued: float
    runs: list[BatchRun]
