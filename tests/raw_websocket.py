"""A WebSocket client that sends frames no client library sends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.serving import LIMIT_SECONDS, Service

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
QUERY = "model=sensors&return=sequence"


def handshake(query: str = QUERY) -> bytes:
    return (
        f"GET /stream?{query} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()


@contextmanager
def connection(server: Service) -> Iterator[socket.socket]:
    """A connection to the HTTP port."""
    address = urlsplit(server.address)
    with socket.create_connection((address.hostname, address.port), LIMIT_SECONDS) as client:
        yield client


@contextmanager
def open_socket(server: Service, query: str = QUERY) -> Iterator[socket.socket]:
    """A connection on which the handshake of a WebSocket is complete."""
    with connection(server) as client:
        client.sendall(handshake(query))
        reply = b""
        while not reply.endswith(b"\r\n\r\n"):
            reply += client.recv(1)
        assert reply.startswith(b"HTTP/1.1 101 "), reply
        yield client


def frame(opcode: int, payload: bytes = b"", *, last: bool = True, mask: bytes = bytes(4)) -> bytes:
    """Return a client's frame. The default mask changes nothing."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload)) if any(mask) else payload
    return bytes([0x80 * last | opcode]) + length + mask + masked


def receive_frame(client: socket.socket) -> tuple[int, bytes]:
    """Return opcode and payload of the next frame from the server."""
    opcode, size = receive(client, 2)
    if size >= 126:
        size = int.from_bytes(receive(client, 2 if size == 126 else 8), "big")
    return opcode & 15, receive(client, size)


def close_code(client: socket.socket) -> int:
    """Return the code with which the server closes the connection. Earlier frames are dropped."""
    while True:
        opcode, payload = receive_frame(client)
        if opcode == CLOSE:
            return int.from_bytes(payload[:2], "big")


def receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = client.recv(size - len(data))
        if not part:
            raise ConnectionError("the server closed the connection")
        data += part
    return data
