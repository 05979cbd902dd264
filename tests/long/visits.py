"""Clients with a request over HTTP/1.1, gRPC or a WebSocket. Each client leaves at one point of its request."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from loadtest.oip_requests import METHOD, PATH
from loadtest.target import JSON, Target
from tests import raw_websocket
from tests.frontend.http2 import peer

HEAD, BODY, WORK, REPLY = "head", "body", "work", "reply"
"""Points at which a client leaves: in the head or body of its request, while the request is queued or runs, while the reply is written."""
POINTS = {HEAD: 0.15, BODY: 0.2, WORK: 0.62, REPLY: 0.03}
"""Shares of the clients by point."""
HTTP, GRPC, WEBSOCKET = "http", "grpc", "websocket"
TRANSPORTS = {HTTP: 0.5, GRPC: 0.3, WEBSOCKET: 0.2}
GENERAL, OPEN_INFERENCE = "/infer?general", "/v2/models/accumulator/infer"
PATHS = ("/infer", GENERAL, OPEN_INFERENCE)
"""Paths of requests over HTTP/1.1. A frontend counts a request on the general path from its head on, and others at the end of their body,
or of their connection."""
LONG, REPLY_STEPS = 5_000, 20_000
"""Time steps of a request that does not end during a wave, and of a request with a reply that fills the buffers of a connection. The first
batch of a wave may take 4,096 steps of one request, as many as a batch has."""
SMALL_BUFFER = 4096
RECEIVED = {HTTP: 1, GRPC: 1 << 14, WEBSOCKET: 1 << 10}
"""A client that has received this many bytes has a part of its reply."""
BREAK_OFF = struct.pack("ii", 1, 0)
"""SO_LINGER with which close() sends a reset."""
FRAME_BYTES = 1 << 14


class Endpoints(NamedTuple):
    """The addresses of a server, and the headers that its clients send besides."""

    http: str
    grpc: str
    headers: tuple[str, ...] = ()


class Visit(asyncio.Protocol):
    """A client with one request. breaks: it resets its connection or its call instead of closing it. step: after which it leaves."""

    def __init__(self, endpoints: Endpoints, transport: str, point: str, step: int, chance: random.Random) -> None:
        self._endpoints = endpoints
        self.kind = transport
        self.point = point
        self._path = chance.choice(PATHS)
        self.breaks = chance.random() < 0.5
        self.step = step
        self._chance = chance
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._received = 0
        self.beginning = b""
        """The first bytes of the reply."""
        self._upgraded = asyncio.Event()
        self.answered = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether the engine gets the request and has it until the client leaves."""
        return self.point == WORK

    @property
    def counted(self) -> bool:
        """Whether the frontend has the request until the client leaves."""
        return self.complete or (self.point == BODY and self.kind == HTTP and self._path == GENERAL)

    async def begin(self) -> None:
        """Connect, and send the request as far as its point. Then wait for a part of the reply, if that is the point."""
        address = urlsplit(f"//{self._endpoints.grpc}" if self.kind == GRPC else self._endpoints.http)
        own = socket.socket()
        own.setblocking(False)
        if self.point == REPLY:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(own, (str(address.hostname), int(address.port or 0)))
        await loop.create_connection(lambda: self, sock=own)
        assert self._transport is not None
        if self.kind == WEBSOCKET and self.point != HEAD:
            self._transport.write(self._handshake())
            await self._upgraded.wait()
        self._transport.write(self._request())
        if self.point == REPLY:
            await self.answered.wait()

    def leave(self) -> None:
        """Reset or close the call or the connection."""
        assert self._transport is not None
        if self.kind == GRPC and self.breaks and self.point != HEAD:
            self._transport.write(peer.reset(1))
            return
        if self.breaks:
            # The service closes a connection whose client reads nothing, and so answers no ping.
            with suppress(OSError):
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, BREAK_OFF)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, also that of a call that was reset."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # of asyncio, not of uvloop
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self.beginning = self.beginning or data
        if self.kind == WEBSOCKET and not self._upgraded.is_set():
            self._unread += data
            if b"\r\n\r\n" in self._unread:
                assert self._unread.startswith(b"HTTP/1.1 101 "), self._unread
                self._upgraded.set()
                self._received, self._unread = 0, b""
            return
        if self.kind == GRPC or self.point != REPLY:
            self._answer_pings(data)
        if self.point == REPLY and self._received >= RECEIVED[self.kind]:
            self.answered.set()
            if self.kind != GRPC:  # over gRPC the windows are full
                assert self._transport is not None
                self._transport.pause_reading()

    def _answer_pings(self, data: bytes) -> None:
        """Answer the pings of HTTP/2 and of WebSockets: a client that answers none is closed."""
        assert self._transport is not None
        self._unread += data
        if self.kind == WEBSOCKET:
            while len(self._unread) >= 2 and len(self._unread) >= 2 + (size := self._unread[1]):
                if self._unread[0] & 15 == raw_websocket.PING:
                    self._transport.write(raw_websocket.frame(raw_websocket.PONG, self._unread[2 : 2 + size]))
                self._unread = self._unread[2 + size :]
        elif self.kind == GRPC:
            while len(self._unread) >= 9 and len(self._unread) >= 9 + (size := int.from_bytes(self._unread[:3], "big")):
                kind, flags, payload = self._unread[3], self._unread[4], self._unread[9 : 9 + size]
                if kind in (peer.PING, peer.SETTINGS) and not flags & peer.ACK:
                    answer = payload if kind == peer.PING else b""
                    self._transport.write(peer.frame(kind, peer.ACK, 0, answer))
                self._unread = self._unread[9 + size :]

    # Requests.

    @property
    def _values(self) -> list[int]:
        return [1] * (REPLY_STEPS if self.point == REPLY else LONG)

    def _request(self) -> bytes:
        """Return the bytes that the client sends, after the handshake of a WebSocket."""
        if self.kind == GRPC:
            return self._call()
        if self.kind == WEBSOCKET:
            values = np.array(self._values, np.int32).tobytes()
            data = self._handshake() if self.point == HEAD else raw_websocket.frame(raw_websocket.BINARY, values)
            return self._cut(data, 1, len(data)) if self.point in (HEAD, BODY) else data
        data = self._post()
        begin = data.index(b"\r\n\r\n") + 4
        match self.point:
            case "head":
                return self._cut(data, 1, begin)
            case "body":
                return self._cut(data, begin, len(data))
        return data

    def _cut(self, data: bytes, shortest: int, size: int) -> bytes:
        return data[: self._chance.randrange(shortest, size)]

    def _handshake(self) -> bytes:
        query = "model=accumulator" + ("&return=sequence" if self.point == REPLY else "")
        head = raw_websocket.handshake(query)
        return head[:-2] + "".join(f"{line}\r\n" for line in self._endpoints.headers).encode() + b"\r\n"

    def _post(self) -> bytes:
        if self._path == OPEN_INFERENCE:
            tensor = {"name": "ids", "shape": [1, len(self._values)], "datatype": "INT32", "data": self._values}
            outputs = [{"name": "sequence" if self.point == REPLY else "value"}]
            body: dict[str, object] = {"inputs": [tensor], "outputs": outputs}
        else:
            body = {"model": "accumulator", "inputs": [self._values]}
            body |= {"return": ["sequence"]} if self.point == REPLY else {}
        target = Target.of(self._endpoints.http, self._path)
        return target.request(json.dumps(body).encode(), JSON, *self._endpoints.headers)

    def _call(self) -> bytes:
        """Return a connection with one call. A body ends within the message, and not within a frame: a reset may follow."""
        fields = [line.encode().partition(b": ") for line in self._endpoints.headers]
        head = peer.block(
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *[(name.lower(), value) for name, _, value in fields],
            path=PATH.encode(),
        )
        opening = peer.PREFACE + peer.settings() + peer.frame(peer.HEADERS, peer.END_HEADERS, 1, head)
        if self.point == HEAD:
            return self._cut(opening, 1, len(opening))
        request = METHOD.request_type(model_name="accumulator", raw_input_contents=[np.array(self._values, np.int32).tobytes()])
        request.inputs.add(name="ids", datatype="INT32", shape=[1, len(self._values)])
        request.outputs.add(name="sequence" if self.point == REPLY else "value")
        serialised = request.SerializeToString()
        message = struct.pack(">BI", 0, len(serialised)) + serialised
        if self.point == BODY:
            message = self._cut(message, 1, len(message))
        parts = [message[begin : begin + FRAME_BYTES] for begin in range(0, len(message), FRAME_BYTES)]
        ends = [0] * (len(parts) - 1) + [peer.END_STREAM if self.point != BODY else 0]
        return opening + b"".join(peer.frame(peer.DATA, end, 1, part) for part, end in zip(parts, ends, strict=True))


def visits(endpoints: Endpoints, steps: int, count: int, seed: int) -> list[Visit]:
    """Return clients of all transports and points, in random order. Each leaves during one of the steps."""
    chance = random.Random(seed)
    kinds = chance.choices(list(TRANSPORTS), list(TRANSPORTS.values()), k=count)
    points = chance.choices(list(POINTS), list(POINTS.values()), k=count)
    return [
        Visit(endpoints, kind, point, chance.randint(1, steps), random.Random(chance.getrandbits(64)))
        for kind, point in zip(kinds, points, strict=True)
    ]
