"""Which requests are logged and traced, and the content of their logs and traces."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import random
from types import SimpleNamespace
from typing import Any

import pytest

from service.errors import InvalidInput, Overloaded
from service.frontend.run import observation
from service.frontend.run.observation import MAX_TRACES_PER_SECOND, ONCE_PER_REQUEST, EndedRequest, Observer, stage_seconds
from service.frontend.run.origin import NO_ORIGIN, RequestIdentity, RequestIds, RequestOrigin
from service.ipc.messages.inference import Answer, BatchRun
from service.ipc.messages.tracing import Api, RequestTrace
from service.ipc.trace_socket import TraceReader, TraceSockets, TraceWriter
from service.log import MAX_CAPPED_LINES, Log
from service.metrics import CUT_OFF, GONE, OK, Metrics
from service.settings import Settings

TRACE, SPAN = "ab" * 16, "cd" * 8
SAMPLED, UNSAMPLED = (
    RequestOrigin(b"", f"00-{TRACE}-{SPAN}-01".encode(), b"a=1"),
    RequestOrigin(b"", f"00-{TRACE}-{SPAN}-00".encode()),
)
RUN = BatchRun(0, "cpu", 7, 3, 12, 0, "launches", formed=10.003, staged=10.004, started=10.004, computed=10.009, ended=10.010)
ANSWER = Answer(ready=10.0105, queued=10.002, runs=[RUN])
NOT_RUN: dict[str, Any] = {"answer": None, "sent": 0.0, "received": 0.0}


class Watched:
    """An observer with its log and the end of its traces."""

    def __init__(self, log_file: Path, stack: ExitStack, **settings: Any) -> None:
        self.metrics, sockets, self._log_file = Metrics(), TraceSockets(), log_file
        self._reader = TraceReader(os.dup(sockets.reading))
        writer = TraceWriter(os.dup(sockets.writing)) if settings.get("trace_endpoint") else None
        descriptor = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.observer = Observer(Settings(**settings), Log("frontend", descriptor), self.metrics, writer)
        stack.callback(os.close, descriptor)
        stack.callback(sockets.close)
        stack.callback(self._reader.close)
        if writer is not None:
            stack.callback(writer.close)

    def end(
        self, outcome: str = OK, seconds: float = 0.012, origin: RequestOrigin = NO_ORIGIN, **fields: Any
    ) -> RequestIdentity:
        """Run a request."""
        identity = RequestIdentity(origin, RequestIds())
        observation = self.observer.begin(identity, random()) if self.observer.chooses else None
        fields = {"sent": 10.001, "received": 10.011, "lengths": [3, 4], "answer": ANSWER, **fields}
        request = EndedRequest(Api.INFER, identity, "local", ("words", "1"), outcome, 10.0, ended=10.0 + seconds, **fields)
        self.observer.end(observation, request)
        return identity

    @property
    def traces(self) -> list[RequestTrace]:
        traces: list[RequestTrace] = []
        while read := list(self._reader.read()):
            traces += read
        return traces

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log_file.read_text().splitlines()]


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Return a function that makes an observer with these settings."""
    with ExitStack() as stack:
        yield lambda **settings: Watched(tmp_path / f"log-{random()}", stack, **settings)


@pytest.fixture
def tracing(watch: Watch) -> Watch:
    """Return a function that makes an observer that traces at a rate."""
    return lambda rate=0.0, **settings: watch(trace_endpoint="http://receiver:4317", trace_rate=rate, **settings)


def test_nothing_is_chosen_by_default(watch: Watch) -> None:
    service = watch()
    assert not service.observer.chooses and not service.observer.times_all
    service.end(origin=SAMPLED)
    service.end(InvalidInput.code)
    assert service.traces == [] and service.lines == []


def test_requests_are_traced_at_a_rate_or_as_the_client_says(tracing: Watch) -> None:
    never, always = tracing(0.0), tracing(1.0)
    for _ in range(20):
        never.end()
        always.end()
    traces = always.traces
    assert never.traces == [] and {trace.parent for trace in traces} == {""}
    assert len({trace.trace for trace in traces}) == 20
    assert always.end(origin=UNSAMPLED).trace_headers == () and always.traces == []
    identity = never.end(origin=SAMPLED)
    [trace] = never.traces
    assert (trace.trace, trace.parent, trace.state) == (TRACE, SPAN, "a=1")
    headers = {b"traceparent": f"00-{TRACE}-{trace.span}-01".encode(), b"tracestate": b"a=1"}
    assert dict(identity.trace_headers) == headers


@pytest.mark.parametrize("origin", [NO_ORIGIN, UNSAMPLED])
@pytest.mark.parametrize(
    "outcome, failed", [(InvalidInput.code, False), (Overloaded.code, True), (CUT_OFF, True), (GONE, False)]
)
def test_errors_are_always_traced(tracing: Watch, outcome: str, failed: bool, origin: RequestOrigin) -> None:
    service = tracing()
    service.end(outcome, origin=origin, **NOT_RUN)
    [trace] = service.traces
    assert (trace.outcome, trace.failed, trace.sent, trace.received, list(trace.runs)) == (outcome, failed, 0.0, 0.0, [])
    assert (trace.trace == TRACE) is (origin is UNSAMPLED)


def test_slow_requests_are_always_traced_and_logged(tracing: Watch) -> None:
    service = tracing(slow_request_ms=20)
    assert service.observer.times_all
    service.end(seconds=0.019)
    service.end(seconds=0.021, origin=UNSAMPLED)
    [trace], [line] = service.traces, service.lines
    assert trace.trace == line["trace_id"] == TRACE
    assert (line["event"], line["level"], line["ms"]["total"]) == ("slow request", "warning", 21.0)


