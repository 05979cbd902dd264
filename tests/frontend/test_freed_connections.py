"""A closed connection is freed at once, however it ended. A garbage collection of many connections would take long."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from loadtest.oip_requests import METHOD, PATH
from service.frontend import http_protocol
from service.frontend.http2 import connection
from service.frontend.http2.connection import Http2Connection
from service.frontend.http_protocol import HttpProtocol
from service.frontend.oip.grpc_wire import frame_message
from service.frontend.start_queue import StartQueue
from service.frontend.websocket_protocol import WebSocketProtocol
from tests.frontend.http2 import peer
from tests.frontend.ports import BODY, LATE_BODY, LATE_STEPS, Ports, connected, hot, late_timers, limited, watched, with_ports
from tests.raw_websocket import CLOSE, CONTINUATION, TEXT, frame, handshake
from tests.serving import LIMIT_SECONDS

CHUNK, LATE_CHUNK = (frame(TEXT, b'{"input": [1, 2, 3%b]}' % more) for more in (b"", b", 1"))
SENT = b""
"""Stands for a reply: the client leaves once the engine has its request."""


class Conversation(NamedTuple):
    """The bytes that a client sends, and the reply after which it aborts the connection. opening: a handshake before the bytes."""

    data: bytes
    reply: bytes = SENT
    opening: bytes = b""


def general(body: bytes) -> bytes:
    """Return a request for the general path."""
    head = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def socket(*frames: bytes, reply: bytes = SENT) -> Conversation:
    return Conversation(b"".join(frames), reply, handshake("model=words"))


def call(path: str, message: bytes = b"", *, stream: int = 1, ended: bool = True) -> bytes:
    fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    head = peer.frame(peer.HEADERS, peer.END_HEADERS, stream, peer.block(*fields, path=path.encode()))
    return head + peer.frame(peer.DATA, peer.END_STREAM if ended else 0, stream, frame_message(message))


def infer(steps: int = 3) -> bytes:
    request = METHOD.request_type(model_name="words", raw_input_contents=[struct.pack(f"<{steps}i", *[1] * steps)])
    request.inputs.add(name="ids", datatype="INT32", shape=[1, steps])
    serialised: bytes = request.SerializeToString()
    return serialised


STREAM, LIVE = (f"{PATH.rpartition('/')[0]}/{name}" for name in ("ModelStreamInfer", "ServerLive"))
GREETING = peer.PREFACE + peer.settings()
CONVERSATIONS = {
    "http": {
        "hot request": Conversation(hot(BODY), b'"outputs"'),
        "running and waiting hot requests": Conversation(hot(LATE_BODY) + hot(BODY) * 3),
        "running and waiting general requests": Conversation(general(LATE_BODY) + general(BODY) * 3),
        "no HTTP": Conversation(b"\0\r\n\r\n", b"not valid HTTP"),
        "refusal behind a reply": Conversation(general(LATE_BODY) + b"GET /models HTTP/1.1\r\n\r\n"),
    },
    "websocket": {
        "closed socket": socket(CHUNK, frame(CLOSE, struct.pack(">H", 1000)), reply=b"\x88\x02\x03\xe8"),
        "running chunks": socket(CHUNK, *[LATE_CHUNK] * 2),
        "incomplete frame": socket(CHUNK, CHUNK[:-1], reply=b'"outputs"'),
        "wrong frame": socket(frame(CONTINUATION, CHUNK), reply=b"\x88"),
    },
    "grpc": {
        "hot call": Conversation(GREETING + call(PATH, infer()), b"grpc-status\x010"),
        "running hot call": Conversation(GREETING + call(PATH, infer(LATE_STEPS))),
        "refused call": Conversation(GREETING + call("/nothing"), b"grpc-status\x0212"),
        "reset call": Conversation(
            GREETING + call(STREAM, infer(), ended=False) + peer.reset(1) + call(LIVE, stream=3), b"grpc-status\x010"
        ),
        "call after a fault": Conversation(GREETING + call(STREAM, infer(), ended=False) + peer.frame(peer.PING), b"PING"),
        "open stream": Conversation(GREETING + call(STREAM, infer(), ended=False), b"scores"),
        "running stream": Conversation(GREETING + call(STREAM, infer(LATE_STEPS), ended=False)),
        "no HTTP/2": Conversation(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/2"),
    },
}
PROTOCOLS: dict[str, tuple[type, ...]] = {
    "http": (HttpProtocol,),
    "websocket": (HttpProtocol, WebSocketProtocol),
    "grpc": (Http2Connection,),
}
"""The classes with an object for each connection."""


async def hold(ports: Ports, kind: str, conversation: Conversation, name: str) -> None:
    """Hold a conversation."""
    ports.late.clear()
    async with connected(ports.grpc if kind == "grpc" else ports.http) as (reader, writer), limited(f"{name} gets no reply"):
        if conversation.opening:
            writer.write(conversation.opening)
            await reader.readuntil(b"\r\n\r\n")
        writer.write(conversation.data)
        await (reader.readuntil(conversation.reply) if conversation.reply else ports.late.wait())


class BusyTicks(StartQueue):
    """Every request waits for the next tick."""

    def must_wait(self, now: float) -> bool:
        return True


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("queue", [StartQueue, BusyTicks])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_closed_connection_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, queue: type[StartQueue]
) -> None:
    """Also the timer that closes a refused connection, which would keep the transport in memory."""
    connections = watched(PROTOCOLS[kind], monkeypatch)
    for module in (http_protocol, connection):
        monkeypatch.setattr(module, "LINGER_SECONDS", 2 * LIMIT_SECONDS)

    async def test(ports: Ports) -> None:
        before = late_timers()
        for name, conversation in CONVERSATIONS[kind].items():
            await hold(ports, kind, conversation, name)
            assert len(connections) == len(PROTOCOLS[kind]), name
            async with limited(f"{name} leaves its connection in memory"):
                while any(reference() is not None for reference in connections):
                    await asyncio.sleep(0.001)
            assert late_timers() <= before, name
            connections.clear()

    with_ports(tmp_path, test, queue)
