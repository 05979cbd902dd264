"""uvicorn's parser of HTTP, which refuses heads that are too large, ambiguous or of another version."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.errors import HeadersTooLarge, InvalidRequest, ServiceError
from service.frontend.http1.hot_path import MAX_HEAD_BYTES, MAX_HEADERS


class _HeadRefused(Exception):
    """Ends the parser's work on a request."""


class LimitedParser(HttpToolsProtocol):
    """A connection of uvicorn. `received_bytes` of an incomplete request have arrived, which its subclass counts."""

    received_bytes: int

    def __init__(self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._message_begun = self._head_complete = False
        """Whether the parser has read a request, or its head, in part."""
        self._head_bytes = 0
        self._refusal: ServiceError | None = None
        self._current: RequestResponseCycle | None = None
        """The request that the parser reads, once its head is complete."""

    @abstractmethod
    def _refuse(self, error: ServiceError) -> None:
        """Send an error for a request that cannot be read to its end, and close the connection."""

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._message_begun and not self._head_complete and self.received_bytes > MAX_HEAD_BYTES:
            # A header that arrives in pieces reaches `on_header` only when it is complete.
            self._refuse(_head_too_large())

    # The parser and uvicorn call these.

    def on_message_begin(self) -> None:
        self._message_begun, self._head_complete, self._head_bytes, self._current = True, False, 0, None
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head_bytes(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(HeadersTooLarge(f"the request has more than {MAX_HEADERS} headers: send fewer"))

    def on_headers_complete(self) -> None:
        self._head_complete = True
        version, hosts = self.parser.get_http_version(), [name for name, _ in self.headers if name == b"host"]
        if version not in ("1.0", "1.1"):
            self._refuse_head(InvalidRequest("the version of HTTP is not supported: send HTTP/1.1"))
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            self._refuse_head(InvalidRequest(f"the request has {len(hosts)} Host headers: send exactly one"))
        ignored_upgrade = self.parser.should_upgrade() and not self._should_upgrade()
        if ignored_upgrade and self._has_body():
            # The parser would take the body for the protocol after the upgrade.
            self._refuse_head(
                InvalidRequest("a request with a body cannot upgrade its connection: leave out the Upgrade header")
            )
        before = self.cycle
        super().on_headers_complete()
        self._current = self.cycle if self.cycle is not before else None
        if ignored_upgrade:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._message_begun, self._current = False, None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidRequest("the request is not valid HTTP: send it as RFC 9112 defines HTTP/1.1"))

    def _should_upgrade(self) -> bool:
        """Return whether the request is the handshake of a WebSocket, which has no body."""
        return self.parser.get_method() == b"GET" and not self._has_body() and super()._should_upgrade()

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in self.headers
        )

    def _count_head_bytes(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(_head_too_large())

    def _refuse_head(self, error: ServiceError) -> NoReturn:
        """End the parser's work on a request; uvicorn then calls `send_400_response`.

        The error itself is not raised: its traceback would keep this object, and all bytes that arrived, until a garbage collection.
        """
        self._refusal = error
        raise _HeadRefused


def _head_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes: send less")
