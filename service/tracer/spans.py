"""Spans from the record of a request, and the spans of batches with links to the spans of their requests. Pure: the time is an argument.

A request has a span, with a child span for each stage. The stage `compute` links to the span of the batch, in a separate trace. The span
of a batch is made LINK_SECONDS after its first request arrived: the requests of all frontends have arrived by then.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from service import __version__
from service.ipc.messages.inference import BatchRun
from service.ipc.messages.tracing import Api, RequestTrace

LINK_SECONDS = 2.0
"""How long a batch waits for its requests. Their answers leave the engine together."""
MAX_BATCHES = 4096
"""Most batches that wait for their spans, and most batches with a span that are remembered."""
SCOPE = InstrumentationScope("seqserve", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status()
NAMES = {
    Api.INFER: "POST /infer",
    Api.STREAM: "chunk on /stream",
    Api.OIP: "POST /v2/models/{name}/infer",
    Api.GRPC: "inference.GRPCInferenceService/ModelInfer",
    Api.GRPC_STREAM: "inference.GRPCInferenceService/ModelStreamInfer",
}
"""The spans of requests. No name has a value of a client."""
Attributes = Mapping[str, str | int | float | bool]
BatchKey = tuple[int, int, float]


class Interval(NamedTuple):
    """A stage of a request: moments on the monotonic clock. run: the batch that it computes."""

    name: str
    begin: float
    end: float
    run: BatchRun | None = None


@dataclass(slots=True)
class _Batch:
    """A batch without a span yet. model: the attributes of its model. due: when the span is made."""

    run: BatchRun
    model: Attributes
    due: float
    links: list[Link] = field(default_factory=list)


class SpanMaker:
    """Makes the spans of a service."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._salt = os.urandom(16)
        self._batches: dict[BatchKey, _Batch] = {}
        self._made: dict[BatchKey, None] = {}
        """Batches with a span, oldest first."""

    def request_spans(self, request: RequestTrace, now: float, unix_offset: float) -> list[ReadableSpan]:
        """Return the spans of a request, and note its batches. unix_offset: Unix time less monotonic time, in seconds."""
        state = TraceState.from_header([request.state]) if request.state else None
        context = _context(request.trace, request.span, state)
        parent = _context(request.trace, request.parent, state, remote=True) if request.parent else None
        model = {"seqserve.model": request.model, "seqserve.version": request.version}
        status = Status(StatusCode.ERROR, request.outcome) if request.failed else Status()
        begin, end = request.arrived + unix_offset, request.ended + unix_offset
        attributes = {**model, **_request_attributes(request)}
        spans = [self._span(NAMES[request.api], context, begin, end, attributes, parent, kind=SpanKind.SERVER, status=status)]
        for name, begin, end, run in stages(request):
            stage = SpanContext(context.trace_id, int.from_bytes(os.urandom(8)) or 1, False, SAMPLED, state)
            begin, end = begin + unix_offset, max(begin, end) + unix_offset
            if run is None:
                spans.append(self._span(name, stage, begin, end, {}, context))
            else:
                links = [Link(self._batch_context(run))]
                spans.append(self._span(name, stage, begin, end, {**model, **run_attributes(run)}, context, links=links))
        for run in request.runs:
            self._note(run, model, context, now)
        return spans

    def batch_spans(self, now: float, unix_offset: float) -> list[ReadableSpan]:
        """Return the spans of the batches that are due; of all of them for an infinite `now`."""
        due = [key for key, batch in self._batches.items() if batch.due <= now]
        spans = [self._batch_span(self._batches.pop(key), unix_offset) for key in due]
        self._made |= dict.fromkeys(due)
        while len(self._made) > MAX_BATCHES:
            del self._made[next(iter(self._made))]
        return spans

    def _note(self, run: BatchRun, model: Attributes, context: SpanContext, now: float) -> None:
        key = _key(run)
        if key in self._made:
            return
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= MAX_BATCHES:
                return
            batch = self._batches[key] = _Batch(run, model, now + LINK_SECONDS)
        batch.links.append(Link(context))

    def _batch_span(self, batch: _Batch, unix_offset: float) -> ReadableSpan:
        run, attributes = batch.run, {**batch.model, **run_attributes(batch.run)}
        begin, end = run.formed + unix_offset, run.ended + unix_offset
        return self._span("batch", self._batch_context(run), begin, end, attributes, links=batch.links)

    def _span(
        self,
        name: str,
        context: SpanContext,
        begin: float,
        end: float,
        attributes: Attributes,
        parent: SpanContext | None = None,
        *,
        links: Sequence[Link] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = UNSET,
    ) -> ReadableSpan:
        """Return a span. begin, end: Unix times in seconds."""
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            links=links,
            kind=kind,
            status=status,
            start_time=_ns(begin),
            end_time=_ns(end),
            instrumentation_scope=SCOPE,
        )

    def _batch_context(self, run: BatchRun) -> SpanContext:
        """Return the ids of a batch's span. They follow from the batch, so that each of its requests can link to it."""
        digest = hashlib.blake2b(repr(_key(run)).encode(), digest_size=24, key=self._salt).digest()
        return SpanContext(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1, False, SAMPLED)


