"""uvicorn's WebSocket protocol with limits: no client stalls the event loop, fills the memory, or holds a connection that is dead.

uvicorn takes a protocol class as a setting (`ws=`) but has no hook for these cases. The classes therefore override methods of uvicorn's
implementation and of websockets' parser, and use their undocumented attributes; pyproject.toml pins both versions. The alternative is
a new protocol: it would repeat uvicorn's handshake and keepalive, and the parser.

Messages bypass ASGI: a MessageReceiver takes them in callbacks. Frames are parsed one at a time, for at most SLICE_SECONDS in one
callback, less while requests wait, and a message that consists of one frame without websockets' parser. Reading stops while the client
does not read its replies, and soon after the receiver takes no message: a few bytes are read ahead, because a socket that is not read
does not show that its client has gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from http import HTTPStatus
from struct import Struct
from typing import Any, Protocol, cast

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Frame, apply_mask  # type: ignore[attr-defined]
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from service.errors import InvalidRequest, Overloaded, ServiceError, TooLarge
from service.frontend.guards.connection_guard import Phase, UnreadBytes
from service.frontend.guards.delivery import delivery
from service.frontend.guards.start_queue import WaitingStart
from service.frontend.http1.hot_path import HotPath
from service.frontend.http1.http_protocol import MAX_WAITING_BYTES

CLOSE_SECONDS, CLOSE_PAUSE_SECONDS = 1.0, 0.05
"""Longest wait for the client's close frame after the service has sent its own, and how rarely the socket is read meanwhile: clients that
send on would keep the event loop busy with bytes that nothing needs."""
SLICE_SECONDS = 0.002
"""Time after which a callback leaves the rest of the frames and messages to a later callback."""
MAX_MESSAGE_BYTES, MAX_MESSAGE_FRAMES = 1 << 20, 1024
"""Largest message, and most frames of one message."""
MAX_FRAME_RATE, MAX_PING_RATE = 4096, 100
"""Frames per second that are read of one socket, besides the first of each message, and pings and pongs among them."""
RATE_SECONDS = 1.0
"""Interval over which the limits per second count."""
SOCKET = "seqserve.socket"
"""The extension in the ASGI scope of a handshake that holds the WebSocketProtocol."""
READ_AHEAD_BYTES = 1 << 16
"""Bytes that may wait for the receiver before reading stops."""
MAX_JOINED_BYTES = 1 << 16
"""Messages of more bytes are not copied behind their heads."""
MAX_TAKEN = 8
"""Messages that are passed on before the time is looked at."""
_TEXT_FRAME, _BINARY_FRAME = 0x81, 0x82
"""The first byte of a frame that is a whole message, RFC 6455 section 5.2."""
_WHOLE_MESSAGES = _TEXT_FRAME, _BINARY_FRAME
_MASKED, _SIZE_OF_16_BITS, _SIZE_OF_64_BITS = 0x80, 126, 127
_HEAD_OF_16_BITS, _HEAD_OF_64_BITS = Struct(">BBH").pack, Struct(">BBQ").pack
"""The head of a text in one frame, which a server does not mask: its kind, the size of its size, and its size."""


class MessageReceiver(Protocol):
    """The application's side of an accepted socket."""

    @property
    def ready(self) -> bool:
        """Whether it takes another message now. When it becomes true again, the receiver calls `WebSocketProtocol.read_on`."""

    def receive(self, data: bytes, is_text: bool, arrived: float) -> bool:
        """Take a message, which arrived at this monotonic time, and return `ready`. A text is valid UTF-8."""


class _FrameReader(StreamReader):
    """A reader that stops the parser before each frame."""

    def at_eof(self) -> Generator[None, None, bool]:
        """Return whether the data has ended. The parser calls this before each frame, and continues when it is called again."""
        yield
        return (yield from super().at_eof())


