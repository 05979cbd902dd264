"""`python -m tests.long.floods KIND HTTP-PORT GRPC-PORT CONNECTIONS SECONDS`: send bytes that cost the service more than the client.

No connection has a key. A connection that the service closes is opened again.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count

import uvloop

from tests.frontend.http2.peer import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    frame,
    reset,
    settings,
    window,
)
from tests.frontend.http2.peer import block as header_block
from tests.raw_websocket import CONTINUATION, PING, TEXT, handshake
from tests.raw_websocket import frame as socket_frame

PIECE = 1 << 14
HEALTH = b"/grpc.health.v1.Health/Watch"
LIVE = b"/inference.GRPCInferenceService/ServerLive"
FIELDS = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
EMPTY = struct.pack(">BI", 0, 0)
INFER, STATISTICS = b"/inference.GRPCInferenceService/ModelInfer", b"/inference.GRPCInferenceService/ModelStatistics"
UNKNOWN = struct.pack(">BI", 0, 8) + b"\x0a\x06nobody"
_ZEROS = gzip.compress(b"\x3a\x80\x80\xc0\x07" + bytes(15 << 20))
BOMB = struct.pack(">BI", 1, len(_ZEROS)) + _ZEROS
"""15 MiB of raw contents in one frame."""
GREETING = PREFACE + settings((4, 1 << 20)) + window(0, 1 << 30)
POST = b"POST /infer HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


STATES = b'{"inputs":[],"states":[[%b0]]}' % (b"0," * (15 << 19))


def calls(
    path: bytes, then: Callable[[int], bytes] | None = None, *more: tuple[bytes, bytes], message: bytes = EMPTY
) -> Iterator[bytes]:
    """Yield calls without end. then: returns the frames after a call. more: its further fields."""
    block = header_block(*FIELDS, *more, path=path)
    yield GREETING
    for id in count(1, 2):
        yield frame(HEADERS, END_HEADERS, id, block) + frame(DATA, END_STREAM, id, message) + (then(id) if then else b"")


def endless(first: bytes, more: bytes) -> Iterator[bytes]:
    """Yield bytes, then others again and again."""
    yield first
    yield from iter(lambda: more * max(1, PIECE // len(more)), b"")


def messages(more: bytes, *first: bytes) -> Iterator[bytes]:
    """Yield a handshake of a WebSocket, and frames without end."""
    yield handshake("model=words")
    yield from endless(b"".join(first), more)


KINDS: dict[str, tuple[bool, Callable[..., Iterator[bytes]]]] = {
    "window updates": (True, lambda *_: endless(GREETING, window(0, 1))),
    "refused calls": (True, lambda *key: calls(b"/inference.GRPCInferenceService/Nothing", None, *key)),
    "ServerLive": (True, lambda *key: calls(LIVE, None, *key)),
    "resets": (True, lambda *key: calls(LIVE, reset, *key)),
    "watches": (True, lambda *key: calls(HEALTH, None, *key)),
    "chunks of a byte": (False, lambda *_: endless(POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n")),
    "pipelined requests": (False, lambda *_: endless(b"", POST + b"content-length: 2\r\n\r\n{}")),
    "pipelined probes": (False, lambda *_: endless(b"", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")),
    "empty lines": (False, lambda *_: endless(b"", b"\r\n")),
    "socket messages": (False, lambda *_: messages(socket_frame(TEXT, b"x"))),
    "socket pings": (False, lambda *_: messages(socket_frame(PING))),
    "socket fragments": (
        False,
        lambda *_: messages(socket_frame(CONTINUATION, b"x", last=False), socket_frame(TEXT, b"x", last=False)),
    ),
    "sockets": (False, lambda *_: iter([handshake("model=words")])),
    "metadata": (True, lambda *key: calls(LIVE, None, (b"x", b"y" * 14_000), *key)),
    "unknown models": (True, lambda *key: calls(INFER, None, *key, message=UNKNOWN)),
    "statistics": (True, lambda *key: calls(STATISTICS, None, *key)),
    "repository": (True, lambda *key: calls(b"/inference.GRPCInferenceService/RepositoryIndex", None, *key)),
    "deadlines": (True, lambda *key: calls(STATISTICS, None, (b"grpc-timeout", b"6m"), *key)),
    "states": (False, lambda *_: endless(b"", POST + b"content-length: %d\r\n\r\n" % len(STATES) + STATES)),
    "gzip bombs": (True, lambda *key: calls(INFER, None, (b"grpc-encoding", b"gzip"), *key, message=BOMB)),
}
"""Whether it goes to the port of gRPC, and the bytes of one connection, whose calls also have the fields that are passed."""


async def flood(port: int, conversation: Callable[..., Iterator[bytes]], until: float) -> None:
    """Send until the end, and read whatever comes."""
    while time.monotonic() < until:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            parts = conversation()
            writer.write(first := next(parts))
            if first.startswith(b"GET /stream"):
                async with asyncio.timeout(max(0.01, until - time.monotonic())):
                    await reader.readuntil(b"\r\n\r\n")
            reading = asyncio.create_task(drain(reader))
            try:
                await send(writer, parts, reading, until)
            finally:
                reading.cancel()
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def send(writer: asyncio.StreamWriter, parts: Iterator[bytes], reading: asyncio.Task[None], until: float) -> None:
    piece = b""
    for part in parts:
        piece += part
        if len(piece) >= PIECE:
            writer.write(piece)
            async with asyncio.timeout(max(0.01, until - time.monotonic())):
                await writer.drain()
            piece = b""
            if reading.done():
                return


async def drain(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def main() -> None:
    kind, http, grpc, connections, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    over_grpc, conversation = KINDS[kind]
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(flood(grpc if over_grpc else http, conversation, until))


if __name__ == "__main__":
    uvloop.run(main())
