"""What the connections of a frontend share on the hot path of HTTP: its endpoints, known heads of requests, and heads of replies."""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from service.errors import STATUS, ServiceError
from service.frontend.guards.connection_guard import connection_limit
from service.frontend.http1.request_heads import RequestHead, RequestHeads
from service.frontend.rest.http_exchange import JSON, error_headers
from service.frontend.run.exchange import Exchange
from service.frontend.run.frontend import Frontend

MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 100
"""Largest head of a request, which is its request line and its headers, and most headers."""
STATUS_LINES = {kind: f"{status.http} {HTTPStatus(status.http).phrase}".encode() for kind, status in STATUS.items()}
"""What follows the version of HTTP in the reply to an error."""


class HttpExchange(Exchange, Protocol):
    """An exchange on a connection of HTTP."""

    @property
    def peer(self) -> str:
        """The address of the client, empty if it is not known."""


class Call(Protocol):
    """A request that is not answered yet: an engine has it, or its start or its refusal waits."""

    def disconnect(self) -> None:
        """The client closed the connection: cancel the request. The exchange is not used any more."""


class Endpoint(Protocol):
    """An endpoint of the hot path."""

    def accepts(self, head: RequestHead) -> bool:
        """Return whether this endpoint may answer the request. The body of any other request goes to the general path as it arrives."""

    def start(self, head: RequestHead, body: bytes, exchange: HttpExchange, arrived: float) -> Call | None:
        """Start a request, or return None if the general path must answer it. The reply comes after the return.

        arrived: the monotonic time at which it was complete. Raises the ServiceError of a request that is refused.
        """

    def abandon(self) -> None:
        """Count a request whose body did not arrive, or whose client left before its turn."""


class HotPath:
    """Shared by the connections of a frontend: the endpoints, the known heads of requests and the headers of replies."""

    def __init__(
        self,
        frontend: Frontend,
        infer: Endpoint | None = None,
        oip_infer: Endpoint | None = None,
        key_refusals: Endpoint | None = None,
    ) -> None:
        """infer: POST /infer. oip_infer: inference of the Open Inference Protocol. key_refusals: answers requests to both that have no
        valid key. None where the port has no such endpoint.
        """
        self.frontend = frontend
        self.heads = RequestHeads(MAX_HEADERS, frontend.access.policy)
        self._infer = infer
        self._oip_infer = oip_infer
        self._key_refusals = key_refusals
        self.open_sockets = 0
        """Number of open WebSockets."""
        self.max_sockets = max(1, connection_limit(frontend.settings) // 2)
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_lines = b""

    def find_endpoint(self, head: RequestHead) -> Endpoint | None:
        """Return the endpoint that answers a request, if there is one on the hot path."""
        if head.refusal is not None:
            return self._key_refusals
        path = head.path
        if path == "/infer":
            return self._infer
        return self._oip_infer if path.startswith("/v2/models/") and path.endswith("/infer") else None

    def reply_head(
        self, status: bytes, headers: list[tuple[bytes, bytes]], length: int, request_id: bytes, more_headers: bytes
    ) -> bytes:
        """Return the head of a reply with content of this length.

        headers: the server's own, a new list when they change. more_headers: complete lines.
        """
        if headers is not self._headers:
            self._headers, self._header_lines = headers, b"".join([b"%b: %b\r\n" % pair for pair in headers])
        head = b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\nx-request-id: %b\r\n%b\r\n"
        return head % (status, self._header_lines, length, request_id, more_headers)


def error_head(error: ServiceError) -> tuple[bytes, bytes]:
    """Return the status and the header lines of an error."""
    headers = [(b"content-type", JSON.encode()), *error_headers(error)]
    return STATUS_LINES[type(error)], b"".join([b"%b: %b\r\n" % pair for pair in headers])
