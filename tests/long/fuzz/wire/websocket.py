"""Mutated WebSocket frames after a valid handshake, and the check of the replies."""

from __future__ import annotations

import json
import random
import struct

from tests.long.fuzz.wire.conversation import Conversation, Judgement, mutated
from tests.long.fuzz.wire.http import error_fault
from tests.raw_websocket import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, frame

MOST_MESSAGES = 8
MESSAGES = (
    (TEXT, b'{"input": [[0.5, -1.0, 2.0], [0.25, 3.0, -0.5]]}'),
    (TEXT, b'{"input": [[1, 2, 3]], "start": true, "steps": 0}'),
    (TEXT, b'{"input": [[1, 2, 3]], "end": true}'),
    (BINARY, struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
    (BINARY, struct.pack("<3f", float("nan"), float("inf"), 1e38)),
    (PING, b"ping"),
    (PONG, b""),
    (CONTINUATION, b"rest"),
    (CLOSE, struct.pack(">H", 1000)),
    (CLOSE, b"\x03"),
    (11, b"reserved"),
)
QUERIES = (
    "model=sensors",
    "model=sensors&return=sequence",
    "model=sensors&session=fuzzed-stream",
    "model=sensors&deadline_ms=30000",
)
FAILED = 1011
"""The close code after a failure of the service, with a reason. Without a reason it is the echo of the code that the client sent."""


class WebSocketSource:
    """Makes WebSockets with mutated frames."""

    def __init__(self, key: str) -> None:
        self._key = key

    def conversation(self, chance: random.Random) -> Conversation:
        frames = b"".join(self._frame(chance) for _ in range(chance.randint(1, MOST_MESSAGES)))
        return Conversation(frames + frame(CLOSE, struct.pack(">H", 1000)), _judge, opening=self._handshake(chance))

    def _handshake(self, chance: random.Random) -> bytes:
        head = (
            f"GET /stream?{chance.choice(QUERIES)} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Authorization: Bearer {self._key}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        return head.encode()

    def _frame(self, chance: random.Random) -> bytes:
        opcode, payload = chance.choice(MESSAGES[:5] if chance.random() < 0.7 else MESSAGES)
        way = chance.random()
        if way < 0.6:
            payload = mutated(payload, chance)
        made = frame(opcode, payload, last=chance.random() < 0.9, mask=chance.choice((bytes(4), b"mask")))
        return mutated(made, chance) if way > 0.85 else made


def _judge(received: bytes) -> Judgement:
    judgement = Judgement()
    head, end, data = received.partition(b"\r\n\r\n")
    if not end or not head.startswith(b"HTTP/1.1 "):
        judgement.faults.append(f"no reply to a handshake: {received[:200]!r}")
        return judgement
    if not head.startswith(b"HTTP/1.1 101 "):
        judgement.replies[f"handshake {head[9:12].decode()}"] += 1
        fault = error_fault(data)
        judgement.faults += [fault] if fault else []
        return judgement
    at = 0
    while at < len(data):
        opcode, payload, at = read_frame(data, at)
        if opcode == TEXT:
            judgement.replies["message"] += 1
            fault = _message_fault(payload)
        elif opcode == CLOSE:
            code = int.from_bytes(payload[:2], "big") if payload else 1005
            judgement.replies[f"close {code}"] += 1
            fault = f"a WebSocket closed with {code}: {payload!r}" if code == FAILED and payload[2:] else None
        else:
            fault = None if opcode in (PING, PONG) else f"frame {opcode} with {payload[:100]!r}"
        if fault is not None:
            judgement.faults.append(fault)
    return judgement


def read_frame(data: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the opcode and payload of a frame from the server, and where the next frame begins. An incomplete frame has the opcode -1."""
    size, start = data[at + 1] if at + 1 < len(data) else 0, at + 2
    if size >= 126:
        width = 2 if size == 126 else 8
        size, start = int.from_bytes(data[start : start + width], "big"), start + width
    end = start + size
    return (data[at] & 15 if end <= len(data) else -1), data[start:end], end


def _message_fault(payload: bytes) -> str | None:
    try:
        message = json.loads(payload)
    except ValueError:
        return f"a message that is not JSON: {payload[:200]!r}"
    return error_fault(payload) if "error" in message else None
