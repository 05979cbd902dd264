"""The sending side of a connection: frames of one tick leave in one write, and data waits for the windows of flow control."""

from __future__ import annotations

import asyncio
from typing import Protocol

from service.frontend.http2.frames import DEFAULT_WINDOW, END_STREAM, MAX_FRAME_BYTES, data_header, header_frames

WRITE_BYTES = 1 << 16
"""Data is passed to the transport in pieces of this size, so that it stops soon after the transport is full."""


class SendingStream(Protocol):
    """A stream as the sender sees it. pending: data that was not sent yet."""

    id: int
    send_window: int
    pending: memoryview
    trailers: bytes
    progressed: float

    def finish(self) -> None:
        """The last frame of the response has been sent."""

    def sent(self) -> None:
        """No data is pending any more."""


class Sender:
    """Sends the frames of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._frames: list[bytes] = []
        self._scheduled = False
        self._ready: dict[int, SendingStream] = {}
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
        return self.pending_bytes + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    @property
    def peer(self) -> str:
        """Return the address of the client, empty if it is not known."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    def connect(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

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
        if self._frames and self._transport is not None:
            data = b"".join(self._frames)
            self._frames.clear()
            self.written_bytes += len(data)
            if not self._transport.is_closing():
                self._transport.write(data)

    def close(self) -> None:
        """Drop everything that waits: the connection has ended."""
        self._frames.clear()
        self._ready.clear()
        self._transport = None

    def start(self, stream: SendingStream, size: int) -> None:
        """Send the pending data of a stream, to which `size` bytes were added, as far as the windows allow."""
        self.pending_bytes += size
        stream.progressed = self._loop.time()
        self._ready[stream.id] = stream
        self.pump()

    def resume(self, stream: SendingStream) -> None:
        """Continue with a stream whose window was opened."""
        if stream.pending and stream.send_window > 0:
            self._ready[stream.id] = stream
            self.pump()

    def drop(self, stream: SendingStream) -> None:
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

    def _send_frame(self, stream: SendingStream) -> int:
        """Send one DATA frame of a stream, and its trailers after the last frame. Returns the size of the data."""
        size = min(len(stream.pending), stream.send_window, self.window, MAX_FRAME_BYTES)
        if size <= 0:
            return 0
        self.write_content(data_header(size, 0, stream.id) + stream.pending[:size])
        stream.pending = stream.pending[size:]
        stream.send_window -= size
        self.window -= size
        self.pending_bytes -= size
        stream.progressed = self._loop.time()
        if not stream.pending:
            stream.pending = memoryview(b"")  # releases the data
            trailers = stream.trailers
            stream.sent()
            if trailers:
                self.write(header_frames(trailers, END_STREAM, stream.id))
                stream.finish()
        return size
