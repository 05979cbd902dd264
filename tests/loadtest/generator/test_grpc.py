"""gRPC calls over HTTP/2: framing, header blocks and flow control."""

from __future__ import annotations

import struct

import hpack
import pytest

from loadtest.generator import grpc
from loadtest.generator.grpc import GrpcConnection
from tests.loadtest.generator.exchange import Exchange, connected

MESSAGE = b"\0\0\0\0\3abc"
HEADERS = [(":status", "200"), ("content-type", "application/grpc"), ("server", "small")]
ENDED = [("grpc-status", "0"), ("grpc-message", "")]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def answer(encoder: hpack.Encoder, stream: int, message: bytes = MESSAGE, trailers: list[tuple[str, str]] = ENDED) -> bytes:
    """An answer as servers write it: headers in the dynamic table, one message, trailers."""
    head = frame(grpc.HEADERS, grpc.END_HEADERS, stream, encoder.encode(HEADERS))
    tail = frame(grpc.HEADERS, grpc.END_HEADERS | grpc.END_STREAM, stream, encoder.encode(trailers))
    return head + frame(grpc.DATA, 0, stream, message) + tail


def asked(exchange: Exchange, message: bytes = b"request") -> tuple[GrpcConnection, list[bytes]]:
    connection = GrpcConnection(exchange, grpc.prepare([message], "127.0.0.1:1", "/Service/Method"))
    transport = connected(connection)
    connection.ask(0, 0.0)
    return connection, transport.written


def test_answers_are_whole_wherever_the_stream_is_cut() -> None:
    encoder = hpack.Encoder()
    first, second = answer(encoder, 1), answer(encoder, 3)
    assert len(second) < len(first), "the second answer uses the dynamic table"
    stream = frame(grpc.SETTINGS, 0, 0, b"") + first + second
    for cut in range(1, len(stream)):
        exchange = Exchange()
        connection, _ = asked(exchange)
        connection.data_received(stream[:cut])
        connection.data_received(stream[cut:])
        assert exchange.answers == [(200, b"abc")] * 2 and not exchange.reasons


def test_remembered_block_is_forgotten_when_the_table_changes() -> None:
    """The same block of one byte means another status after an insertion."""
    encoder, exchange = hpack.Encoder(), Exchange()
    connection, _ = asked(exchange)
    for stream, status in enumerate("0055050"):
        connection.data_received(answer(encoder, stream, trailers=[("grpc-status", status)]))
    assert [status for status, _ in exchange.answers] == [200, 200, 5, 5, 200, 5, 200]


def test_request_is_one_write_with_literal_headers() -> None:
    connection, written = asked(Exchange())
    decoder = hpack.Decoder()
    request = written[-1]
    length = int.from_bytes(request[:3], "big")
    fields = dict(decoder.decode(request[9 : 9 + length], raw=True))
    assert fields[b":path"] == b"/Service/Method" and fields[b"te"] == b"trailers"
    assert not decoder.header_table.dynamic_entries
    assert request[9 + length :] == frame(grpc.DATA, grpc.END_STREAM, 1, b"\0\0\0\0\7request")
    connection.ask(0, 0.0)
    assert written[-1][5:9] == struct.pack(">I", 3)


def test_request_waits_for_the_window_of_the_server() -> None:
    connection, written = asked(Exchange(), b"x" * 16_000)
    for _ in range(4):
        connection.ask(0, 0.0)
    before = len(written)
    connection.data_received(frame(grpc.WINDOW_UPDATE, 0, 1, struct.pack(">I", 99_999)))
    assert len(written) == before, "the window of a stream is not that of the connection"
    connection.data_received(frame(grpc.WINDOW_UPDATE, 0, 0, struct.pack(">I", 99_999)))
    assert len(written) == before + 1 and len(written[-1]) > 16_000


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (frame(grpc.RST_STREAM, 0, 1, b"\0\0\0\0"), "RST_STREAM"),
        (frame(grpc.GOAWAY, 0, 0, bytes(8)), "GOAWAY"),
        (frame(grpc.DATA, grpc.END_STREAM, 1, MESSAGE), "a stream that ends without trailers"),
        (answer(hpack.Encoder(), 1, b"\1\0\0\0\3abc"), "not one uncompressed message"),
    ],
)
def test_unusable_answer_breaks_the_connection(frames: bytes, reason: str) -> None:
    exchange = Exchange()
    connection, _ = asked(exchange)
    connection.data_received(frames)
    assert exchange.reasons == [reason] and not exchange.answers
