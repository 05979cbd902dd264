"""Chooses the requests that are logged and traced, and reports them at their end. Knows no protocol.

A request is traced if its client traces it, at a rate otherwise, and always if it fails or is slow. Failure and slowness are known only at
its end, so nothing is kept of a request beyond the needs of its answer. Engines tell how the batches of a request ran if it is chosen from
the start, or if any request may be slow.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from service.errors import BY_CODE, STATUS
from service.frontend.guards.rate_budget import RateBudget
from service.frontend.run.origin import TRACEPARENT, TRACESTATE, Header, Identity, Parent, RequestOrigin, parse_parent
from service.ipc.messages.inference import Answer
from service.ipc.messages.tracing import Api, RequestTrace
from service.ipc.trace_socket import TraceWriter
from service.log import Log
from service.metrics import CUT_OFF, FAULTS, GONE, OK, Metrics
from service.settings import Settings

MAX_TRACES_PER_SECOND = 100
"""Requests of one frontend that are traced because they were chosen at their start, and as many because they failed or were slow: no client
fills the receiver of the traces, and a sample of many requests leaves room for the errors."""
MAX_TRACED_RUNS = 32
"""Batches of one request with spans: the first batches, and the last."""
ONCE_PER_REQUEST = ("parse", "channel", "reply", "encode", "total")
ACCESS, SLOW, FAILED = "request", "slow request", "request failed"
"""The events of the log."""
UNANSWERED = {GONE: ("499", "CANCELLED"), CUT_OFF: ("503", "UNAVAILABLE")}
"""The status of outcomes that no client receives, over HTTP (as nginx logs them) and gRPC."""


class Observation(NamedTuple):
    """A request that was chosen at its start. trace, span: its ids, empty if it is not traced. logged: it has a line in the access log."""

    trace: str
    span: str
    parent: Parent | None
    logged: bool

    @property
    def headers(self) -> tuple[Header, ...]:
        """Return the headers that tell the client in which span its request was traced."""
        headers = ((TRACEPARENT, f"00-{self.trace}-{self.span}-01".encode()),)
        return (*headers, (TRACESTATE, self.parent.state.encode())) if self.parent and self.parent.state else headers


class EndedRequest(NamedTuple):
    """A request at its end. Moments are monotonic seconds, and 0 if the request did not reach them.

    caller: name of its key. labels: model and version. outcome: as in the metrics. lengths: steps of its sequences.
    sent: when it left for an engine. received: when its answer was taken up to be encoded.
    """

    api: Api
    identity: Identity
    caller: str
    labels: tuple[str, str]
    outcome: str
    arrived: float
    sent: float = 0.0
    received: float = 0.0
    ended: float = 0.0
    lengths: Sequence[int] = ()
    answer: Answer | None = None

    @property
    def failed(self) -> bool:
        """Whether the service is responsible for the outcome."""
        return self.outcome in FAULTS

    @property
    def status(self) -> str:
        """Return the status code of the reply."""
        over_grpc = self.api in (Api.GRPC, Api.GRPC_STREAM)
        if self.outcome == OK:
            return "OK" if over_grpc else "200"
        if self.outcome in UNANSWERED:
            return UNANSWERED[self.outcome][over_grpc]
        status = STATUS[BY_CODE[self.outcome]]
        return status.grpc if over_grpc else str(status.http)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage that the request has passed, and in total."""
        return stage_seconds(self.arrived, self.sent, self.received, self.ended, self.answer)


def stage_seconds(arrived: float, sent: float, received: float, ended: float, answer: Answer | None) -> dict[str, float]:
    """Return the seconds of each stage that a request has passed, by the names in the metrics, and in total. The moments are as in
    EndedRequest. The queue includes the waits between batches.
    """
    stages: dict[str, float] = {}
    if sent:
        stages["parse"] = sent - arrived
    if answer is not None and answer.runs:
        runs = answer.runs
        waits = [max(0.0, later.formed - earlier.ended) for earlier, later in pairwise(runs)]
        stages["channel"] = max(0.0, answer.queued - sent)
        stages["queue"] = runs[0].formed - answer.queued + sum(waits)
        stages["stage_in"] = sum([run.staged - run.formed for run in runs])
        stages["device_wait"] = sum([run.started - run.staged for run in runs])
        stages["compute"] = sum([run.computed - run.started for run in runs])
        stages["stage_out"] = sum([run.ended - run.computed for run in runs])
    if answer is not None and received:
        stages["reply"] = max(0.0, received - answer.ready)
        stages["encode"] = ended - received
    return {**stages, "total": ended - arrived}