def test_traces_are_limited_and_dropped_at_a_full_socket(tracing: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for traces of all its requests does not fill the receiver."""
    service, before = tracing(), time.monotonic()
    for _ in range(1000):
        service.end(origin=SAMPLED)
    allowed, recorded = MAX_TRACES_PER_SECOND * (1 + time.monotonic() - before), len(service.traces)
    assert MAX_TRACES_PER_SECOND <= recorded <= allowed + 1
    counts = service.metrics.traced_requests.values
    assert counts == {("recorded",): [recorded], ("over_limit",): [1000 - recorded]}
    monkeypatch.setattr(observation, "MAX_TRACES_PER_SECOND", 10**6)
    service = tracing()
    counts = service.metrics.traced_requests.values
    while ("dropped",) not in counts:
        service.end(origin=SAMPLED)
    assert len(service.traces) == counts["recorded",][0] > 100
    service.end(origin=SAMPLED)
    assert counts["dropped",] == [1.0] and len(service.traces) == 1


def test_requests_over_the_limit_use_up_no_later_traces(tracing: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more requests are sampled than the limit allows, as many as it allows are traced, and so are errors."""
    now = 100.0
    monkeypatch.setattr(observation, "time", SimpleNamespace(monotonic=lambda: now))
    service = tracing(1.0)
    for _ in range(10):
        for number in range(100):
            service.end(CUT_OFF if number == 99 else OK)
            now += 0.001
        traced = [trace.outcome for trace in service.traces]
    assert traced.count(CUT_OFF) == 1 and abs(len(traced) - 0.1 * MAX_TRACES_PER_SECOND) <= 2


def test_trace_has_what_the_tracer_needs_and_is_an_example_of_its_stages(tracing: Watch) -> None:
    service = tracing()
    service.end(origin=SAMPLED._replace(request_id=b"an-id"))
    [trace] = service.traces
    assert (trace.request_id, trace.model, trace.version, trace.caller) == ("an-id", "words", "1", "local")
    assert (trace.status, trace.sequences, trace.tokens, trace.queued, trace.runs) == ("200", 2, 7, 10.002, [RUN])
    examples = {labels[2]: example for (labels, _), example in service.metrics.stage_seconds.examples.items()}
    assert {example.trace for example in examples.values()} == {TRACE}
    seconds = dict.fromkeys(("parse", "channel", "queue", "stage_in", "stage_out", "encode"), 0.001)
    seconds |= {"total": 0.012, "device_wait": 0.0, "compute": 0.005, "reply": 0.0005}
    assert {stage: round(example.value, 6) for stage, example in examples.items()} == seconds


def test_trace_of_several_batches_is_no_example_of_the_stages_of_one(tracing: Watch) -> None:
    service = tracing()
    service.end(origin=SAMPLED, answer=Answer(ready=10.0105, queued=10.002, runs=[RUN, RUN]))
    assert {stage for (_, _, stage), _ in service.metrics.stage_seconds.examples} == {*ONCE_PER_REQUEST}


def test_queue_has_the_waits_between_batches() -> None:
    """A batch in flight while the one before it runs has not waited."""
    later = [BatchRun(0, "cpu", 8, 3, 12, 0, "launches", formed, 10.02, 10.02, 10.03, 10.04) for formed in (10.012, 10.035)]
    stages = stage_seconds(10.0, 10.001, 10.05, 10.06, Answer(ready=10.045, queued=10.002, runs=[RUN, *later]))
    assert stages["queue"] == pytest.approx(0.001 + 0.002)
    assert stages["compute"] == pytest.approx(0.005 + 0.01 + 0.01)


def test_access_log_has_one_line_for_each_request(watch: Watch) -> None:
    service = watch(access_log_rate=1.0)
    service.end(origin=RequestOrigin(b"first"))
    service.end(InvalidInput.code, origin=SAMPLED, **NOT_RUN)
    first, second = service.lines
    assert first.keys() == {
        *("time", "level", "process", "event", "request_id", "api", "key", "model", "version", "outcome", "status"),
        *("sequences", "tokens", "ms"),
    }
    assert (first["event"], first["request_id"], first["status"], first["ms"]["compute"]) == ("request", "first", "200", 5.0)
    assert (second["outcome"], second["status"], second["trace_id"]) == ("invalid_input", "400", TRACE)
    assert second["ms"] == {"total": 12.0}


def test_failed_requests_are_logged_up_to_a_limit_for_each_outcome(watch: Watch) -> None:
    service = watch()
    identities = [service.end(Overloaded.code, answer=None) for _ in range(3 * MAX_CAPPED_LINES)]
    service.end(CUT_OFF, answer=None)
    lines = service.lines
    assert (lines[0]["event"], lines[0]["outcome"], lines[0]["status"]) == ("request failed", "overloaded", "503")
    assert lines[0]["request_id"] == identities[0].request_id.decode()
    assert [line["outcome"] for line in lines].count(Overloaded.code) == MAX_CAPPED_LINES == len(lines) - 1


@pytest.mark.parametrize(
    "api, outcome, status",
    [
        *((Api.GRPC, OK, "OK"), (Api.GRPC, InvalidInput.code, "INVALID_ARGUMENT"), (Api.GRPC_STREAM, GONE, "CANCELLED")),
        *((Api.GRPC, CUT_OFF, "UNAVAILABLE"), (Api.OIP, OK, "200"), (Api.STREAM, GONE, "499"), (Api.INFER, CUT_OFF, "503")),
    ],
)
def test_status_is_that_of_the_protocol(api: Api, outcome: str, status: str) -> None:
    identity = RequestIdentity(NO_ORIGIN, RequestIds())
    assert EndedRequest(api, identity, "local", ("words", "1"), outcome, 0.0).status == status
