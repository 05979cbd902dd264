"""Sends spans to an OTLP receiver through the exporters of OpenTelemetry's SDK, which read their usual OTEL_EXPORTER_OTLP_* variables too.

The extra `trace` has the packages.
"""

from __future__ import annotations

from functools import cached_property
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import SpanExporter

from service import __version__
from service.settings import Settings

HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"
"""Where a receiver of OTLP over HTTP takes traces. Over gRPC there are no paths."""


def open_exporter(settings: Settings) -> SpanExporter:
    """Return an exporter to SEQSERVE_TRACE_ENDPOINT. It does not connect yet. A URL with a path or HTTP_PORT is for OTLP over HTTP."""
    url = settings.trace_endpoint
    parts = urlsplit(url)
    has_path = bool(parts.path.strip("/"))
    if not has_path and parts.port != HTTP_PORT:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url, insecure=url.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=url if has_path else url.rstrip("/") + HTTP_PATH)


class _HashedResource(Resource):
    """A resource that is hashed once. The exporters hash the resource of each span, which encodes it as JSON."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


def service_resource() -> Resource:
    """Return the description of this service in the spans. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override it."""
    service = Resource({"service.name": "seqserve", "service.version": __version__})
    merged = Resource.create().merge(service).merge(OTELResourceDetector().detect())
    return _HashedResource(merged.attributes, merged.schema_url)
