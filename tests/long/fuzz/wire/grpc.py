"""Mutated HTTP/2 frames and messages of gRPC on one connection, and the check of the replies."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from functools import partial

import hpack

from loadtest.oip_requests import PATH
from service.errors import SERVICE_FAILED
from service.frontend.oip.protobuf import METHODS, SERVICE
from tests.frontend.http2 import peer
from tests.long.fuzz.wire.conversation import Conversation, Judgement, mutated

MOST_CALLS = 6
LAST_STREAM = 9_999
LAST_CALL = f"/{SERVICE}/ServerLive".encode()
UNKNOWN = b"2"
INTERNAL_ERROR = 2
"""Of HTTP/2."""
PATHS = (
    *(PATH.encode(),) * 6,
    *(f"/{SERVICE}/{name}".encode() for name in METHODS),
    *(b"/inference.GRPCInferenceService/Nothing", b"/grpc.health.v1.Health/Check", b"/", b"", b"x" * 2000, b"/../etc/passwd"),
)
HEADERS = (
    *((b"grpc-timeout", value) for value in (b"1S", b"0n", b"-1S", b"99999999H", b"1x", b"")),
    *((b"grpc-encoding", value) for value in (b"gzip", b"identity", b"br", b"")),
    *((b"content-type", value) for value in (b"application/grpc+proto", b"text/plain", b"application/grpc-web")),
    *((b"authorization", b"Bearer wrong"), (b"x-upper", b"\xff\xfe"), (b"traceparent", b"00-0-0-0"), (b"connection", b"close")),
    *((b":method", b"GET"), (b":path", b"/twice"), (b"te", b"gzip"), (b"content-length", b"3"), (b"x", b"y" * 5000)),
)


def _infer(model: str, name: str, datatype: str, shape: list[int], raw: bytes, **more: str) -> bytes:
    request = METHODS["ModelInfer"].request_type(model_name=model, raw_input_contents=[raw], **more)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    serialised: bytes = request.SerializeToString()
    return serialised


MESSAGES = (
    _infer("sensors", "inputs", "FP32", [2, 3], struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
    _infer("words", "text", "BYTES", [1], b"\x07\0\0\0how far"),
    _infer("reader", "ids", "INT64", [3], struct.pack("<3q", 1, 2, 3), id="fuzzed", model_version="1"),
    METHODS["ModelReady"].request_type(name="words").SerializeToString(),
    b"",
)


class GrpcSource:
    """Makes connections of HTTP/2 with mutated calls."""

    def __init__(self, key: str) -> None:
        self._key = (b"authorization", b"Bearer " + key.encode())

    def conversation(self, chance: random.Random) -> Conversation:
        calls = [self._call(2 * number + 1, chance) for number in range(chance.randint(1, MOST_CALLS))]
        frames = [frame for call in calls for frame in call]
        if chance.random() < 0.3:
            chance.shuffle(frames)
        if chance.random() < 0.5:
            frames.insert(chance.randint(0, len(frames)), self._frame(chance))
        data = b"".join(frames)
        if chance.random() < 0.2:
            data = mutated(data, chance)
        start = peer.PREFACE + peer.settings((4, 1 << 20))
        return Conversation(start + data + self._last(), judge, is_answered)

    def _call(self, stream: int, chance: random.Random) -> Iterator[bytes]:
        fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc"), self._key]
        path = chance.choice(PATHS)
        if chance.random() < 0.3:
            fields.insert(chance.randint(0, len(fields)), chance.choice(HEADERS))
        block = peer.block(*fields, path=path)
        if chance.random() < 0.1:
            block = mutated(block, chance)
        yield peer.frame(peer.HEADERS, peer.END_HEADERS, stream, block)
        message = chance.choice(MESSAGES)
        if chance.random() < 0.7:
            message = mutated(message, chance)
        size = len(message) if chance.random() < 0.95 else chance.choice((0, len(message) + 1, 1 << 31, 5))
        message = chance.choice((b"\0",) * 9 + (b"\1",)) + struct.pack(">I", size) + message
        cut = chance.randint(0, len(message)) if chance.random() < 0.2 else len(message)
        if cut < len(message):
            yield peer.frame(peer.DATA, 0, stream, message[:cut])
            message = message[cut:]
        yield peer.frame(peer.DATA, peer.END_STREAM if chance.random() < 0.95 else 0, stream, message)

    def _frame(self, chance: random.Random) -> bytes:
        """Return a frame that belongs to no call."""
        stream, payload = (
            chance.choice((0, 1, 3, 2, 77, 2**31 - 1)),
            chance.randbytes(chance.choice((0, 1, 4, 5, 6, 8, 12, 100))),
        )
        return chance.choice(
            (
                partial(peer.frame, chance.randrange(12), chance.randrange(256), stream, payload),
                partial(peer.settings, (chance.randrange(8), chance.choice((0, 1, 16_384, 2**31 - 1, 2**32 - 1)))),
                partial(peer.window, stream, chance.choice((0, 1, 2**31 - 1))),
                partial(peer.reset, stream or 1),
                partial(peer.frame, peer.PING, 0, 0, bytes(8)),
            )
        )()

    def _last(self) -> bytes:
        fields = ((b"te", b"trailers"), (b"content-type", b"application/grpc"), self._key)
        call = peer.frame(peer.HEADERS, peer.END_HEADERS, LAST_STREAM, peer.block(*fields, path=LAST_CALL))
        return call + peer.frame(peer.DATA, peer.END_STREAM, LAST_STREAM, bytes(5))


def frames_of(received: bytes) -> Iterator[peer.Frame]:
    at = 0
    while len(received) - at >= 9:
        upper, lower, kind, flags, stream = struct.unpack_from(">BHBBI", received, at)
        end = at + 9 + (upper << 16 | lower)
        if end > len(received):
            return
        yield peer.Frame(kind, flags, stream, received[at + 9 : end])
        at = end


def is_answered(received: bytes) -> bool:
    """Return whether the last call is answered, or the connection ends."""
    return any(
        frame.kind == peer.GOAWAY or (frame.stream == LAST_STREAM and frame.flags & peer.END_STREAM) or _ends_last(frame)
        for frame in frames_of(received)
    )


def _ends_last(frame: peer.Frame) -> bool:
    return frame.kind == peer.RST_STREAM and frame.stream == LAST_STREAM


def judge(received: bytes) -> Judgement:
    judgement, decoder = Judgement(), hpack.Decoder()
    for frame in frames_of(received):
        if frame.kind == peer.HEADERS:
            try:
                fields = {bytes(name): bytes(value) for name, value in decoder.decode(frame.payload, raw=True)}
            except hpack.HPACKError as error:
                judgement.faults.append(f"a header block that cannot be read: {error}")
                return judgement
            status = fields.get(b"grpc-status")
            if status is not None and frame.stream != LAST_STREAM:
                judgement.replies[f"grpc {status.decode()}"] += 1
            if status == UNKNOWN or SERVICE_FAILED.encode() in fields.get(b"grpc-message", b""):
                judgement.faults.append(f"a call failed: {fields}")
            judgement.texts.append(b"\n".join(fields.values()))
        elif frame.kind in (peer.RST_STREAM, peer.GOAWAY):
            name = "reset" if frame.kind == peer.RST_STREAM else "goaway"
            judgement.replies[f"{name} {frame.word}"] += 1
            if frame.word == INTERNAL_ERROR:
                judgement.faults.append(f"{name} for an internal error: {frame.payload!r}")
    return judgement
