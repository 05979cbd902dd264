"""HTTP answers are framed by their Content-Length, wherever the stream is cut."""

from __future__ import annotations

import pytest

from loadtest.generator.http import HttpConnection
from tests.loadtest.generator.exchange import Exchange, connected

ANSWER = b'HTTP/1.1 200 OK\r\nDate: today\r\nCONTENT-LENGTH: 11\r\n\r\n{"a": true}'
REFUSAL = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"


def asked(exchange: Exchange) -> HttpConnection:
    connection = HttpConnection(exchange, [b"GET / HTTP/1.1\r\n\r\n"])
    connected(connection)
    connection.ask(0, 0.0)
    return connection


def test_answer_is_whole_wherever_it_is_cut() -> None:
    for cut in range(1, len(ANSWER)):
        exchange = Exchange()
        connection = asked(exchange)
        for data in (ANSWER[:cut], ANSWER[cut:], *(bytes([byte]) for byte in REFUSAL)):
            connection.data_received(data)
        assert exchange.answers == [(200, b'{"a": true}'), (503, b"")] and not exchange.reasons


def test_request_is_sent_as_it_is() -> None:
    connection = HttpConnection(Exchange(), [b"first", b"second"])
    transport = connected(connection)
    connection.ask(1, 0.0)
    assert transport.written == [b"second"] and connection.open[0].number == 1


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER + b"{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_unexpected_framing_breaks_the_connection(answer: bytes) -> None:
    exchange = Exchange()
    connection = HttpConnection(exchange, [b"request"])
    transport = connected(connection)
    connection.ask(0, 0.0)
    connection.data_received(answer)
    assert not exchange.answers and len(exchange.reasons) == 1 and transport.aborted
    connection.connection_lost(None)
    assert len(exchange.reasons) == 1, "a connection breaks once"
