"""Checks the handshake of a WebSocket, so that its errors look like all other errors.

The library answers with plain text, and not at all to a handshake that it cannot parse.
"""

from __future__ import annotations

from collections.abc import Iterable

from websockets.exceptions import InvalidHandshake
from websockets.http11 import Request
from websockets.server import ServerProtocol

from service.errors import InvalidRequest


def check_handshake(target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise InvalidRequest if a GET request is not a handshake as RFC 6455 section 4.2.1 defines it, or too large for the library."""
    library = ServerProtocol()
    library.receive_data(b"GET %b HTTP/1.1\r\n%b\r\n" % (target, b"".join(b"%b: %b\r\n" % header for header in headers)))
    library.parser.close()  # it refers to the object, which would stay in memory until a garbage collection
    if library.handshake_exc is not None:
        raise _refusal(library.handshake_exc.__cause__ or library.handshake_exc)
    [request] = library.events_received()
    assert isinstance(request, Request)
    try:
        library.process_request(request)
    except InvalidHandshake as error:
        raise _refusal(error) from None


def _refusal(problem: BaseException) -> InvalidRequest:
    return InvalidRequest(f"the handshake of the WebSocket is not valid: {problem}")