class _FrameParser(ServerProtocol):
    """websockets' parser, which parses one frame at a time."""

    def parse(self) -> Generator[None]:
        self.reader = _FrameReader()
        yield from super().parse()

    def parse_frame(self) -> bool:
        """Parse the handshake or one frame of the bytes that have arrived. Return whether it was whole."""
        self.receive_data(b"")
        return bool(self.events)

    def release(self) -> None:
        """Free the parser of a lost connection: its generator refers to this object, and so do the tracebacks of its errors."""
        self.parser.close()
        for error in (self.parser_exc, self.handshake_exc):
            if error is not None:
                error.__traceback__ = error.__context__ = error.__cause__ = None


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket, which drains on shutdown and closes with the right code."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], *, hot_path: HotPath
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._hot_path = hot_path
        self._starts = hot_path.frontend.limits.starts
        self._arrived = 0.0
        """When the messages arrived that are parsed now."""
        # Without the extension for compressed messages: chunks are small, and a small message may decompress to a large one.
        self.conn: _FrameParser = _FrameParser(max_size=MAX_MESSAGE_BYTES, logger=self.logger)
        self._draining = False
        self._reading = self._taking = True
        """Whether the socket is read, and whether frames may be handled."""
        self._continuation: asyncio.Handle | WaitingStart | None = None
        """The callback that parses further frames, or the turn for which they wait."""
        self._receiver: MessageReceiver | None = None
        self._between_messages = False
        """Whether a message begins with the next byte, and websockets' parser has read none of it."""
        self._message_bytes = 0
        """Bytes of the frames of an incomplete message."""
        self._rate_began = 0.0
        self._later_frames = self._pings = 0
        """Frames besides the first of each message, and the pings and pongs among them, since `_rate_began`."""
        self.phase_began = self.loop.time()
        self.received_bytes = 0
        self._unread = UnreadBytes()
        self._acknowledged_bytes = 0
        """Bytes that had reached the client's system when the last pong was due."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._hot_path.open_sockets += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._hot_path.open_sockets -= 1
        self._count_received(0)
        if self._continuation is not None:
            self._continuation.cancel()
            self._continuation = None
        super().connection_lost(exc)
        self.conn.release()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, now or when its turn has come. The handshake is valid: HttpProtocol has checked it."""
        reader = self.conn.reader
        if self._continuation is None:
            self._arrived = time.monotonic()
            if self._receiver is not None:
                if self._starts.must_wait(self._arrived):
                    self._continuation = self._starts.add(self._arrived, self._continue)
                elif self._taking and not reader.buffer:
                    data = data[self._take_messages(data) :]
                    if not data and self._taking:
                        return
        reader.feed_data(data)
        is_late = self.close_sent
        self._parse_frames()
        if is_late:
            self._parse_later(CLOSE_PAUSE_SECONDS)
            self._set_reading()

    def pause_writing(self) -> None:
        """Read nothing while the client does not read: otherwise the answers to its pings would pile up."""
        super().pause_writing()
        self._set_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._parse_later(0.0)

    def keepalive_timeout(self) -> None:
        """Close the socket of a client that answers no pings, unless replies wait in front of the ping and the client reads them.

        A client that reads gets the time for a pong again. The guard closes its socket if it stops reading.
        """
        delivered = delivery(self.transport)
        waits = self.transport.get_write_buffer_size() > 0 or (delivered is not None and delivered.unsent_bytes > 0)
        before = self._acknowledged_bytes
        if delivered is not None:
            self._acknowledged_bytes = delivered.acknowledged_bytes
        if waits and self._acknowledged_bytes > before and self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def shutdown(self) -> None:
        """Queue the disconnect behind the messages that have arrived: the application answers them and then closes the socket.

        uvicorn would close the socket at once and lose these replies.
        """
        if self.handshake_complete and not self.close_sent:
            self.stop_keepalive()
            self.close_timeout = CLOSE_SECONDS
            self._draining = True
            self._parse_frames()
        else:
            super().shutdown()

    # The application's side.

    def deliver_to(self, receiver: MessageReceiver) -> None:
        """Pass the messages to a receiver from now on. The end of the socket is still an ASGI event."""
        self._receiver, self._between_messages = receiver, True
        self.read_on()

    def read_on(self) -> None:
        """Pass on the messages that have arrived, in a later callback."""
        if not self.disconnected:
            self._parse_later(0.0)

    def send_texts(self, contents: Sequence[bytes | memoryview]) -> None:
        """Send text messages, in one write if they are small. A closing socket sends nothing more."""
        if self.close_sent or self.conn.state is not State.OPEN or self.transport.is_closing():
            return
        frames, joined = list[bytes | memoryview](), 0
        for content in contents:
            size = len(content)
            joined += size
            if size < _SIZE_OF_16_BITS:
                head = bytes((_TEXT_FRAME, size))
            elif size < 1 << 16:
                head = _HEAD_OF_16_BITS(_TEXT_FRAME, _SIZE_OF_16_BITS, size)
            else:
                head = _HEAD_OF_64_BITS(_TEXT_FRAME, _SIZE_OF_64_BITS, size)
            frames += head, content
        if joined <= MAX_JOINED_BYTES:
            self.transport.write(b"".join(frames))
        else:
            self.transport.writelines(frames)

    def fail(self, reason: str) -> None:
        """Close the socket after an internal error."""
        if not self.close_sent:
            self.conn.fail(CloseCode.INTERNAL_ERROR, reason)
            self.handle_parser_exception()

    async def receive(self) -> Any:
        """Return the next ASGI event: the handshake, or the end of the socket."""
        return await self.queue.get()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Drop the application, which refers to this object: a closed socket would stay in memory until a garbage collection."""
        super().on_task_complete(task)
        cast(dict[str, Any], self.scope["extensions"]).pop(SOCKET, None)
        self._receiver = None

    async def send(self, message: Any) -> None:
        """Send an ASGI event. A refused handshake counts as complete: uvicorn would log an error for it."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True
        elif message["type"] == "websocket.close":
            self._parse_later(0.0)

    def handle_connect(self, event: Request) -> None:
        """Give the application access to this object."""
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            cast(dict[str, Any], self.scope["extensions"])[SOCKET] = self

    def send_receive_event_to_app(self) -> None:
        """Pass a message that arrived in frames to the receiver."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames, self._message_bytes = [], 0
        self._deliver(data, self.curr_msg_data_type == "text")

    def _deliver(self, data: bytes, is_text: bool) -> None:
        self.phase_began = self.loop.time()
        if self.close_sent:
            return
        if is_text and not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                self._close_for(InvalidRequest.code, CloseCode.INVALID_DATA, "the text of a message is not UTF-8")
                return
        assert self._receiver is not None, "nothing is parsed before"
        self._taking = self._receiver.receive(data, is_text, self._arrived)

    # The connection guard.

    @property
    def phase(self) -> Phase:
        """A WebSocket is never idle: a stream may be silent, and pings find clients that have gone."""
        if self.close_sent or self.transport.is_closing():
            return Phase.CLOSING
        return Phase.RECEIVING if self._taking and (self.frames or self.received_bytes) else Phase.RUNNING

    @property
    def unread_bytes(self) -> int:
        return self._unread.size

    def unread_since(self, now: float) -> float | None:
        return self._unread.since(self.transport, now)

    def close_idle(self) -> None:
        self.shutdown()

    def refuse_slow_request(self) -> None:
        self.conn.fail(CloseCode.POLICY_VIOLATION, "the message took too long to arrive: send it faster")
        self.handle_parser_exception()

    def abort(self) -> None:
        self.transport.abort()

    # Frames.

    def handle_text(self, event: Frame) -> None:
        self._message_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._message_bytes = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_MESSAGE_FRAMES:
            reason = f"the message has more than {MAX_MESSAGE_FRAMES} frames"
            self._close_for("too_many_frames", CloseCode.POLICY_VIOLATION, reason)
            return
        self._later_frames += 1
        self._message_bytes += len(event.data)
        super().handle_cont(event)

    def handle_ping(self) -> None:
        self._count_ping()
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self._count_ping()
        super().handle_pong(event)

    def handle_parser_exception(self) -> None:
        """Send the close frame for a message that is too large or malformed, and keep reading until the client closes.

        uvicorn would close the connection while data still arrives; the kernel then resets it, and the client loses the close frame.
        """
        if self.close_timer is not None:
            return
        assert self.conn.close_sent is not None, "the parser has failed the connection"
        self.queue.put_nowait({"type": "websocket.disconnect", "code": self.conn.close_sent.code, "reason": None})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(CLOSE_SECONDS, self.transport.close)
        self.frames, self._message_bytes = [], 0

    def _parse_frames(self) -> None:
        """Handle the frames that have arrived, up to a complete message. After its share of time another callback continues."""
        end = time.monotonic() + SLICE_SECONDS / (1 + self._starts.waiting)
        while self._may_parse():
            if not self._parse_frame():
                break
            if time.monotonic() > end:
                self._parse_later(0.0)
            elif self._later_frames >= MAX_FRAME_RATE:
                self._parse_later(self._rate_began + RATE_SECONDS - time.monotonic())
        self._count_received(self._message_bytes + len(self.conn.reader.buffer))
        self._set_reading()

    def _parse_frame(self) -> bool:
        """Handle one frame; false if no whole frame has arrived."""
        buffer, arrived = self.conn.reader.buffer, False
        if taken := self._take_messages(buffer):
            del buffer[:taken]
            return True
        if buffer:
            now = time.monotonic()
            if now - self._rate_began >= RATE_SECONDS:
                self._rate_began, self._later_frames, self._pings = now, 0, 0
            self._between_messages = False
            arrived = self.conn.parse_frame()
        if self.conn.parser_exc is not None:
            if self.close_timer is None:
                too_large = isinstance(self.conn.parser_exc, PayloadTooBig)
                self._count_closed(TooLarge.code if too_large else InvalidRequest.code)
            self.handle_parser_exception()
        elif arrived:
            self.handle_events()
            self._between_messages = (
                self._receiver is not None and self.conn.current_size is None and self.conn.state is State.OPEN
            )
        elif self._draining and not self.close_sent:
            self._draining = False
            self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.SERVICE_RESTART, "reason": None})
        return arrived

    def _take_messages(self, buffer: bytes | bytearray) -> int:
        """Pass on a few messages that have arrived whole and in one frame each. websockets' parser takes three times as long.

        Return the bytes of their frames.
        """
        if not self._between_messages or self.close_sent:
            return 0
        arrived, end = len(buffer), 0
        for _ in range(MAX_TAKEN):
            begin = end + 6
            if arrived < begin:
                break
            kind, size = buffer[end], buffer[end + 1] ^ _MASKED
            if size >= _SIZE_OF_16_BITS:
                if size > _SIZE_OF_16_BITS:
                    break  # a large message, or one without a mask
                begin, size = begin + 2, int.from_bytes(buffer[end + 2 : end + 4])
            if arrived < begin + size or kind not in _WHOLE_MESSAGES:
                break
            end = begin + size
            self._deliver(apply_mask(buffer[begin:end], buffer[begin - 4 : begin]), kind == _TEXT_FRAME)
            if not self._taking or self.close_sent:
                break
        return end

    def _parse_later(self, seconds: float) -> None:
        if self._continuation is not None:
            return
        if seconds > 0:
            self._continuation = self.loop.call_later(seconds, self._continue)
        elif self._receiver is not None:
            self._continuation = self._starts.add(time.monotonic(), self._continue)
        else:
            self._continuation = self.loop.call_soon(self._continue)

    def _continue(self, arrived: float | None = None) -> None:
        self._continuation, self._arrived = None, arrived or time.monotonic()
        self._parse_frames()

    def _may_parse(self) -> bool:
        """Return whether the next frame may be handled now: nothing waits for the application, the client, or the next callback."""
        if self._continuation is not None or self.transport.is_closing() or not self.writable.is_set():
            return False
        if self._receiver is None:
            return self.close_sent or not self.handshake_initiated
        return self.close_sent or self._receiver.ready

    def _set_reading(self) -> None:
        """Read from the socket when frames may be handled, and ahead. While the service drains, no further messages are read."""
        taking = self._may_parse() and (self.close_sent or not self._draining)
        if not isinstance(self._continuation, WaitingStart):  # a client that sends slowly gains no time from a busy frontend
            if taking and not self._taking:
                self.phase_began = self.loop.time()
            self._taking = taking
        waits = self._receiver is not None and self.writable.is_set() and not (self._draining or self.close_sent)
        reading = taking or (waits and len(self.conn.reader.buffer) < READ_AHEAD_BYTES)  # ahead, for the receiver
        if reading == self._reading or self.transport.is_closing():
            return
        self._reading = reading
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def _count_ping(self) -> None:
        """Count a ping or a pong, which costs a client nothing."""
        self._later_frames += 1
        self._pings += 1
        if self._pings > MAX_PING_RATE:
            reason = f"more than {MAX_PING_RATE} pings and pongs in a second"
            self._close_for("too_many_pings", CloseCode.POLICY_VIOLATION, reason)

    def _count_received(self, size: int) -> None:
        """Record how much of an incomplete message has arrived. A large message is refused when all connections together hold too much."""
        if not (self.frames or self.received_bytes):
            self.phase_began = self.loop.time()
        bodies = self._hot_path.frontend.limits.bodies
        bodies.add(size - self.received_bytes)
        self.received_bytes = size
        if size > MAX_WAITING_BYTES and not self.close_sent:
            try:
                bodies.check()
            except Overloaded as error:
                reason = "memory is short, or incomplete messages hold too much: retry later"
                self._close_for(error.code, CloseCode.TRY_AGAIN_LATER, reason)

    def revoke(self, error: ServiceError) -> None:
        """Close the socket of a caller that has lost its right."""
        self._close_for(error.code, CloseCode.POLICY_VIOLATION, error.message)

    def _close_for(self, reason: str, code: CloseCode, text: str) -> None:
        """Close a connection that exceeds a limit. reason: for the metric. text: for the client, up to 123 bytes."""
        if not self.close_sent:
            self._count_closed(reason)
        self.conn.fail(code, text)
        self.handle_parser_exception()

    def _count_closed(self, reason: str) -> None:
        self._hot_path.frontend.metrics.connections_closed.add(reason)
