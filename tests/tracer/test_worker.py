"""The tracer's spans, its queue, and the protocol of its exporter, which follows from the URL of the receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from service.ipc.messages.inference import BatchRun
from service.ipc.messages.tracing import Api, RequestTrace
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings
from service.tracer import worker
from service.tracer.exporter import open_exporter
from service.tracer.spans import LINK_SECONDS, MAX_BATCHES, SpanMaker, stages
from service.tracer.worker import Tracer
from tests.tracer.receiver import receiving


def run_of(number: int, engine: int = 0) -> BatchRun:
    moments = {"formed": 3.0, "staged": 4.0, "started": 4.5, "computed": 5.0, "ended": 6.0}
    return BatchRun(engine, "cpu", number, 3, 12, 0, "launches", **moments)


def request(number: int, *runs: BatchRun) -> RequestTrace:
    moments: dict[str, Any] = {"arrived": 1.0, "sent": 2.0, "received": 7.0, "ready": 6.5, "ended": 8.0, "queued": 2.5}
    identity: dict[str, Any] = {"trace": f"{number:032x}", "span": f"{number:016x}", "request_id": "id"}
    identity |= {"parent": "", "state": ""}
    outcome: dict[str, Any] = {"outcome": "ok", "status": "200", "failed": False, "caller": "local", "api": Api.INFER}
    model: dict[str, Any] = {"model": "words", "version": "1", "sequences": 1, "tokens": 3}
    return RequestTrace(**identity, **outcome, **moments, **model, runs=list(runs))


class Exporter(SpanExporter):
    """Keeps spans, or fails."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.spans: list[ReadableSpan] = []
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if isinstance(self._result, Exception):
            raise self._result
        self.spans += spans
        return self._result


def test_stages_follow_each_other_from_arrival_to_end() -> None:
    """Of two batches, the second waits from the end of the first batch."""
    later = BatchRun(0, "cpu", 2, 3, 12, 0, "launches", formed=6.1, staged=6.2, started=6.2, computed=6.3, ended=6.4)
    intervals = list(stages(request(1, run_of(1), later)))
    assert [stage.name for stage in intervals] == [
        *("parse", "channel", "queue", "stage_in", "device_wait", "compute", "stage_out"),
        *("queue", "stage_in", "compute", "stage_out", "reply", "encode"),
    ]
    assert intervals[0].begin == 1.0 and intervals[-1].end == 8.0
    assert [stage.begin for stage in intervals[1:11]] == [stage.end for stage in intervals[:10]]


def test_failed_request_has_a_span_in_error() -> None:
    failed = msgspec.structs.replace(request(1), failed=True, outcome="internal")
    [root, *others] = SpanMaker(Resource({})).request_spans(failed, 0.0, 0.0)
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "internal")
    assert root.attributes and root.attributes["error.type"] == "internal"
    assert all(span.status.is_unset for span in others)


def test_batch_waits_for_the_requests_of_all_frontends() -> None:
    maker = SpanMaker(Resource({}))
    roots = [maker.request_spans(request(number, run_of(7)), now, 0.0)[0] for number, now in ((1, 0.0), (2, 1.0), (3, 1.9))]
    assert maker.batch_spans(LINK_SECONDS - 0.01, 0.0) == []
    [batch] = maker.batch_spans(LINK_SECONDS, 0.0)
    assert [link.context for link in batch.links] == [root.context for root in roots]
    late = maker.request_spans(request(4, run_of(7)), 50.0, 0.0)
    [compute] = [span for span in late if span.name == "compute"]
    assert [link.context for link in compute.links] == [batch.context], "a late request links to the span that was made"
    assert maker.batch_spans(100.0, 0.0) == []
    for number in range(MAX_BATCHES + 100):
        maker.request_spans(request(number + 1, run_of(number)), 200.0, 0.0)
    assert len(maker.batch_spans(300.0, 0.0)) == len(maker._made) == MAX_BATCHES and not maker._batches


def test_batches_of_other_engines_and_other_times_are_others() -> None:
    maker = SpanMaker(Resource({}))
    restarted = BatchRun(0, "cpu", 7, 3, 12, 0, "launches", formed=33.0, staged=34.0, started=34.0, computed=35.0, ended=36.0)
    for number, run in enumerate((run_of(7), run_of(8), run_of(7, engine=1), restarted)):
        maker.request_spans(request(number + 1, run), 0.0, 0.0)
    assert len({span.context.trace_id for span in maker.batch_spans(LINK_SECONDS, 0.0) if span.context}) == 4


@pytest.mark.parametrize(
    ("result", "limit", "counts"),
    [
        (SpanExportResult.SUCCESS, 10_000, {"exported": 1050}),
        (SpanExportResult.SUCCESS, 25, {"dropped": 1025, "exported": 25}),
        (SpanExportResult.FAILURE, 10_000, {"failed": 1050}),
        (RuntimeError("broken"), 10_000, {"failed": 1050}),
    ],
)
def test_spans_are_exported_at_the_end_and_counted(
    result: SpanExportResult | Exception, limit: int, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond the limit are dropped."""
    monkeypatch.setattr(worker, "MAX_WAITING_SPANS", limit)
    metrics, exporter = Metrics(), Exporter(result)

    async def test() -> None:
        tracer = Tracer(SpanMaker(Resource({})), exporter, metrics, Log("tracer"))
        tracer.add([request(number + 1, run_of(number // 2)) for number in range(100)])
        tracer.stop()
        await tracer.run()

    asyncio.run(test())
    assert {labels[0]: values[0] for labels, values in metrics.spans.values.items()} == counts
    assert len(exporter.spans) == counts.get("exported", len(exporter.spans))


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://collector/v1/traces", "https://collector/v1/traces"),
        ("http://collector:4317/other", "http://collector:4317/other"),
        ("http://collector:4317", "collector:4317"),
        ("https://collector/", "collector"),
    ],
)
def test_url_decides_the_protocol(url: str, endpoint: str) -> None:
    """A URL of OTLP over HTTP stays a URL; gRPC takes host and port of it."""
    exporter = open_exporter(Settings(trace_endpoint=url))
    assert exporter._endpoint == endpoint  # type: ignore[attr-defined]
    exporter.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_arrive_over_each_protocol(protocol: str) -> None:
    with receiving(protocol) as receiver:
        exporter = open_exporter(Settings(trace_endpoint=receiver.endpoint))
        spans = SpanMaker(Resource({"service.name": "seqserve"})).request_spans(request(7, run_of(1)), 0.0, 0.0)
        exporter.export(spans)
        exporter.shutdown()
    assert {(span.trace, span.resource["service.name"]) for span in receiver.spans} == {(f"{7:032x}", "seqserve")}
    assert [span.name for span in receiver.spans] == [span.name for span in spans]
