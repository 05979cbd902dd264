"""A receiver of OTLP traces, over gRPC with the servicer of the protocol's package, or over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.serving import eventually


class ReceivedSpan(NamedTuple):
    """A span as it arrived. trace, span, parent: ids in hexadecimal digits. links: trace and span of each."""

    name: str
    trace: str
    span: str
    parent: str
    state: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    begin: int
    end: int
    in_error: bool
    resource: dict[str, Any]


class Receiver:
    """The spans that have arrived."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []

    @property
    def spans(self) -> list[ReceivedSpan]:
        return list(self._spans)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Add the spans of a message."""
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            self._spans += [_received(span, resource) for scope in group.scope_spans for span in scope.spans]

    def await_spans(self, name: str, count: int = 1, **attributes: Any) -> list[ReceivedSpan]:
        """Return the spans with this name and these attributes when there are enough. An attribute `a_b` is `seqserve.a_b`."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans if span.name == name and _has(span, attributes)]

        eventually(lambda: len(found()) >= count)
        return found()


def _has(span: ReceivedSpan, attributes: dict[str, Any]) -> bool:
    return {f"seqserve.{name}": value for name, value in attributes.items()}.items() <= span.attributes.items()


def _received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        _attributes(span.attributes),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def receiving(protocol: str) -> Iterator[Receiver]:
    """Run a receiver. protocol: grpc or http."""
    receiver = Receiver()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            receiver.take(request)
            return ExportTraceServiceResponse()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    if protocol == "grpc":
        server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield receiver
        server.stop(None).wait()
    else:
        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            receiver.endpoint = f"http://127.0.0.1:{http.server_port}/v1/traces"
            threading.Thread(target=http.serve_forever, daemon=True).start()
            yield receiver
            http.shutdown()
