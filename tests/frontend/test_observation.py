"""Which requests are logged and traced, and the content of their logs and traces."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import random
from typing import Any

import pytest

from service.errors import InvalidInput, Overloaded
from service.frontend import observation
from service.frontend.observation import MAX_TRACES_PER_SECOND, EndedRequest, Observer
from service.frontend.origin import NO_ORIGIN, Origin, RequestIdentity, RequestIds
from service.ipc.messages import Answer, Api, BatchRun, RequestTrace
from service.ipc.trace_socket import TraceReader, TraceSockets, TraceWriter
from service.log import MAX_CAPPED_LINES, Log
from service.metrics import CUT_OFF, GONE, OK, Metrics
from service.settings import Settings

TRACE, SPAN = "ab" * 16, "cd" * 8
SAMPLED, UNSAMPLED = Origin(b"", f"00-{TRACE}-{SPAN}-01".encode(), b"a=1"), Origin(b"", f"00-{TRACE}-{SPAN}-00".encode())
RUN = BatchRun(0, "cpu", 7, 3, 12, 0, False, formed=10.003, staged=10.004, started=10.004, computed=10.009, ended=10.010)
ANSWER = Answer(ready=10.0105, queued=10.002, runs=[RUN])


class Watched:
    """An observer with its log and the end of its traces."""

    def __init__(self, log_file: Path, **settings: Any) -> None:
        self.metrics = Metrics()
        self.sockets = TraceSockets()
        self._reader = TraceReader(os.dup(self.sockets.reading))
        self._log_file = log_file
        writer = TraceWriter(os.dup(self.sockets.writing)) if settings.get("trace_endpoint") else None
        descriptor = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._descriptor = descriptor
        self.observer = Observer(Settings(**settings), Log("frontend", descriptor), self.metrics, writer)
        self._writer = writer

    def end(self, outcome: str = OK, seconds: float = 0.012, origin: Origin = NO_ORIGIN, **fields: Any) -> RequestIdentity:
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

    def close(self) -> None:
        self.sockets.close()
        os.close(self._descriptor)
        self._reader.close()
        if self._writer is not None:
            self._writer.close()


@contextmanager
def watched(folder: Path, **settings: Any) -> Iterator[Watched]:
    watched = Watched(folder / "log", **settings)
    try:
        yield watched
    finally:
        watched.close()


TRACING = {"trace_endpoint": "http://receiver:4317"}


def test_nothing_is_chosen_by_default(tmp_path: Path) -> None:
    with watched(tmp_path) as service:
        assert not service.observer.chooses and not service.observer.times_all
        service.end(origin=SAMPLED)
        service.end(InvalidInput.code)
        assert service.traces == [] and service.lines == []


@pytest.mark.parametrize("rate, count", [(0.0, 0), (1.0, 20)])
def test_requests_are_traced_at_a_rate(tmp_path: Path, rate: float, count: int) -> None:
    with watched(tmp_path, **TRACING, trace_rate=rate) as service:
        for _ in range(20):
            service.end()
        traces = service.traces
        assert len({trace.trace for trace in traces}) == count
        assert all(trace.parent == "" for trace in traces)


def test_client_decides_about_its_own_traces(tmp_path: Path) -> None:
    with watched(tmp_path, **TRACING, trace_rate=1.0) as service:
        assert service.end(origin=UNSAMPLED).trace_headers == ()
        assert service.traces == []
    with watched(tmp_path, **TRACING, trace_rate=0.0) as service:
        identity = service.end(origin=SAMPLED)
        [trace] = service.traces
        assert (trace.trace, trace.parent, trace.state) == (TRACE, SPAN, "a=1")
        assert dict(identity.trace_headers) == {
            b"traceparent": f"00-{TRACE}-{trace.span}-01".encode(),
            b"tracestate": b"a=1",
        }


@pytest.mark.parametrize("origin", [NO_ORIGIN, UNSAMPLED])
@pytest.mark.parametrize(
    "outcome, failed", [(InvalidInput.code, False), (Overloaded.code, True), (CUT_OFF, True), (GONE, False)]
)
def test_errors_are_always_traced(tmp_path: Path, outcome: str, failed: bool, origin: Origin) -> None:
    with watched(tmp_path, **TRACING, trace_rate=0.0) as service:
        service.end(outcome, origin=origin, sent=0.0, received=0.0, answer=None)
        [trace] = service.traces
        assert (trace.outcome, trace.failed, trace.sent, trace.received, list(trace.runs)) == (outcome, failed, 0.0, 0.0, [])
        assert (trace.trace == TRACE) is (origin is UNSAMPLED)


def test_slow_requests_are_always_traced_and_logged(tmp_path: Path) -> None:
    with watched(tmp_path, **TRACING, trace_rate=0.0, slow_request_ms=20) as service:
        assert service.observer.times_all
        service.end(seconds=0.019)
        service.end(seconds=0.021, origin=UNSAMPLED)
        [trace] = service.traces
        [line] = service.lines
        assert trace.trace == line["trace_id"] == TRACE
        assert (line["event"], line["level"], line["ms"]["total"]) == ("slow request", "warning", 21.0)


def test_trace_has_what_the_tracer_needs(tmp_path: Path) -> None:
    with watched(tmp_path, **TRACING, trace_rate=1.0) as service:
        service.end(origin=Origin(b"an-id"))
        [trace] = service.traces
        assert (trace.request_id, trace.model, trace.version, trace.caller, trace.status) == (
            "an-id",
            "words",
            "1",
            "local",
            "200",
        )
        assert (trace.sequences, trace.tokens, trace.queued, trace.runs) == (2, 7, 10.002, [RUN])


def test_traces_are_limited(tmp_path: Path) -> None:
    """A client that asks for traces of all its requests does not fill the receiver."""
    with watched(tmp_path, **TRACING) as service:
        before = time.monotonic()
        for _ in range(1000):
            service.end(origin=SAMPLED)
        allowed = MAX_TRACES_PER_SECOND * (1 + time.monotonic() - before)
        recorded = len(service.traces)
        assert MAX_TRACES_PER_SECOND <= recorded <= allowed + 1
        counts = {labels[0]: values[0] for labels, values in service.metrics.traced_requests.values.items()}
        assert counts == {"recorded": recorded, "over_limit": 1000 - recorded}


def test_full_socket_drops_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "MAX_TRACES_PER_SECOND", 10**6)
    with watched(tmp_path, **TRACING) as service:
        counts = service.metrics.traced_requests.values
        while ("dropped",) not in counts:
            service.end(origin=SAMPLED)
        assert len(service.traces) == counts["recorded",][0] > 100
        service.end(origin=SAMPLED)
        assert counts["dropped",] == [1.0] and len(service.traces) == 1


def test_traced_requests_are_examples_of_their_stages(tmp_path: Path) -> None:
    with watched(tmp_path, **TRACING) as service:
        service.end(origin=SAMPLED)
        examples = {labels[2]: example for (labels, _), example in service.metrics.stage_seconds.examples.items()}
        assert {example.trace for example in examples.values()} == {TRACE}
        assert {stage: round(example.value, 6) for stage, example in examples.items()} == {
            "total": 0.012,
            "parse": 0.001,
            "channel": 0.001,
            "queue": 0.001,
            "stage_in": 0.001,
            "device_wait": 0.0,
            "compute": 0.005,
            "stage_out": 0.001,
            "reply": 0.0005,
            "encode": 0.001,
        }


def test_access_log_has_one_line_for_each_request(tmp_path: Path) -> None:
    with watched(tmp_path, access_log_rate=1.0) as service:
        service.end(origin=Origin(b"first"))
        service.end(InvalidInput.code, origin=SAMPLED, answer=None, sent=0.0, received=0.0)
        first, second = service.lines
        assert first.keys() == {
            *("time", "level", "process", "event", "request_id", "api", "key", "model", "version", "outcome", "status"),
            *("sequences", "tokens", "ms"),
        }
        assert (first["event"], first["request_id"], first["status"], first["ms"]["compute"]) == (
            "request",
            "first",
            "200",
            5.0,
        )
        assert (second["outcome"], second["status"], second["trace_id"]) == ("invalid_input", "400", TRACE)
        assert second["ms"] == {"total": 12.0}


def test_failed_requests_are_logged_in_any_case(tmp_path: Path) -> None:
    with watched(tmp_path) as service:
        identity = service.end(Overloaded.code, answer=None)
        [line] = service.lines
        assert (line["event"], line["outcome"], line["status"]) == ("request failed", "overloaded", "503")
        assert line["request_id"] == identity.request_id.decode()


def test_repeated_lines_are_limited_for_each_outcome(tmp_path: Path) -> None:
    with watched(tmp_path) as service:
        for _ in range(3 * MAX_CAPPED_LINES):
            service.end(Overloaded.code, answer=None)
        service.end(CUT_OFF, answer=None)
        outcomes = [line["outcome"] for line in service.lines]
        assert outcomes.count(Overloaded.code) == MAX_CAPPED_LINES and outcomes.count(CUT_OFF) == 1


@pytest.mark.parametrize(
    "api, outcome, status",
    [
        (Api.GRPC, OK, "OK"),
        (Api.GRPC, InvalidInput.code, "INVALID_ARGUMENT"),
        (Api.GRPC_STREAM, GONE, "CANCELLED"),
        (Api.GRPC, CUT_OFF, "UNAVAILABLE"),
        (Api.OIP, OK, "200"),
        (Api.STREAM, GONE, "499"),
        (Api.INFER, CUT_OFF, "503"),
    ],
)
def test_status_is_that_of_the_protocol(api: Api, outcome: str, status: str) -> None:
    identity = RequestIdentity(NO_ORIGIN, RequestIds())
    assert EndedRequest(api, identity, "local", ("words", "1"), outcome, 0.0).status == status
