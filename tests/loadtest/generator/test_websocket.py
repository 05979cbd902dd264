"""Frames of a WebSocket are framed by their lengths, wherever the stream is cut."""

from __future__ import annotations

import pytest
from websockets.frames import Opcode, apply_mask  # type: ignore[attr-defined]

from loadtest.generator.connection import OK
from loadtest.generator.websocket import BINARY_FRAME, CLOSE_FRAME, REFUSED, TEXT_FRAME, WebSocketConnection, frame
from tests.loadtest.generator.exchange import Exchange, Transport, connected

ACCEPTED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n"
LARGE = b'{"large": "%b"}' % bytes(70_000)


def opened(exchange: Exchange) -> tuple[WebSocketConnection, Transport]:
    connection = WebSocketConnection(exchange, [b"first", b"second"], "host:1", "/stream?model=a")
    return connection, connected(connection)


def answer(payload: bytes, kind: int = TEXT_FRAME) -> bytes:
    """Return a server's frame, which has no mask."""
    masked = frame(kind, payload)
    head = len(masked) - 4 - len(payload)
    return masked[:1] + bytes([masked[1] & 0x7F]) + masked[2:head] + payload


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
def test_frame_is_masked_and_has_its_length(size: int) -> None:
    payload = bytes(range(256)) * 300
    data = frame(BINARY_FRAME, payload[:size])
    start = len(data) - size
    assert (data[0] & 0x80, data[0] & 15, data[1] & 0x80) == (0x80, Opcode.BINARY, 0x80)
    assert start == 6 + (2 if size >= 126 else 0) + (6 if size >= 65_536 else 0)
    assert size < 126 or int.from_bytes(data[2 : start - 4]) == size
    assert apply_mask(data[start:], data[start - 4 : start]) == payload[:size]


@pytest.mark.parametrize("piece", [1, 3, 1000, 1_000_000])
def test_answers_are_whole_wherever_they_are_cut(piece: int) -> None:
    exchange = Exchange()
    connection, transport = opened(exchange)
    data = ACCEPTED + answer(b'{"a": 1}') + answer(b'{"error": "no"}') + answer(LARGE)
    connection.ask(0, 0.0)
    for at in range(0, len(data), piece):
        connection.data_received(data[at : at + piece])
    assert exchange.answers == [(OK, b'{"a": 1}'), (REFUSED, b'{"error": "no"}'), (OK, LARGE)] and not exchange.reasons
    assert transport.written[0].startswith(b"GET /stream?model=a HTTP/1.1\r\nHost: host:1\r\n")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "refused handshake"),
        (ACCEPTED + answer(b"\x03\xe8", CLOSE_FRAME), "closed by the server"),
        (ACCEPTED + answer(b"{}") * 2, "an answer to no request"),
    ],
)
def test_unexpected_data_breaks_the_connection(data: bytes, reason: str) -> None:
    exchange = Exchange()
    connection, transport = opened(exchange)
    connection.data_received(data)
    assert exchange.reasons == [reason] and transport.aborted
