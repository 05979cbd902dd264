"""The protocol of the traces, which follows from the URL of their receiver."""

from __future__ import annotations

import pytest

from service.settings import Settings
from service.tracer.exporter import open_exporter


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
