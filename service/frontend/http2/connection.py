"""One HTTP/2 connection: reads frames, applies the rules of RFC 9113 to them, and passes requests to the application.

Every limit here bounds what a client can make this side hold or do. A client that exceeds one gets GOAWAY with ENHANCE_YOUR_CALM, or
its stream is refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

from service.frontend.guards.connection_guard import Phase, UnreadBytes, retirement
from service.frontend.guards.reading_turns import ReadingTurn, ReadingTurns
from service.frontend.http2.budget import RateBudget
from service.frontend.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADER_BYTES,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITIZED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    WORD,
    ConnectionFault,
    ErrorCode,
    Flood,
    Setting,
    StreamFault,
    frame,
    goaway_frame,
    read_header,
    settings_frame,
    window_update,
)
from service.frontend.http2.header_blocks import TOLERANCE, HeaderReader, RequestFields
from service.frontend.http2.sender import Sender
from service.frontend.http2.stream import RECEIVE_WINDOW, Stream, StreamHandler

CONNECTION_WINDOW = 1 << 22
"""How much data of all streams may be on its way. The windows of the streams limit how much is kept."""
MAX_CONTINUATIONS = 8
"""Frames of one header block after the first: its largest size needs one or two."""
LINGER_SECONDS = 1.0
"""How long a connection is still read after a fault: closing it at once could discard the GOAWAY frame."""
MIN_DATA_BYTES = 5
"""Smaller frames within a body count as control frames. Some clients send the 5 bytes before a gRPC message apart."""
FREE_WINDOW_UPDATES, SENT_BYTES_PER_UPDATE = 10_000, 16
"""Updates of windows that a client may send at any time, and how many sent bytes allow it one more. Some clients answer each message of a
stream with two."""
RAPID_SECONDS = 0.005
"""A stream that is reset sooner has cost this side more than the client. Later, its client has waited for it: its deadline has passed."""
MIN_WINDOW_UPDATE = 64
"""Smaller updates of a window count as control frames while data waits: each may cause a frame with little data."""
DRAIN_PING = b"draining"
DRAIN_PING_SECONDS = 1.0
"""How long a drained connection waits for the reply to its ping: the client has then seen the first GOAWAY."""
_ENDED_STREAMS = 512
"""Streams whose end is remembered, to tell a late frame from a wrong one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may do.

    max_streams: concurrent streams. max_header_bytes: size of a header block, and of the decoded list. ping_seconds: how often this side
    pings a quiet connection; ping_timeout_seconds: how long it waits for any reply. min_ping_seconds, max_ping_strikes: how often the
    client may ping while it receives nothing, and how many pings may come too early. stall_seconds: how long one stream may wait for a
    window. max_age_seconds: when no further stream begins on a connection, infinite for none.
    """

    max_streams: int
    max_header_bytes: int
    ping_seconds: float
    ping_timeout_seconds: float
    min_ping_seconds: float
    max_ping_strikes: int
    stall_seconds: float
    max_age_seconds: float = math.inf


class Application(Protocol):
    """Answers the requests of all connections."""

    def start(self, stream: Stream, request: RequestFields) -> StreamHandler | None:
        """Start a request. Returns the handler of its body, or None if the application sends the response by itself."""

    def count_fault(self) -> None:
        """Count a connection that ends because its client violated the protocol or a limit."""

    def report(self, error: Exception) -> None:
        """Log an unexpected exception, which ends a connection."""


@dataclass(slots=True)
class _OpenBlock:
    """An incomplete header block: some of its frames have arrived."""

    stream: int
    flags: int
    parts: list[bytes]
    size: int


@dataclass(slots=True)
class _Budgets:
    """How often a client may send frames that are cheap to send but not to handle. Usual clients stay far below each limit."""

    control: RateBudget = field(default_factory=lambda: RateBudget(1000, 100))
    settings: RateBudget = field(default_factory=lambda: RateBudget(200, 20))
    resets: RateBudget = field(default_factory=lambda: RateBudget(1000, 200))


class Http2Connection(asyncio.Protocol):
    """A connection of a client."""

    def __init__(
        self,
        application: Application,
        limits: Limits,
        connections: set[Http2Connection],
        turns: ReadingTurns,
    ) -> None:
        """connections: all open connections; this connection adds and removes itself. turns: of all connections."""
        self._application = application
        self._limits = limits
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(self._loop)
        self._headers = HeaderReader(limits.max_header_bytes)
        self._budgets = _Budgets()
        self._buffer = b""
        self._awaits_preface = True
        self._met = False
        """Whether the client's first SETTINGS frame has arrived."""
        self._block: _OpenBlock | None = None
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._completed: deque[int] = deque(maxlen=_ENDED_STREAMS)
        self._abandoned: deque[int] = deque(maxlen=_ENDED_STREAMS)
        """Streams that this side ended early: frames that the client sent before it knew are ignored."""
        self._owed = 0
        """Data since the window of the connection was opened last."""
        self._initial_send_window = DEFAULT_WINDOW
        self._window_updates = 0
        self._turn = ReadingTurn(turns, self)
        self._closing = False
        self._closing_later: asyncio.TimerHandle | None = None
        """Closes the connection a little after GOAWAY."""
        self._draining = False
        self._last_accepted = MAX_WINDOW
        """Later streams are ignored, as a GOAWAY frame has announced."""
        self._drain_pinged = math.inf
        self._last_ping, self._ping_strikes = -math.inf, 0
        self._heard = self._pinged = self._loop.time()
        self._ping_sent = False
        self.phase_began = self._heard
        self._retires = retirement(self._heard, limits.max_age_seconds)
        self._unread = UnreadBytes()

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of no class of asyncio
        self._sender.connect(self._transport)
        self._connections.add(self)
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: self._limits.max_streams,
            Setting.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW,
            Setting.MAX_HEADER_LIST_SIZE: self._limits.max_header_bytes,
        }
        self._sender.write(settings_frame(settings) + window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True
        if self._closing_later is not None:
            self._closing_later.cancel()  # it would keep this object until it closes the connection
        self._lose_streams()
        self._sender.close()
        self._turn.close()

    def pause_writing(self) -> None:
        """Stop reading too: a client that reads no replies gets no further replies."""
        self._sender.paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._sender.paused = False
        self._sender.pump()
        self.resume_turn()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._heard = self._loop.time()
        if self._buffer:
            data = self._buffer + data
        elif self._block is None:
            self.phase_began = self._heard
        self._buffer = data
        self._turn.take()

    def eof_received(self) -> bool:
        """Close the connection: a client that sends nothing more cannot read replies either, as flow control needs both directions."""
        return False

    # Frames.

    def read_turn(self, until: float) -> bool:
        """Handle the frames that have arrived, as `Reader` says."""
        if self._closing:
            return False
        more = False
        try:
            if self._awaits_preface:
                self._read_preface()
            if not self._awaits_preface:
                more = self._read_frames(self._buffer, until)
        except ConnectionFault as fault:
            self._application.count_fault()
            self._fail(fault)
        except Exception as error:
            self._application.report(error)
            self._fail(ConnectionFault(ErrorCode.INTERNAL_ERROR, "the service failed on this connection: see its log"))
        self._sender.flush()
        return more and not self._closing

    def pause_turn(self) -> None:
        self._transport.pause_reading()

    def resume_turn(self) -> None:
        """Read from the socket again, unless something else waits."""
        if not (self._turn.waits or self._sender.paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def _read_preface(self) -> None:
        if not PREFACE.startswith(self._buffer[: len(PREFACE)]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2")
        if len(self._buffer) >= len(PREFACE):
            self._awaits_preface, self._buffer = False, self._buffer[len(PREFACE) :]

    def _read_frames(self, data: bytes, until: float) -> bool:
        """Handle whole frames until a time. Return whether others wait."""
        at, end, more = 0, len(data), False
        while end - at >= HEADER_BYTES:
            upper, lower, kind, flags, stream = read_header(data, at)
            size = upper << 8 | lower
            if size > MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame has more than {MAX_FRAME_BYTES} bytes")
            begin, stop = at + HEADER_BYTES, at + HEADER_BYTES + size
            if stop > end:
                break
            self._handle_frame(kind, flags, stream & MAX_WINDOW, data[begin:stop])
            at = stop
            if self._closing:
                self._buffer = b""
                return False
            if time.monotonic() > until:
                more = True
                break
        if at:
            self._buffer = data[at:]
            if self._block is None:  # all frames of a header block share one time
                self.phase_began = self._heard
        return more

    def _handle_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if not self._met and (kind != SETTINGS or flags & ACK):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block is not None and kind != CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        handle = _HANDLERS.get(kind)
        if handle is None:
            self._spend_control()  # frames of unknown types are ignored
            return
        try:
            handle(self, flags, stream, payload)
        except StreamFault as fault:
            self._reset(stream, fault.code)

    def _handle_data(self, flags: int, id: int, payload: bytes) -> None:
        size = len(payload)
        self._owed += size
        if self._owed >= CONNECTION_WINDOW // 2:
            self._sender.write(window_update(0, self._owed))
            self._owed = 0
        if flags & PADDED:
            payload = _without_padding(payload)
        if (not payload or size < MIN_DATA_BYTES) and not flags & END_STREAM:
            self._spend_control()
        stream = self._streams.get(id)
        if stream is None:
            self._refuse_late_frame(id)
        elif stream.client_ended:
            raise StreamFault(ErrorCode.STREAM_CLOSED)
        else:
            stream.receive(payload, size, bool(flags & END_STREAM))

    def _handle_headers(self, flags: int, id: int, payload: bytes) -> None:
        if id % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client's streams have odd numbers")
        if flags & PADDED:
            payload = _without_padding(payload)
        if flags & PRIORITIZED:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a HEADERS frame is too short")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._handle_block(flags, id, payload)
        else:
            self.phase_began = self._heard
            self._block = _OpenBlock(id, flags, [payload], len(payload))

    def _handle_continuation(self, flags: int, id: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream != id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame continues nothing")
        block.parts.append(payload)
        block.size += len(payload)
        if block.size > TOLERANCE * self._limits.max_header_bytes or len(block.parts) > MAX_CONTINUATIONS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large, or in too many frames")
        if flags & END_HEADERS:
            self._block = None
            self._handle_block(block.flags, id, b"".join(block.parts))

    def _handle_block(self, flags: int, id: int, block: bytes) -> None:
        stream = self._streams.get(id)
        if stream is not None:
            self._handle_trailers(stream, flags, block)
        elif id <= self._last_stream:
            self._headers.skip(block)
            if id in self._abandoned:
                return
            code = ErrorCode.STREAM_CLOSED if id in self._completed else ErrorCode.PROTOCOL_ERROR
            raise ConnectionFault(code, f"stream {id} has ended, or was left out")
        else:
            self._start_stream(flags, id, block)

    def _handle_trailers(self, stream: Stream, flags: int, block: bytes) -> None:
        if stream.client_ended:
            self._headers.skip(block)
            raise StreamFault(ErrorCode.STREAM_CLOSED)
        self._headers.trailers(block)
        if not flags & END_STREAM:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        stream.receive(b"", 0, ended=True)

    def _start_stream(self, flags: int, id: int, block: bytes) -> None:
        self._last_stream = id
        if id > self._last_accepted:
            self._headers.skip(block)
            self._abandoned.append(id)
            self._spend_control()
            return
        if len(self._streams) >= self._limits.max_streams:
            self._headers.skip(block)
            raise StreamFault(ErrorCode.REFUSED_STREAM)
        request = self._headers.request(block)
        stream = Stream(id, self._sender, self._initial_send_window, self._end_stream, self._heard)
        stream.expected_bytes = request.content_length
        self._streams[id] = stream
        handler = self._application.start(stream, request)
        if stream.server_ended:
            return
        stream.handler = handler
        if flags & END_STREAM:
            stream.receive(b"", 0, ended=True)

    def _handle_priority(self, flags: int, id: int, payload: bytes) -> None:
        if id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a PRIORITY frame belongs to no stream")
        if len(payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR)
        self._spend_control()  # priorities are ignored, as RFC 9113 allows

    def _handle_reset(self, flags: int, id: int, payload: bytes) -> None:
        self._check_used(id, RST_STREAM)
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an RST_STREAM frame does not have 4 bytes")
        if id > self._last_accepted:
            self._spend_control()
            return
        stream = self._streams.pop(id, None)
        rapid = stream is None or self._heard - stream.began < RAPID_SECONDS
        if rapid and not self._budgets.resets.spend(self._heard):
            self._leave_flood("too many streams are reset as soon as they begin")
        if stream is not None:
            self._abandoned.append(id)
            stream.lost()
            self._close_if_drained()

    def _handle_settings(self, flags: int, id: int, payload: bytes) -> None:
        if id != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a SETTINGS frame belongs to a stream")
        if len(payload) % SETTING.size or (flags & ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame has a wrong size")
        if not self._budgets.settings.spend(self._heard) or len(payload) > 64 * SETTING.size:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        self._met = True
        if flags & ACK:
            return
        for name, value in SETTING.iter_unpack(payload):
            _check_setting(name, value)
        window = dict(SETTING.iter_unpack(payload)).get(Setting.INITIAL_WINDOW_SIZE)
        if window is not None:
            self._change_windows(window)
        self._sender.write(frame(SETTINGS, ACK, 0))

    def _change_windows(self, initial: int) -> None:
        """Apply another initial window to all streams. A window may become negative."""
        change, self._initial_send_window = initial - self._initial_send_window, initial
        for stream in list(self._streams.values()):
            try:
                stream.widen(change)
            except StreamFault:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window overflows") from None

    def _handle_push(self, flags: int, id: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _handle_ping(self, flags: int, id: int, payload: bytes) -> None:
        if id != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a PING frame belongs to a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a PING frame does not have 8 bytes")
        if not flags & ACK:
            self._count_ping()
            self._sender.write(frame(PING, ACK, 0, payload))
            return
        self._spend_control()
        self._ping_sent = False
        if payload == DRAIN_PING and self._draining:
            self._stop_accepting()

    def _count_ping(self) -> None:
        """Count pings that come too early, as gRPC's own servers do: frames of a response allow the next ping at any time."""
        if self._sender.wrote_content:
            self._sender.wrote_content = False
            self._ping_strikes, self._last_ping = 0, -math.inf
        allowed, self._last_ping = self._last_ping + self._limits.min_ping_seconds, self._heard
        if allowed > self._heard:
            self._ping_strikes += 1
            if self._ping_strikes > self._limits.max_ping_strikes:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def _handle_goaway(self, flags: int, id: int, payload: bytes) -> None:
        if id != 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a GOAWAY frame belongs to a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY frame is too short")
        self._spend_control()  # it concerns only streams that this side would start

    def _handle_window_update(self, flags: int, id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a WINDOW_UPDATE frame does not have 4 bytes")
        increment = WORD.unpack(payload)[0] & MAX_WINDOW
        if increment < MIN_WINDOW_UPDATE and self._sender.pending_bytes:
            self._spend_control()
        self._window_updates += 1
        if self._window_updates > FREE_WINDOW_UPDATES + self._sender.written_bytes // SENT_BYTES_PER_UPDATE:
            raise Flood("the windows are updated more often than data is sent")
        if id == 0:
            self._sender.window += increment
            if increment == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE frame adds nothing")
            if self._sender.window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection overflows")
            self._sender.pump()
            return
        self._check_used(id, WINDOW_UPDATE)
        stream = self._streams.get(id)
        if stream is not None:
            if increment == 0:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR)
            stream.widen(increment)

    def _check_used(self, id: int, kind: int) -> None:
        if id == 0 or id > self._last_stream or id % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} belongs to no stream")

    def _refuse_late_frame(self, id: int) -> None:
        """Handle data of a stream that is not open."""
        self._check_used(id, DATA)
        self._spend_control()
        if id not in self._abandoned:
            raise StreamFault(ErrorCode.STREAM_CLOSED)

    def _leave_flood(self, text: str) -> None:
        """Let no more streams begin because the client floods; the open ones may belong to other clients behind a proxy."""
        if self._last_accepted != MAX_WINDOW:
            raise Flood(text)
        self._application.count_fault()
        self._draining, self._drain_pinged, self._last_accepted = True, math.inf, self._last_stream
        self._sender.write(goaway_frame(self._last_stream, ErrorCode.ENHANCE_YOUR_CALM, text))
        self._close_if_drained()

    def _spend_control(self) -> None:
        if not self._budgets.control.spend(self._heard):
            raise Flood("too many frames that carry nothing")

    # The ends of streams and of the connection.

    def _end_stream(self, stream: Stream, completed: bool) -> None:
        """Forget a stream. completed: both sides sent everything."""
        self._streams.pop(stream.id, None)
        (self._completed if completed else self._abandoned).append(stream.id)
        if not self._streams:
            self.phase_began = self._loop.time()
        self._close_if_drained()

    def _reset(self, id: int, code: ErrorCode) -> None:
        """Reset a stream on which the client violated the protocol."""
        if code is not ErrorCode.REFUSED_STREAM and not self._budgets.resets.spend(self._heard):
            raise Flood("too many streams violate the protocol")
        stream = self._streams.get(id)
        if stream is None:
            stream = Stream(id, self._sender, 0, self._end_stream)
        stream.abandon(code)

    def _lose_streams(self) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.lost()

    def _fail(self, fault: ConnectionFault) -> None:
        """End the connection with GOAWAY."""
        if self._closing:
            return
        self._closing = True
        self._buffer = b""
        self._block = None
        self._lose_streams()
        self._sender.write(goaway_frame(self._last_stream, fault.code, fault.text))
        self._sender.flush()
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():  # TLS has no half-closed connections
            with suppress(OSError):  # the client has aborted the connection
                self._transport.write_eof()
        self._transport.resume_reading()
        self._closing_later = self._loop.call_later(LINGER_SECONDS, self._transport.close)

    def drain(self) -> None:
        """Accept streams that the client has sent already, and close the connection after the last stream."""
        if self._draining or self._closing:
            return
        self._draining = True
        if not self._met:
            self._stop_accepting()
            return
        self._drain_pinged = self._loop.time()
        self._sender.write(goaway_frame(MAX_WINDOW, ErrorCode.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING))

    def _stop_accepting(self) -> None:
        self._drain_pinged = math.inf
        if self._last_accepted == MAX_WINDOW:
            self._last_accepted = self._last_stream
            self._sender.write(goaway_frame(self._last_stream, ErrorCode.NO_ERROR))
            self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._draining and not self._streams and self._last_accepted != MAX_WINDOW and not self._closing:
            self._closing = True
            self._sender.flush()
            self._transport.close()

    def close(self) -> None:
        """Close the connection now; its streams are lost."""
        self._fail(ConnectionFault(ErrorCode.NO_ERROR, ""))

    # Timeouts, once a second.

    def sweep(self, now: float) -> None:
        """Apply the limits of time that only this connection knows."""
        if self._closing:
            return
        if now > self._retires:
            self.drain()
        if now - self._drain_pinged > DRAIN_PING_SECONDS:
            self._stop_accepting()
        self._ping_quiet_client(now)
        if self._sender.pending_bytes:
            for stream in list(self._streams.values()):
                if stream.pending and now - stream.progressed > self._limits.stall_seconds and not self._sender.paused:
                    stream.abandon(ErrorCode.CANCEL)
        self._sender.flush()

    def _ping_quiet_client(self, now: float) -> None:
        """Find out whether a client that sends nothing still exists."""
        limits = self._limits
        if self._ping_sent and self._heard < self._pinged and now - self._pinged > limits.ping_timeout_seconds:
            self.abort()
        elif now - max(self._heard, self._pinged) > limits.ping_seconds and self._met:
            self._pinged, self._ping_sent = now, True
            self._sender.write(frame(PING, 0, 0, b"are you?"))

    # The connection guard.

    @property
    def phase(self) -> Phase:
        if self._closing or self._transport.is_closing():
            return Phase.CLOSING
        if not self._met or self._block is not None or (self._buffer and not self._streams):
            return Phase.RECEIVING
        return Phase.RUNNING if self._streams else Phase.KEPT

    @property
    def received_bytes(self) -> int:
        return len(self._buffer)

    @property
    def unread_bytes(self) -> int:
        return self._sender.unread_bytes

    def unread_since(self, now: float) -> float | None:
        return self._unread.since(self._transport, now, self._sender.written_bytes)

    def close_idle(self) -> None:
        self.drain()

    def refuse_slow_request(self) -> None:
        self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the frames of a request arrive too slowly"))

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()


# Of the class, not of each connection: a dictionary of bound methods would keep a closed connection until a garbage collection.
_HANDLERS: dict[int, Callable[[Http2Connection, int, int, bytes], None]] = {
    DATA: Http2Connection._handle_data,
    HEADERS: Http2Connection._handle_headers,
    PRIORITY: Http2Connection._handle_priority,
    RST_STREAM: Http2Connection._handle_reset,
    SETTINGS: Http2Connection._handle_settings,
    PUSH_PROMISE: Http2Connection._handle_push,
    PING: Http2Connection._handle_ping,
    GOAWAY: Http2Connection._handle_goaway,
    WINDOW_UPDATE: Http2Connection._handle_window_update,
    CONTINUATION: Http2Connection._handle_continuation,
}


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame has more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def _check_setting(name: int, value: int) -> None:
    if name == Setting.ENABLE_PUSH and value > 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is not 0 or 1")
    if name == Setting.MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 1 << 24:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
    if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is out of range")
