"""WebSocket messages, RFC 6455: each request is one text or binary frame, and each answer one text frame."""

from __future__ import annotations

import os
from collections.abc import Sequence

from loadtest.generator.connection import OK, Connection, Exchange

TEXT_FRAME, BINARY_FRAME, CLOSE_FRAME, PING_FRAME, PONG_FRAME = 0x81, 0x82, 0x88, 0x89, 0x8A
MASKED, SIZE_OF_16_BITS, SIZE_OF_64_BITS = 0x80, 126, 127
REFUSED = 400
"""Status of an answer that is an error."""
_UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
)
_ERROR = b'{"error"'


def frame(kind: int, payload: bytes) -> bytes:
    """Return a masked frame."""
    size, mask = len(payload), os.urandom(4)
    if size < SIZE_OF_16_BITS:
        head = bytes((kind, MASKED | size))
    elif size < 1 << 16:
        head = bytes((kind, MASKED | SIZE_OF_16_BITS)) + size.to_bytes(2)
    else:
        head = bytes((kind, MASKED | SIZE_OF_64_BITS)) + size.to_bytes(8)
    return head + mask + bytes(byte ^ mask[place & 3] for place, byte in enumerate(payload))


def handshake(authority: str, path: str, headers: Sequence[str]) -> bytes:
    """Return the request that opens a socket. path: with its query."""
    return "\r\n".join((f"GET {path} HTTP/1.1", f"Host: {authority}", *_UPGRADE, *headers, "", "")).encode()


class WebSocketConnection(Connection):
    """A socket with any number of open requests. Those that are sent before the handshake is complete wait for it."""

    def __init__(self, exchange: Exchange, requests: Sequence[bytes], handshake: bytes) -> None:
        """requests: whole frames."""
        super().__init__(exchange)
        self._requests = requests
        self._handshake = handshake
        self._accepted = False

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # uvloop's transport is no subclass
        self._transport.write(self._handshake)

    def _send(self, number: int) -> None:
        if self._accepted:
            self._transport.write(self._requests[number])

    def data_received(self, data: bytes) -> None:
        self._received = data = self._received + data if self._received else data
        if not self._accepted:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return
            if not data.startswith(b"HTTP/1.1 101 "):
                self._break("refused handshake")
                return
            self._accepted, self._received = True, data[end + 4 :]
            for request in self.open:
                self._send(request.number)
        while self._read_frame():
            pass

    def _read_frame(self) -> bool:
        """Handle the next frame; false if it has not arrived whole."""
        data, start = self._received, 2
        if len(data) < start:
            return False
        size = data[1]
        if size >= SIZE_OF_16_BITS:
            start += 2 if size == SIZE_OF_16_BITS else 8
            size = int.from_bytes(data[2:start])
        if len(data) < start + size:
            return False
        payload, self._received = data[start : start + size], data[start + size :]
        if data[0] == PING_FRAME:
            self._transport.write(frame(PONG_FRAME, payload))
        elif data[0] != TEXT_FRAME or not self.open:
            self._break("closed by the server" if data[0] == CLOSE_FRAME else "an answer to no request")
            return False
        else:
            self._exchange.answered(self, REFUSED if payload.startswith(_ERROR) else OK, payload)
        return True