def stages(request: RequestTrace) -> Iterator[Interval]:
    """Yield the stages that a request has passed, in their order. They follow each other as the metrics' stages do."""
    if request.sent:
        yield Interval("parse", request.arrived, request.sent)
    since = request.queued
    if request.runs:
        yield Interval("channel", request.sent, max(request.sent, request.queued))
    for run in request.runs:
        yield Interval("queue", since, run.formed)
        yield Interval("stage_in", run.formed, run.staged)
        if run.started > run.staged:
            yield Interval("device_wait", run.staged, run.started)
        yield Interval("compute", run.started, run.computed, run)
        yield Interval("stage_out", run.computed, run.ended)
        since = run.ended
    if request.received:
        yield Interval("reply", min(request.ready, request.received), request.received)
        yield Interval("encode", request.received, request.ended)


def run_attributes(run: BatchRun) -> Attributes:
    """Return the attributes of a batch."""
    return {
        "seqserve.engine": run.engine,
        "seqserve.device": run.device,
        "seqserve.batch.number": run.number,
        "seqserve.batch.sequences": run.sequences,
        "seqserve.batch.tokens": run.tokens,
        "seqserve.batch.padded_tokens": run.padded_tokens,
        "seqserve.batch.by": run.by,
    }


def _request_attributes(request: RequestTrace) -> Attributes:
    """Return the attributes of a request and of its first batch."""
    attributes: dict[str, str | int | float | bool] = {
        "seqserve.request_id": request.request_id,
        "seqserve.api": request.api.value,
        "seqserve.outcome": request.outcome,
        "seqserve.key": request.caller,
        "seqserve.sequences": request.sequences,
        "seqserve.tokens": request.tokens,
        "seqserve.batches": len(request.runs),
    }
    if request.api in (Api.GRPC, Api.GRPC_STREAM):
        attributes |= {"rpc.system": "grpc", "rpc.response.status_code": request.status}
        attributes["rpc.service"], _, attributes["rpc.method"] = NAMES[request.api].partition("/")
    else:
        attributes["http.response.status_code"] = int(request.status)
        method, _, route = NAMES[request.api].partition(" ")
        if method == "POST":
            attributes |= {"http.request.method": method, "http.route": route}
    if request.failed or request.outcome != "ok":
        attributes["error.type"] = request.outcome
    return {**attributes, **run_attributes(request.runs[0])} if request.runs else attributes


def _context(trace: str, span: str, state: TraceState | None = None, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), remote, SAMPLED, state)


def _key(run: BatchRun) -> BatchKey:
    """Return the key that identifies a batch. The numbers of a restarted engine begin again, at a later time."""
    return run.engine, run.number, run.formed


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
