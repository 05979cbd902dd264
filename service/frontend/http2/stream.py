"""The streams of a connection: the reads and writes of an application, and the flow control of both directions.

The frames of one tick leave in one write, and data waits for the windows of flow control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from service.frontend.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    ErrorCode,
    StreamFault,
    frame,
    header_frames,
    reset_frame,
    response_frames,
    window_update,
)

RECEIVE_WINDOW = 1 << 18
"""How much of a request's body may arrive before the application has consumed it."""
WRITE_BYTES = 1 << 16
"""Data is passed to the transport in pieces of this size, so that it stops soon after the transport is full."""
_NOTHING = memoryview(b"")


class StreamHandler(Protocol):
    """The application's side of a stream."""

    def receive(self, data: bytes, ended: bool) -> None:
        """Handle a part of the request's body. ended: it is the last part. `Stream.consumed` then lets more arrive."""

    def lost(self) -> None:
        """The client reset the stream, or its connection ended: nothing can be sent any more."""

    def sent(self) -> None:
        """All data that waited for the client has been sent."""


class Stream(Struct, eq=False):
    """A request and its response. end: called when both are complete, or when this side resets the stream.

    sender: of the connection, which all streams of the connection, and no others, have. began: when the request arrived. client_ended,
    server_ended: whether the request and the response are complete, or the stream was reset. expected_bytes: the request's Content-Length.
    pending: data that was not sent yet, followed by the trailers. progressed: when data was sent last while more waited.
    """

    id: int
    sender: Sender
    send_window: int
    end: Callable[[Stream, bool], None]
    began: float = 0.0
    handler: StreamHandler | None = None
    """None once the stream has ended: handler and stream refer to each other, and would stay in memory until a garbage collection."""
    receive_window: int = RECEIVE_WINDOW
    client_ended: bool = False
    server_ended: bool = False
    expected_bytes: int | None = None
    received_bytes: int = 0
    ungranted_bytes: int = 0
    """Bytes that were consumed and not yet granted to the client again."""
    pending: memoryview = _NOTHING
    trailers: bytes = b""
    progressed: float = 0.0

    # Called by the connection.

    def receive(self, data: bytes, size: int, ended: bool) -> None:
        """Handle a DATA frame. size: with padding. Raises StreamFault for a window or a Content-Length that is exceeded."""
        self.receive_window -= size
        if self.receive_window < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR)
        received = len(data)
        self.received_bytes += received
        expected = self.expected_bytes
        if expected is not None and (self.received_bytes > expected or (ended and self.received_bytes < expected)):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        self.client_ended = ended
        if size > received:
            self.consumed(size - received)
        if self.handler is not None:
            self.handler.receive(data, ended)

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
        self.end(self, self.client_ended)

    # Called by the application.

    def consumed(self, size: int) -> None:
        """Let the client send `size` more bytes."""
        self.ungranted_bytes += size
        if self.ungranted_bytes >= RECEIVE_WINDOW // 2 and not self.client_ended and not self.server_ended:
            self.sender.write_content(window_update(self.id, self.ungranted_bytes))
            self.receive_window += self.ungranted_bytes
            self.ungranted_bytes = 0

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
            self.end(self, False)

    def _stop(self) -> None:
        self.server_ended = True
        self.sender.drop(self)
        self.pending = _NOTHING


class Sender:
    """Sends the frames of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: asyncio.WriteTransport | None = None
        self._frames: list[bytes] = []
        self._scheduled = False
        self._ready: dict[int, Stream] = {}
        """Streams with pending data and an open window, the stream that sent longest ago first."""
        self.window = DEFAULT_WINDOW
        """How much data the client accepts on all streams together."""
        self.paused = False
        """Whether the transport is full."""
        self.pending_bytes = 0
        """Data of all streams that waits for a window or for the transport."""
        self.written_bytes = 0
        """Bytes that were passed to the transport."""
        self.wrote_content = False
        """Whether frames of a stream were sent since the connection last set this to false."""

    @property
    def unread_bytes(self) -> int:
        """How many bytes wait for the client."""
        return self.pending_bytes + (self.transport.get_write_buffer_size() if self.transport is not None else 0)

    @property
    def peer(self) -> str:
        """Return the address of the client, empty if it is not known."""
        name = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    def write(self, frames: bytes) -> None:
        """Send whole frames at the end of this tick. They must not be data that exceeds a window."""
        self._frames.append(frames)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def write_content(self, frames: bytes) -> None:
        """Send frames of a stream."""
        self.wrote_content = True
        self.write(frames)

    def flush(self) -> None:
        """Pass the frames to the transport."""
        self._scheduled = False
        if self._frames and self.transport is not None:
            data = b"".join(self._frames)
            self._frames.clear()
            self.written_bytes += len(data)
            if not self.transport.is_closing():
                self.transport.write(data)

    def close(self) -> None:
        """Drop everything that waits: the connection has ended."""
        self._frames.clear()
        self._ready.clear()
        self.transport = None

    def start(self, stream: Stream, size: int) -> None:
        """Send the pending data of a stream, to which `size` bytes were added, as far as the windows allow."""
        self.pending_bytes += size
        stream.progressed = self._loop.time()
        self._ready[stream.id] = stream
        self.pump()

    def resume(self, stream: Stream) -> None:
        """Continue with a stream whose window was opened."""
        if stream.pending and stream.send_window > 0:
            self._ready[stream.id] = stream
            self.pump()

    def drop(self, stream: Stream) -> None:
        """Forget the pending data of a stream that has ended."""
        self.pending_bytes -= len(stream.pending)
        self._ready.pop(stream.id, None)

    def pump(self) -> None:
        """Send pending data, one frame of each stream in turn."""
        unwritten = 0
        while self._ready and self.window > 0 and not self.paused:
            id = next(iter(self._ready))
            stream = self._ready.pop(id)
            unwritten += self._send_frame(stream)
            if stream.pending and stream.send_window > 0:
                self._ready[id] = stream
            if unwritten >= WRITE_BYTES:
                self.flush()
                unwritten = 0

    def _send_frame(self, stream: Stream) -> int:
        """Send one DATA frame of a stream, and its trailers after the last frame. Returns the size of the data."""
        size = min(len(stream.pending), stream.send_window, self.window, MAX_FRAME_BYTES)
        if size <= 0:
            return 0
        self.write_content(frame(DATA, 0, stream.id, stream.pending[:size]))
        stream.pending = stream.pending[size:]
        stream.send_window -= size
        self.window -= size
        self.pending_bytes -= size
        stream.progressed = self._loop.time()
        if not stream.pending:
            stream.pending = _NOTHING  # releases the data
            trailers = stream.trailers
            if stream.handler is not None:
                stream.handler.sent()
            if trailers:
                self.write(header_frames(trailers, END_STREAM, stream.id))
                stream.finish()
        return size
