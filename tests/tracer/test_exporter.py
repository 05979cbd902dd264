"""The protocol of the traces, which follows from the URL of their receiver."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.resources import Resource

from service.settings import Settings
from service.tracer.exporter import open_exporter
from service.tracer.spans import SpanMaker
from tests.tracer.receiver import receiving
from tests.tracer.test_worker import request, run_of


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
