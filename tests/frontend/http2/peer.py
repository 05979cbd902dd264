"""A client that sends raw frames to an Http2Connection in memory, on a loop whose clock the tests set."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import hpack

from service.frontend.guards.reading_turns import ReadingTurns
from service.frontend.http2.connection import Http2Connection
from service.frontend.http2.header_blocks import RequestFields, encode_fields
from service.frontend.http2.limits import Limits
from service.frontend.http2.stream import Stream, StreamHandler
from service.frontend.http2.streams import Application

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
KINDS = DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
FLAGS = END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 1, 1, 4, 8, 0x20
REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/echo"), (b":authority", b"localhost")]
LIMITS = Limits(max_streams=8)


class Frame(NamedTuple):
    """A frame that the server sent."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def word(self) -> int:
        """The last 4 bytes as a number: an error code, or a window."""
        return int(struct.unpack(">I", self.payload[4:8] if self.kind == GOAWAY else self.payload[:4])[0])


class Frames(list[Frame]):
    """Frames in the order in which the server sent them."""

    @property
    def goaways(self) -> list[int]:
        """The error codes of GOAWAY."""
        return [frame.word for frame in self if frame.kind == GOAWAY]

    def resets(self, stream: int) -> list[int]:
        return [frame.word for frame in self if frame.kind == RST_STREAM and frame.stream == stream]

    def body(self, stream: int) -> bytes:
        return b"".join(frame.payload for frame in self if frame.kind == DATA and frame.stream == stream)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", size: int | None = None) -> bytes:
    """Return a frame. size: for its header, if it differs from the size of the payload."""
    length = len(payload) if size is None else size
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def window(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def reset(stream: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def block(*fields: tuple[bytes, bytes], path: bytes = b"/echo") -> bytes:
    """Return the header block of a request with more fields."""
    request = [(name, path if name == b":path" else value) for name, value in REQUEST]
    return encode_fields([*request, *fields])


def request(stream: int, path: bytes = b"/echo", *, ended: bool = True) -> bytes:
    """Return a HEADERS frame."""
    return frame(HEADERS, END_HEADERS | (END_STREAM if ended else 0), stream, block(path=path))


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when a test advances it."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class FakeTransport:
    """Collects what the server writes. full: the client reads nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connection: Http2Connection | None = None
        self.written = bytearray()
        self.buffered = 0
        self.full = self.closing = self.eof = self.reading_paused = False

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name == "peername" else None

    def write(self, data: bytes) -> None:
        assert not self.closing and not self.eof, "the server wrote to a closed connection"
        if not self.full:
            self.written += data
            return
        self.buffered += len(data)
        if self.buffered > 1 << 16 and self.connection is not None:
            self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            assert self.connection is not None
            self.loop.call_soon(self.connection.connection_lost, None)

    abort = close


RESPONSE, TRAILERS = encode_fields([(b":status", b"200")]), encode_fields([(b"x-end", b"yes")])


class Echo(StreamHandler):
    """Sends the request's body back when it is complete. /hold answers nothing, /slow consumes nothing, /large returns 1 MB."""

    def __init__(self, application: EchoApplication, stream: Stream, path: bytes) -> None:
        self.application, self.stream, self.path = application, stream, path
        self.body = b""

    def receive(self, data: bytes, ended: bool) -> None:
        if self.path == b"/fail":
            raise RuntimeError("a bug in the application")
        self.body += data
        if self.path != b"/slow":
            self.stream.consumed(len(data))
        if ended and self.path not in (b"/hold", b"/slow"):
            self.stream.respond(RESPONSE, bytes(1_000_000) if self.path == b"/large" else self.body, TRAILERS)

    def lost(self) -> None:
        self.application.lost.append(self.stream.id)

    def sent(self) -> None:
        self.application.sent.append(self.stream.id)


class EchoApplication(Application):
    """Answers the requests of the tests. lost, sent: ids of streams."""

    def __init__(self) -> None:
        self.requests: list[RequestFields] = []
        self.handlers: dict[int, Echo] = {}
        self.lost: list[int] = []
        self.sent: list[int] = []
        self.faults = 0
        self.errors: list[Exception] = []

    def start(self, stream: Stream, request: RequestFields) -> StreamHandler | None:
        self.requests.append(request)
        if request.path == b"/refuse":
            stream.send_headers(RESPONSE, last=True)
            return None
        self.handlers[stream.id] = Echo(self, stream, request.path)
        return self.handlers[stream.id]

    def count_fault(self) -> None:
        self.faults += 1

    def report(self, error: Exception) -> None:
        self.errors.append(error)


class Peer:
    """A connected client. turns: if several connections share them.
    limits: that differ from LIMITS.
    """

    def __init__(
        self,
        loop: ClockLoop,
        application: Any = None,
        *,
        greet: bool = True,
        turns: ReadingTurns | None = None,
        **limits: float,
    ) -> None:
        self.loop = loop
        self.application: Any = application or EchoApplication()
        self.connections: set[Http2Connection] = set()
        self.transport = FakeTransport(loop)
        self._buffer = b""
        self._headers = hpack.Decoder(1 << 20)
        self.turns = turns or ReadingTurns()
        loop.run_until_complete(self._connect(replace(LIMITS, **cast(Any, limits))))
        if greet:
            self.greeting = self.send(PREFACE + settings())

    async def _connect(self, limits: Limits) -> None:
        self.connection = Http2Connection(self.application, limits, self.connections, self.turns)
        self.transport.connection = self.connection
        self.connection.connection_made(cast(asyncio.BaseTransport, self.transport))

    @property
    def has_unread_frames(self) -> bool:
        """Whether frames wait for the connection's next turn."""
        return self.connection._turn.waits

    @property
    def closed(self) -> bool:
        """Whether the server ended the connection."""
        return self.transport.eof or self.transport.closing

    def send(self, *data: bytes) -> Frames:
        """Send bytes, and return the frames that the server sends until it is idle."""
        return self.loop.run_until_complete(self._send(b"".join(data)))

    def send_parts(self, parts: Iterable[bytes]) -> Frames:
        """Send the parts in sequence, until the server closes the connection."""
        frames = Frames()
        for part in parts:
            frames += self.send(part)
            if self.closed:
                break
        return frames

    def run(self, function: Callable[..., Any], *arguments: Any) -> Frames:
        """Call a function in the event loop, and return the frames that the server then sends."""
        self.loop.call_soon(function, *arguments)
        return self.send()

    def sweep(self, seconds: float) -> Frames:
        """Let time pass, and return the frames that the server then sends."""
        self.loop.now += seconds
        return self.run(self.connection.sweep, self.loop.now)

    def header_fields(self, frames: Iterable[Frame]) -> list[dict[bytes, bytes]]:
        """Return the fields of all HEADERS frames."""
        return [
            {bytes(name): bytes(value) for name, value in self._headers.decode(frame.payload, raw=True)}
            for frame in frames
            if frame.kind == HEADERS
        ]

    async def _send(self, data: bytes) -> Frames:
        if data and not self.transport.closing:
            self.connection.data_received(data)
        for _ in range(3):
            await asyncio.sleep(0)
        while self.has_unread_frames:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self._frames()

    def _frames(self) -> Frames:
        frames, self._buffer = split_frames(self._buffer + bytes(self.transport.written))
        self.transport.written.clear()
        return frames


def split_frames(data: bytes) -> tuple[Frames, bytes]:
    """Return the whole frames at the start of the data, and the rest."""
    frames, at = Frames(), 0
    while len(data) - at >= 9:
        upper, lower, kind, flags, stream = struct.unpack_from(">BHBBI", data, at)
        end = at + 9 + (upper << 16 | lower)
        if end > len(data):
            break
        frames.append(Frame(kind, flags, stream, data[at + 9 : end]))
        at = end
    return frames, data[at:]
