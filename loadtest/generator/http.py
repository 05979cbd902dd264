"""HTTP/1.1 connections. Answers need a Content-Length."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loadtest.generator.connection import Connection, Exchange

MAX_HEADS = 1000
"""Remembered response heads; servers repeat them, apart from the date."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class HttpConnection(Connection):
    """A connection that sends complete requests unchanged, one at a time."""

    def __init__(self, exchange: Exchange, requests: Sequence[bytes]) -> None:
        super().__init__(exchange)
        self._requests = requests
        self._heads: dict[bytes, tuple[int, int]] = {}

    def _send(self, number: int) -> None:
        self._transport.write(self._requests[number])

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._received = data
            return
        framing = self._heads.get(head := data[:end]) or self._read_head(head)
        if framing is None:
            self._break("a head without status and Content-Length")
            return
        status, length = framing
        missing = end + 4 + length - len(data)
        if missing > 0:
            self._received = data
        elif missing < 0 or not self.open:
            self._break("more bytes than one answer")
        else:
            self._received = b""
            self._exchange.answered(self, status, data[end + 4 :])

    def _read_head(self, head: bytes) -> tuple[int, int] | None:
        """Return the status and the length of the body."""
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or length is None:
            return None
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        framing = self._heads[head] = int(status[1]), int(length[1])
        return framing
