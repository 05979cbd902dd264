"""The streams of one connection: those that are open, how the others have ended, which may still begin, and who answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from service.frontend.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ConnectionFault, ErrorCode, StreamFault
from service.frontend.http2.header_blocks import RequestFields
from service.frontend.http2.stream import Sender, Stream, StreamHandler

_ENDED_STREAMS = 512
"""Streams whose end is remembered, to tell a late frame from a wrong one."""


class Application(Protocol):
    """Answers the requests of all connections."""

    def start(self, stream: Stream, request: RequestFields) -> StreamHandler | None:
        """Start a request. Returns the handler of its body, or None if the application sends the response by itself."""

    def count_fault(self) -> None:
        """Count a connection that ends because its client violated the protocol or a limit."""

    def report(self, error: Exception) -> None:
        """Log an unexpected exception, which ends a connection."""


class Streams:
    """The streams of one connection. Ids are those of the client."""

    def __init__(self, sender: Sender) -> None:
        self.open: dict[int, Stream] = {}
        self.last = 0
        """The last stream that has begun."""
        self.last_accepted = MAX_WINDOW
        """Later streams are ignored, as a GOAWAY frame has announced."""
        self._sender = sender
        self._send_window = DEFAULT_WINDOW
        self._completed: deque[int] = deque(maxlen=_ENDED_STREAMS)
        self._abandoned: deque[int] = deque(maxlen=_ENDED_STREAMS)
        """Streams that this side ended early: frames that the client sent before it knew are ignored."""

    def begin(self, id: int, end: Callable[[Stream, bool], None], now: float) -> Stream:
        """Return a new open stream. end: see Stream."""
        stream = self.open[id] = Stream(id, self._sender, self._send_window, end, now)
        return stream

    def forget(self, id: int, completed: bool = False) -> Stream | None:
        """Take a stream from the open streams, if it is one. completed: both sides sent everything."""
        (self._completed if completed else self._abandoned).append(id)
        return self.open.pop(id, None)

    def check_used(self, id: int, kind: int) -> None:
        """Raise ConnectionFault for a frame of a stream that has not begun."""
        if id == 0 or id > self.last or id % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} belongs to no stream")

    def check_late_data(self, id: int) -> None:
        """Raise StreamFault for data of a stream that is not open, unless this side ended it early."""
        if id not in self._abandoned:
            raise StreamFault(ErrorCode.STREAM_CLOSED)

    def check_late_headers(self, id: int) -> None:
        """Raise ConnectionFault for a header block of a stream that is not open, unless the client could not know that."""
        if id not in self._abandoned:
            code = ErrorCode.STREAM_CLOSED if id in self._completed else ErrorCode.PROTOCOL_ERROR
            raise ConnectionFault(code, f"stream {id} has ended, or was left out")

    def change_windows(self, initial: int) -> None:
        """Apply another initial window to all streams. A window may become negative."""
        change, self._send_window = initial - self._send_window, initial
        for stream in list(self.open.values()):
            try:
                stream.widen(change)
            except StreamFault:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window overflows") from None

    def abandon_stalled(self, seconds: float, now: float) -> None:
        """Reset the streams whose data has waited for longer because of their client."""
        for stream in list(self.open.values()):
            if stream.pending and now - stream.progressed > seconds and not self._sender.paused:
                stream.abandon(ErrorCode.CANCEL)

    def lose(self) -> None:
        """Tell the application that all streams have ended early."""
        streams, self.open = list(self.open.values()), {}
        for stream in streams:
            stream.lost()
