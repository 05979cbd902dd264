"""One HTTP/2 connection: reads frames, applies the rules of RFC 9113 to them, and passes requests to the application."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from service.frontend.guards.connection_guard import Phase, UnreadBytes, retirement
from service.frontend.guards.reading_turns import ReadingTurn, ReadingTurns
from service.frontend.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITIZED,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WORD,
    ConnectionFault,
    ErrorCode,
    Flood,
    Setting,
    StreamFault,
    check_frame,
    frame,
    goaway_frame,
    headers_payload,
    read_header,
    read_settings,
    settings_frame,
    window_update,
    without_padding,
)
from service.frontend.http2.header_blocks import TOLERANCE, HeaderBlock, HeaderReader
from service.frontend.http2.keep_alive import KeepAlive
from service.frontend.http2.limits import Budgets, Limits
from service.frontend.http2.stream import RECEIVE_WINDOW, Sender, Stream
from service.frontend.http2.streams import Application, Streams

CONNECTION_WINDOW = 1 << 22
"""How much data of all streams may be on its way. The windows of the streams limit how much is kept."""
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


class Http2Connection(asyncio.Protocol):
    """A connection of a client."""

    def __init__(
        self, application: Application, limits: Limits, connections: set[Http2Connection], turns: ReadingTurns
    ) -> None:
        """connections: all open connections; this connection adds and removes itself. turns: of all connections."""
        self._application = application
        self._limits = limits
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._sender = Sender(self._loop)
        self._headers = HeaderReader(limits.max_header_bytes)
        self._budgets = Budgets()
        self._buffer = b""
        self._awaits_preface = True
        self._greeted = False
        """Whether the client's first SETTINGS frame has arrived."""
        self._block: HeaderBlock | None = None
        """A header block of which not all frames have arrived."""
        self._streams = Streams(self._sender)
        self._ungranted_bytes = 0
        """Data since the window of the connection was opened last."""
        self._window_updates = 0
        self._turn = ReadingTurn(turns, self)
        self._closing = False
        self._closing_later: asyncio.TimerHandle | None = None
        """Closes the connection a little after GOAWAY."""
        self._draining = False
        self._drain_pinged = math.inf
        self._last_received = self.phase_began = self._loop.time()
        """When bytes of the client arrived last."""
        self._keep_alive = KeepAlive(limits, self._sender, self._last_received)
        self._retires = retirement(self._last_received, limits.max_age_seconds)
        self._unread = UnreadBytes()

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are of no class of asyncio
        self._sender.transport = self._transport
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
        self._streams.lose()
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
        self._last_received = self._loop.time()
        if self._buffer:
            data = self._buffer + data
        elif self._block is None:
            self.phase_began = self._last_received
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
                self.phase_began = self._last_received
        return more

    def _handle_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if not self._greeted and (kind != SETTINGS or flags & ACK):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if self._block is not None and kind != CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        try:
            if kind > HEADERS:
                check_frame(kind, stream, len(payload))
            _HANDLERS.get(kind, Http2Connection._ignore)(self, flags, stream, payload)
        except StreamFault as fault:
            self._reset(stream, fault.code)

    def _handle_data(self, flags: int, id: int, payload: bytes) -> None:
        size = len(payload)
        self._ungranted_bytes += size
        if self._ungranted_bytes >= CONNECTION_WINDOW // 2:
            self._sender.write(window_update(0, self._ungranted_bytes))
            self._ungranted_bytes = 0
        if flags & PADDED:
            payload = without_padding(payload)
        if (not payload or size < MIN_DATA_BYTES) and not flags & END_STREAM:
            self._spend_control()
        stream = self._streams.open.get(id)
        if stream is None:
            self._streams.check_used(id, DATA)
            self._spend_control()
            self._streams.check_late_data(id)
        elif stream.client_ended:
            raise StreamFault(ErrorCode.STREAM_CLOSED)
        else:
            stream.receive(payload, size, bool(flags & END_STREAM))

    def _ignore(self, flags: int, id: int, payload: bytes) -> None:
        """Handle a frame of an unknown type, a priority, which RFC 9113 allows to ignore, or GOAWAY: this side starts no streams."""
        self._spend_control()

    def _handle_headers(self, flags: int, id: int, payload: bytes) -> None:
        if id % 2 == 0 or flags & (PADDED | PRIORITIZED):
            payload = headers_payload(flags, id, payload)
        if flags & END_HEADERS:
            self._handle_block(flags, id, payload)
        else:
            self.phase_began = self._last_received
            self._block = HeaderBlock(id, flags, payload)

    def _handle_continuation(self, flags: int, id: int, payload: bytes) -> None:
        block = self._block
        if block is None or block.stream != id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame continues nothing")
        block.add(payload, TOLERANCE * self._limits.max_header_bytes)
        if flags & END_HEADERS:
            self._block = None
            self._handle_block(block.flags, id, block.content)

    def _handle_block(self, flags: int, id: int, block: bytes) -> None:
        stream = self._streams.open.get(id)
        if stream is not None:
            self._handle_trailers(stream, flags, block)
        elif id <= self._streams.last:
            self._headers.skip(block)
            self._streams.check_late_headers(id)
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
        self._streams.last = id
        if id > self._streams.last_accepted:
            self._headers.skip(block)
            self._streams.forget(id)
            self._spend_control()
            return
        if len(self._streams.open) >= self._limits.max_streams:
            self._headers.skip(block)
            raise StreamFault(ErrorCode.REFUSED_STREAM)
        request = self._headers.request(block)
        stream = self._streams.begin(id, self._end_stream, self._last_received)
        stream.expected_bytes = request.content_length
        handler = self._application.start(stream, request)
        if stream.server_ended:
            return
        stream.handler = handler
        if flags & END_STREAM:
            stream.receive(b"", 0, ended=True)

    def _handle_reset(self, flags: int, id: int, payload: bytes) -> None:
        self._streams.check_used(id, RST_STREAM)
        if id > self._streams.last_accepted:
            self._spend_control()
            return
        stream = self._streams.open.get(id)
        rapid = stream is None or self._last_received - stream.began < RAPID_SECONDS
        if rapid and not self._budgets.resets.spend(self._last_received):
            self._leave_flood("too many streams are reset as soon as they begin")
        if stream is not None:
            self._streams.forget(id)
            stream.lost()
            self._close_if_drained()

    def _handle_settings(self, flags: int, id: int, payload: bytes) -> None:
        settings = read_settings(flags, payload)
        if not self._budgets.settings.spend(self._last_received):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        self._greeted = True
        if flags & ACK:
            return
        if Setting.INITIAL_WINDOW_SIZE in settings:
            self._streams.change_windows(settings[Setting.INITIAL_WINDOW_SIZE])
        self._sender.write(frame(SETTINGS, ACK, 0))

    def _handle_ping(self, flags: int, id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._keep_alive.reply(payload, self._last_received)
            return
        self._spend_control()
        self._keep_alive.replied()
        if payload == DRAIN_PING and self._draining:
            self._stop_accepting()

    def _handle_window_update(self, flags: int, id: int, payload: bytes) -> None:
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
        self._streams.check_used(id, WINDOW_UPDATE)
        stream = self._streams.open.get(id)
        if stream is not None:
            if increment == 0:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR)
            stream.widen(increment)

    def _leave_flood(self, text: str) -> None:
        """Let no more streams begin because the client floods; the open ones may belong to other clients behind a proxy."""
        if self._streams.last_accepted != MAX_WINDOW:
            raise Flood(text)
        self._application.count_fault()
        self._draining, self._drain_pinged, self._streams.last_accepted = True, math.inf, self._streams.last
        self._sender.write(goaway_frame(self._streams.last, ErrorCode.ENHANCE_YOUR_CALM, text))
        self._close_if_drained()

    def _spend_control(self) -> None:
        if not self._budgets.control.spend(self._last_received):
            raise Flood("too many frames that carry nothing")

    # The ends of streams and of the connection.

    def _end_stream(self, stream: Stream, completed: bool) -> None:
        """Forget a stream. completed: both sides sent everything."""
        self._streams.forget(stream.id, completed)
        if not self._streams.open:
            self.phase_began = self._loop.time()
        if self._draining:
            self._close_if_drained()

    def _reset(self, id: int, code: ErrorCode) -> None:
        """Reset a stream on which the client violated the protocol."""
        if code is not ErrorCode.REFUSED_STREAM and not self._budgets.resets.spend(self._last_received):
            raise Flood("too many streams violate the protocol")
        stream = self._streams.open.get(id)
        if stream is None:
            stream = Stream(id, self._sender, 0, self._end_stream)
        stream.abandon(code)

    def _fail(self, fault: ConnectionFault) -> None:
        """End the connection with GOAWAY."""
        if self._closing:
            return
        self._closing = True
        self._buffer = b""
        self._block = None
        self._streams.lose()
        self._sender.write(goaway_frame(self._streams.last, fault.code, fault.text))
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
        if not self._greeted:
            self._stop_accepting()
            return
        self._drain_pinged = self._loop.time()
        self._sender.write(goaway_frame(MAX_WINDOW, ErrorCode.NO_ERROR) + frame(PING, 0, 0, DRAIN_PING))

    def _stop_accepting(self) -> None:
        self._drain_pinged = math.inf
        if self._streams.last_accepted == MAX_WINDOW:
            self._streams.last_accepted = self._streams.last
            self._sender.write(goaway_frame(self._streams.last, ErrorCode.NO_ERROR))
            self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._draining and not self._streams.open and self._streams.last_accepted != MAX_WINDOW and not self._closing:
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
        if self._keep_alive.sweep(now, self._last_received, greeted=self._greeted):
            self.abort()
        if self._sender.pending_bytes:
            self._streams.abandon_stalled(self._limits.stall_seconds, now)
        self._sender.flush()

    # The connection guard.

    @property
    def phase(self) -> Phase:
        if self._closing or self._transport.is_closing():
            return Phase.CLOSING
        if not self._greeted or self._block is not None or (self._buffer and not self._streams.open):
            return Phase.RECEIVING
        return Phase.RUNNING if self._streams.open else Phase.KEPT

    @property
    def received_bytes(self) -> int:
        return len(self._buffer)

    @property
    def unread_bytes(self) -> int:
        return self._sender.unread_bytes

    def unread_since(self, now: float) -> float | None:
        return self._unread.since(self._transport, now, self._sender.written_bytes)

    close_idle = drain

    def refuse_slow_request(self) -> None:
        self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the frames of a request arrive too slowly"))

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()


# Of the class, not of each connection: a dictionary of bound methods would keep a closed connection until a garbage collection.
_HANDLERS: dict[int, Callable[[Http2Connection, int, int, bytes], None]] = {
    DATA: Http2Connection._handle_data,
    HEADERS: Http2Connection._handle_headers,
    RST_STREAM: Http2Connection._handle_reset,
    SETTINGS: Http2Connection._handle_settings,
    PING: Http2Connection._handle_ping,
    WINDOW_UPDATE: Http2Connection._handle_window_update,
    CONTINUATION: Http2Connection._handle_continuation,
}
