"""A channel served by the running event loop: received frames go to a handler, sent frames leave at the end of the loop's tick."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from service.ipc.channel import Channel, Frame, encode
from service.ipc.messages.message import Message


class AsyncChannel:
    """Owns a channel and its registration with the loop.

    `on_frame` receives every frame. `on_close` is called once, when the other end has closed; the channel is closed by then.
    `on_written` receives the bytes and the write calls of each flush. `before_flush` may send further frames.
    """

    def __init__(
        self,
        channel: Channel,
        on_frame: Callable[[Frame], None],
        on_close: Callable[[], None],
        on_written: Callable[[int, int], None] | None = None,
        before_flush: Callable[[], None] | None = None,
    ) -> None:
        self._channel = channel
        self._on_frame = on_frame
        self._on_close = on_close
        self._on_written = on_written
        self._before_flush = before_flush
        self._loop = asyncio.get_running_loop()
        self._flush_scheduled = False
        self._loop.add_reader(channel.fileno(), self._receive)

    @property
    def open(self) -> bool:
        return self._channel.open

    @property
    def frames_sent(self) -> int:
        """Return how many frames were sent so far, including frames that are still queued."""
        return self._channel.frames_sent

    def send(self, frame: bytes, attached: socket.socket | None = None, following: bytes | memoryview = b"") -> None:
        """Queue one encoded frame, as `Channel.send` does."""
        self._channel.send(frame, attached, following)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Flush at the end of the tick."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def send_message(self, message: Message, id: int = 0) -> None:
        """Queue one message without trailing bytes."""
        self.send(encode(message, id))

    def close(self) -> None:
        """Write what the socket accepts, then close it; the other end sees end-of-file. Does not call `on_close`."""
        if self._channel.open:
            self._channel.flush()
            self._detach()

    def _detach(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def _flush(self) -> None:
        if self._before_flush is not None:
            self._before_flush()
        self._flush_scheduled = False
        channel = self._channel
        if not channel.open:
            return
        bytes_before, writes_before = channel.bytes_sent, channel.writes
        done = channel.flush()
        if self._on_written is not None:
            self._on_written(channel.bytes_sent - bytes_before, channel.writes - writes_before)
        if not channel.open:
            self._receive()  # frames that the other end sent before it closed
        elif done:
            self._loop.remove_writer(channel.fileno())
        else:
            self._loop.add_writer(channel.fileno(), self._flush)

    def _receive(self) -> None:
        for frame in self._channel.receive():
            self._on_frame(frame)
        if not self._channel.open:
            self._lose()

    def _lose(self) -> None:
        self._detach()
        self._on_close()
