"""One stream of a connection: the reads and writes of an application, and the flow control of both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.frontend.http2.frames import (
    END_STREAM,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    ErrorCode,
    StreamFault,
    header_frames,
    reset_frame,
    response_frames,
    window_update,
)
from service.frontend.http2.sender import Sender

RECEIVE_WINDOW = 1 << 18
"""How much of a request's body may arrive before the application has consumed it."""
_NOTHING = memoryview(b"")


class StreamHandler(Protocol):
    """The application's side of a stream."""

    def receive(self, data: bytes, ended: bool) -> None:
        """Handle a part of the request's body. ended: it is the last part. `Stream.consumed` then lets more arrive."""

    def lost(self) -> None:
        """The client reset the stream, or its connection ended: nothing can be sent any more."""

    def sent(self) -> None:
        """All data that waited for the client has been sent."""


class Stream:
    """A request and its response. end: called when both are complete, or when this side resets the stream."""

    __slots__ = (
        "_end",
        "_owed",
        "_received",
        "began",
        "client_ended",
        "expected_bytes",
        "handler",
        "id",
        "pending",
        "progressed",
        "receive_window",
        "send_window",
        "sender",
        "server_ended",
        "trailers",
    )

    def __init__(
        self, id: int, sender: Sender, send_window: int, end: Callable[[Stream, bool], None], began: float = 0.0
    ) -> None:
        self.id = id
        self.began = began
        """When its request arrived."""
        self.sender = sender
        """Of the connection: all streams of the connection, and no others, have it."""
        self._end = end
        self.handler: StreamHandler | None = None
        """None once the stream has ended: handler and stream refer to each other, and would stay in memory until a garbage collection."""
        self.send_window = send_window
        self.receive_window = RECEIVE_WINDOW
        self.client_ended = False
        """Whether the request is complete."""
        self.server_ended = False
        """Whether the response is complete, or the stream was reset."""
        self.expected_bytes: int | None = None
        """The request's Content-Length."""
        self._received = 0
        self._owed = 0
        """Bytes that were consumed and not yet granted to the client again."""
        self.pending = _NOTHING
        self.trailers = b""
        self.progressed = 0.0
        """When data was sent last while more waited."""

    @property
    def peer(self) -> str:
        """Return the address of the client, empty if it is not known."""
        return self.sender.peer

    # Called by the connection.

    def receive(self, data: bytes, size: int, ended: bool) -> None:
        """Handle a DATA frame. size: with padding. Raises StreamFault."""
        self.receive_window -= size
        if self.receive_window < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR)
        received = len(data)
        self._received += received
        if self.expected_bytes is not None:
            self.check_length(ended)
        self.client_ended = ended
        if size > received:
            self.consumed(size - received)
        if self.handler is not None:
            self.handler.receive(data, ended)

    def check_length(self, ended: bool) -> None:
        """Raise StreamFault if the body does not have the size that the request named."""
        expected = self.expected_bytes
        if expected is not None and (self._received > expected or (ended and self._received < expected)):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)

    def widen(self, size: int) -> None:
        """Let the stream send more; raises StreamFault."""
        self.send_window += size
        if self.send_window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR)
        self.sender.resume(self)

    def lost(self) -> None:
        """Tell the application that the stream ended early."""
        self._stop()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.lost()

    def abandon(self, code: ErrorCode) -> None:
        """Reset the stream because of its client."""
        handler = self.handler
        self.reset(code)
        if handler is not None:
            handler.lost()

    # Called by the sender.

    def finish(self) -> None:
        """The response is complete."""
        self.server_ended = True
        if not self.client_ended:
            # RFC 9113, section 8.1: it asks the client not to send the rest of a request that is already answered.
            self.sender.write(reset_frame(self.id, ErrorCode.NO_ERROR))
        self.handler = None
        self._end(self, self.client_ended)

    def sent(self) -> None:
        """No data waits any more."""
        if self.handler is not None:
            self.handler.sent()

    # Called by the application.

    def consumed(self, size: int) -> None:
        """Let the client send `size` more bytes."""
        self._owed += size
        if self._owed >= RECEIVE_WINDOW // 2 and not self.client_ended and not self.server_ended:
            self.sender.write_content(window_update(self.id, self._owed))
            self.receive_window += self._owed
            self._owed = 0

    def respond(self, headers: bytes, data: bytes | memoryview, trailers: bytes) -> None:
        """Send a whole response. headers, trailers: header blocks of one frame each."""
        size, sender = len(data), self.sender
        if self.server_ended:
            return
        if size <= min(self.send_window, sender.window, MAX_FRAME_BYTES) and not sender.paused:
            sender.window -= size
            sender.write_content(response_frames(headers, data, trailers, self.id))
            self.finish()
        else:
            self.send_headers(headers)
            self.send(data, trailers)

    def send_headers(self, headers: bytes, *, last: bool = False) -> None:
        """Send a header block. last: it is the whole response."""
        if not self.server_ended:
            self.sender.write_content(header_frames(headers, END_STREAM if last else 0, self.id))
            if last:
                self.finish()

    def send(self, data: bytes | memoryview, trailers: bytes = b"") -> None:
        """Send data as far as the client accepts it, the rest later. trailers: the header block that ends the response."""
        if self.server_ended:
            return
        self.trailers = trailers
        if data:
            self.pending = memoryview(bytes(self.pending) + data if self.pending else data)
            self.sender.start(self, len(data))
        elif trailers and not self.pending:
            self.send_headers(trailers, last=True)

    def reset(self, code: ErrorCode) -> None:
        """End the stream early."""
        if not self.server_ended:
            self._stop()
            self.handler = None
            self.sender.write(reset_frame(self.id, code))
            self._end(self, False)

    def _stop(self) -> None:
        self.server_ended = True
        self.sender.drop(self)
        self.pending = _NOTHING
