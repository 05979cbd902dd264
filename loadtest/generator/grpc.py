"""Unary gRPC calls over HTTP/2 connections, each with one stream at a time.

Requests have one header block, which never enters the server's dynamic table. Flow control: the connection announces the
largest windows and renews its own; a request waits for the server's window. Servers of gRPC send neither padding nor priorities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import hpack

from loadtest.generator.connection import OK, Connection, Exchange
from service.frontend.http2 import frames
from service.frontend.http2.frames import CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADER_BYTES, HEADERS, MAX_WINDOW, WORD

STREAM_OFFSET = 5
"""Where the number of the stream begins in the header of a frame."""
NO_STATUS = -1
MAX_BLOCKS = 100
"""Remembered header blocks of answers."""


class Frames(NamedTuple):
    """A request: its frames without the stream's number, which follows `headers` and `data`."""

    headers: bytes
    block: bytes
    data: bytes
    message: bytes

    @classmethod
    def of(cls, message: bytes, block: bytes) -> Frames:
        """Raises ValueError for a message that does not fit into one frame."""
        message = b"\0" + WORD.pack(len(message)) + message
        if len(message) > frames.MAX_FRAME_BYTES:
            raise ValueError(f"a request has {len(message)} bytes and a frame {frames.MAX_FRAME_BYTES}")
        headers, data = frames.frame(HEADERS, END_HEADERS, 0, block), frames.frame(DATA, END_STREAM, 0, message)
        return cls(headers[:STREAM_OFFSET], block, data[:STREAM_OFFSET], message)


def header_block(authority: str, path: str) -> bytes:
    """Return the headers of a call, encoded without the dynamic table."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": authority}
    fields |= {"te": "trailers", "content-type": "application/grpc", "user-agent": "loadtest"}
    return hpack.Encoder().encode([(name, value, True) for name, value in fields.items()])


def prepare(messages: Sequence[bytes], authority: str, path: str) -> list[Frames]:
    block = header_block(authority, path)
    return [Frames.of(message, block) for message in messages]


class GrpcConnection(Connection):
    def __init__(self, exchange: Exchange, requests: Sequence[Frames]) -> None:
        super().__init__(exchange)
        self._requests = requests
        self._stream = -1
        self._window = self._stream_window = frames.DEFAULT_WINDOW
        self._waiting = False
        self._consumed = 0
        self._block, self._ends = b"", False
        self._message = b""
        self._answers = _AnswerHeaders()

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # uvloop's transport is no subclass
        settings = frames.settings_frame({frames.Setting.ENABLE_PUSH: 0, frames.Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW})
        self._transport.write(frames.PREFACE + settings + frames.window_update(0, MAX_WINDOW - frames.DEFAULT_WINDOW))

    def _send(self, number: int) -> None:
        request = self._requests[number]
        size = len(request.message)
        if size > self._stream_window:
            self._break("a stream window smaller than a request")
        elif size > self._window:
            self._waiting = True
        else:
            self._waiting = False
            self._window -= size
            self._stream += 2
            stream = WORD.pack(self._stream)
            self._transport.write(b"".join((request.headers, stream, request.block, request.data, stream, request.message)))

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        at, size = 0, len(data)
        while size - at >= HEADER_BYTES:
            start = at + HEADER_BYTES
            end = start + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == DATA:
                self._handle_data(flags, data[start:end])
            elif kind in (HEADERS, CONTINUATION):
                self._handle_headers(kind, flags, data[start:end])
            else:
                self._handle_control(kind, flags, data[at + STREAM_OFFSET : start], data[start:end])
            at = end
        self._received = data[at:]

    def _handle_data(self, flags: int, payload: bytes) -> None:
        self._consumed += len(payload)
        if self._consumed > MAX_WINDOW // 2:
            self._transport.write(frames.window_update(0, self._consumed))
            self._consumed = 0
        self._message += payload
        if flags & END_STREAM:
            self._break("a stream that ends without trailers")

    def _handle_headers(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == HEADERS:
            self._ends = bool(flags & END_STREAM)
            self._block = payload
        else:
            self._block += payload
        if flags & END_HEADERS:
            status = self._answers.grpc_status(self._block)
            if self._ends:
                self._finish(status)

    def _finish(self, status: int) -> None:
        message, self._message = self._message, b""
        if not self.open:
            self._break("an answer to no request")
        elif status:
            self._exchange.answered(self, status, b"")
        elif len(message) < 5 or message[0] or WORD.unpack_from(message, 1)[0] != len(message) - 5:
            self._break("not one uncompressed message")
        else:
            self._exchange.answered(self, OK, message[5:])

    def _handle_control(self, kind: int, flags: int, stream: bytes, payload: bytes) -> None:
        if kind == frames.SETTINGS and not flags & frames.ACK:
            given = frames.read_settings(flags, payload)
            self._stream_window = given.get(frames.Setting.INITIAL_WINDOW_SIZE, self._stream_window)
            self._transport.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        elif kind == frames.PING and not flags & frames.ACK:
            self._transport.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.WINDOW_UPDATE and stream == b"\0\0\0\0":
            self._window += WORD.unpack(payload)[0]
            if self._waiting:
                self._send(self.open[0].number)
        elif kind in (frames.RST_STREAM, frames.GOAWAY):
            self._break("RST_STREAM" if kind == frames.RST_STREAM else "GOAWAY")


class _AnswerHeaders:
    """Decodes the header blocks of one connection.

    A block that leaves the dynamic table unchanged is remembered until the table changes, because servers repeat their blocks.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._statuses: dict[bytes, int] = {}

    def grpc_status(self, block: bytes) -> int:
        """Return the status in a block, or NO_STATUS."""
        status = self._statuses.get(block)
        return self._decode(block) if status is None else status

    def _decode(self, block: bytes) -> int:
        before = self._table()
        fields = dict(self._decoder.decode(block, raw=True))
        status = int(fields.get(b"grpc-status", NO_STATUS))
        if self._table() != before or len(self._statuses) >= MAX_BLOCKS:
            self._statuses.clear()
        else:
            self._statuses[block] = status
        return status

    def _table(self) -> tuple[object, ...]:
        """Return the dynamic table: its size and its entries."""
        return self._decoder.header_table_size, *self._decoder.header_table.dynamic_entries