class Observer:
    """Chooses the requests of a frontend, and reports them."""

    def __init__(self, settings: Settings, log: Log, metrics: Metrics, traces: TraceWriter | None) -> None:
        """traces: None if nothing is traced."""
        self._log = log
        self._metrics = metrics
        self._traces = traces
        self._trace_rate = settings.trace_rate
        self._access_rate = settings.access_log_rate
        self.highest_rate = max(self._access_rate, self._trace_rate if traces is not None else 0.0)
        self.slow_seconds = settings.slow_request_ms / 1000 or math.inf
        self._chosen, self._late = (RateBudget(MAX_TRACES_PER_SECOND, MAX_TRACES_PER_SECOND) for _ in range(2))
        self.times_all = self.slow_seconds < math.inf
        """Whether engines tell for every request how its batches ran."""
        self.chooses = traces is not None or self._access_rate > 0
        """Whether `begin` may choose a request."""

    def begin(self, identity: Identity, drawn: float) -> Observation | None:
        """Return an observation if the request is chosen, and enter the headers of its reply.

        drawn: a random number from 0 to 1. Without a traceparent no request is chosen unless it is below `highest_rate`.
        """
        logged, traced = drawn < self._access_rate, False
        parent: Parent | None = None
        if self._traces is not None:
            parent = parse_parent(identity.origin)
            traced = drawn < self._trace_rate if parent is None else parent.sampled
            if traced and not self._chosen.spend(time.monotonic()):
                self._metrics.traced_requests.add("over_limit")
                traced = False
        if not traced:
            return Observation("", "", parent, logged) if logged else None
        observation = _traced(parent, logged=logged)
        identity.trace_headers = observation.headers
        return observation

    def end(self, observation: Observation | None, request: EndedRequest) -> None:
        """Report a request if it was chosen, failed or is slow."""
        slow = request.ended - request.arrived > self.slow_seconds
        if self._traces is not None and (observation is None or not observation.trace) and (slow or request.outcome != OK):
            observation = self._trace_late(observation, request.identity.origin)
        trace = observation.trace if observation is not None else ""
        if trace:
            assert observation is not None
            self._send(observation, request)
        if slow or request.failed or (observation is not None and observation.logged):
            self._write(request, trace or _trace_of(request.identity.origin), slow=slow)

    def _trace_late(self, observation: Observation | None, origin: RequestOrigin) -> Observation | None:
        """Choose a request at its end."""
        if not self._late.spend(time.monotonic()):
            self._metrics.traced_requests.add("over_limit")
            return observation
        return _traced(parse_parent(origin), logged=observation is not None and observation.logged)

    def _send(self, observation: Observation, request: EndedRequest) -> None:
        """Send a request to the tracer, and keep it as an example in the metrics."""
        assert self._traces is not None
        answer, parent = request.answer or Answer(), observation.parent
        model, version = request.labels
        sent = self._traces.send(
            RequestTrace(
                trace=observation.trace,
                span=observation.span,
                parent=parent.span if parent else "",
                state=parent.state if parent else "",
                request_id=request.identity.request_id.decode(),
                api=request.api,
                outcome=request.outcome,
                status=request.status,
                failed=request.failed,
                caller=request.caller,
                model=model,
                version=version,
                sequences=len(request.lengths),
                tokens=sum(request.lengths),
                arrived=request.arrived,
                sent=request.sent,
                received=request.received,
                ready=answer.ready,
                ended=request.ended,
                queued=answer.queued,
                runs=answer.runs
                if len(answer.runs) <= MAX_TRACED_RUNS
                else [*answer.runs[: MAX_TRACED_RUNS - 1], answer.runs[-1]],
            )
        )
        self._metrics.traced_requests.add("recorded" if sent else "dropped")
        if sent:
            # The metrics count a stage of an engine for each batch.
            values = [
                ((model, version, stage), seconds)
                for stage, seconds in request.stages().items()
                if len(answer.runs) == 1 or stage in ONCE_PER_REQUEST
            ]
            self._metrics.stage_seconds.note_trace(observation.trace, values)

    def _write(self, request: EndedRequest, trace: str, *, slow: bool) -> None:
        """Write the log line of a request. Lines that are not of a sample are limited."""

        def values() -> dict[str, Any]:
            return self._values(request, trace)

        if request.failed:
            self._log.capped("warning", FAILED, kind=request.outcome, values_of=values)
        elif slow:
            self._log.capped("warning", SLOW, values_of=values)
        else:
            self._log.info(ACCESS, **values())

    def _values(self, request: EndedRequest, trace: str) -> dict[str, Any]:
        """Return the values of a log line."""
        model, version = request.labels
        return {
            "request_id": request.identity.request_id.decode(),
            **({"trace_id": trace} if trace else {}),
            "api": request.api,
            "key": request.caller,
            "model": model,
            "version": version,
            "outcome": request.outcome,
            "status": request.status,
            "sequences": len(request.lengths),
            "tokens": sum(request.lengths),
            "ms": {stage: round(1000 * seconds, 3) for stage, seconds in request.stages().items()},
        }


def _traced(parent: Parent | None, *, logged: bool) -> Observation:
    """Return the observation of a request in the trace of its client, or in a new trace."""
    digits = os.urandom(24).hex()
    return Observation(digits[:32] if parent is None else parent.trace, digits[32:], parent, logged)


def _trace_of(origin: RequestOrigin) -> str:
    """Return the trace of the client, for a request that is not traced here."""
    parent = parse_parent(origin) if origin.traceparent else None
    return parent.trace if parent is not None else ""
