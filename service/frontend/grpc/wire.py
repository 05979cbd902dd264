"""The wire format of gRPC over HTTP/2: the messages in a body, the fields of a request, statuses. Nothing here knows a method."""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

import grpc

from service.errors import STATUS, ServiceError
from service.frontend.guards.body_budget import BodyBudget
from service.frontend.guards.compression import WINDOW_BITS, NotCompressed, decompress
from service.frontend.guards.memory_guard import LARGE_BYTES
from service.frontend.http2.header_blocks import RequestFields, encode_fields, string_literal
from service.frontend.run.origin import REQUEST_ID

PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its size."""
ENCODINGS = {b"identity": 0, **{name.encode(): bits for name, bits in WINDOW_BITS.items()}}
"""The accepted encodings of messages, with their window bits."""
MAX_DETAILS_CHARACTERS = 2000
"""Longer error messages are cut: a client rejects a status that exceeds its header limit."""
PUSHBACK, NEVER = "grpc-retry-pushback-ms", "-1"
"""Trailing metadata with which gRPC's clients do not repeat a call, although their retry policy would."""
CONTENT_TYPE = b"application/grpc"
_CONTENT_TYPE = (b"content-type", CONTENT_TYPE)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_STATUS_200 = b"\x88"
"""The indexed field `:status: 200`."""
RESPONSE_HEADERS = _STATUS_200 + encode_fields([_CONTENT_TYPE, (b"grpc-accept-encoding", b"identity, deflate, gzip")])
OK_TRAILERS = encode_fields([(b"grpc-status", b"0")])
_REQUEST_ID_NAME = b"\0" + string_literal(REQUEST_ID)


class CallStatus(NamedTuple):
    """How a call ends. metadata: more trailing metadata."""

    code: grpc.StatusCode
    details: str = ""
    metadata: tuple[tuple[str, str], ...] = ()


class CallEnded(Exception):
    """Ends a call with a status."""

    def __init__(self, status: CallStatus) -> None:
        super().__init__(status.details)
        self.status = status


def error_status(error: ServiceError) -> CallStatus:
    """Return the status of an error. Its code, field and retry delay follow in the trailing metadata."""
    values = {
        "seqserve-code": error.code,
        "seqserve-field": error.field,
        "retry-after": error.retry_after,
        PUSHBACK: NEVER if error.final else None,
    }
    metadata = tuple((name, str(value)) for name, value in values.items() if value is not None)
    return CallStatus(grpc.StatusCode[STATUS[type(error)].grpc], error.message[:MAX_DETAILS_CHARACTERS], metadata)


def trailers(status: CallStatus) -> bytes:
    """Return the header block that ends a response."""
    return encode_fields(_status_fields(status))


def trailers_only(status: CallStatus) -> bytes:
    """Return the header block of a response without messages."""
    return _STATUS_200 + encode_fields([_CONTENT_TYPE, *_status_fields(status)])


def http_refusal(status: int) -> bytes:
    """Return the header block of a response to a request that is not a gRPC call."""
    return encode_fields([(b":status", b"%d" % status)])


def request_id_field(request_id: bytes) -> bytes:
    """Return the part of a header block that names a request."""
    return _REQUEST_ID_NAME + string_literal(request_id)


def frame_message(data: bytes | memoryview) -> bytes | memoryview:
    """Return a message with its prefix. A memoryview is a large message that was written with it: to add it would copy the message."""
    return data if isinstance(data, memoryview) else PREFIX.pack(0, len(data)) + data


def window_bits(request: RequestFields) -> int:
    """Return the window bits of a call's compressed messages, 0 for no compression; raises CallEnded."""
    encoding = request.get(b"grpc-encoding") or b"identity"
    if encoding not in ENCODINGS:
        details = "the compression of the request is not supported: send identity, gzip or deflate"
        raise CallEnded(CallStatus(grpc.StatusCode.UNIMPLEMENTED, details))
    return ENCODINGS[encoding]


def timeout_seconds(request: RequestFields) -> float:
    """Return the time that a call has, infinite without a deadline; raises CallEnded."""
    timeout = request.get(b"grpc-timeout")
    if timeout is None:
        return math.inf
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, "grpc-timeout is malformed: send up to 8 digits and a unit"))
    return int(match[1]) * _UNIT_SECONDS[match[2]]


class MessageReader:
    """Splits the body of a request into messages."""

    def __init__(self, max_bytes: int, bodies: BodyBudget) -> None:
        """bodies: counts the incomplete and unhandled messages of all calls. A request that arrives whole is not counted."""
        self._max_bytes = max_bytes
        self.bodies = bodies
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add a part of the body; raises Overloaded."""
        self._buffer += data
        self.bodies.add(len(data))
        self.bodies.check(large=len(self._buffer) > LARGE_BYTES)

    @property
    def refused(self) -> bool:
        """Whether the body cannot become a single valid message any more."""
        if len(self._buffer) < PREFIX.size:
            return False
        flag, size = PREFIX.unpack_from(self._buffer)
        return bool(flag > 1 or size > self._max_bytes or len(self._buffer) > PREFIX.size + size)

    def only_message(self) -> bytes | None:
        """Return the message if the body is a single message without compression, else None."""
        return only_message(self._buffer)

    @property
    def complete(self) -> bool:
        """Whether `take` returns a message, or raises."""
        return self._size() is not None

    def take(self) -> tuple[bool, bytes] | None:
        """Return the next message and whether it is compressed, or None if it is incomplete; raises CallEnded."""
        size = self._size()
        if size is None:
            return None
        flag = self._buffer[0]
        if flag > 1:
            raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, f"the prefix of a message has the flag {flag}: send 0 or 1"))
        if size > self._max_bytes:
            raise too_large(size, self._max_bytes)
        end = PREFIX.size + size
        message = bytes(memoryview(self._buffer)[PREFIX.size : end])
        del self._buffer[:end]
        self.bodies.add(-end)
        return bool(flag), message

    def close(self) -> None:
        """Drop the bytes that were not taken."""
        self.bodies.add(-len(self._buffer))
        self._buffer.clear()

    def _size(self) -> int | None:
        """Return the size of the next message if it is complete, or has a prefix that cannot be accepted."""
        if len(self._buffer) < PREFIX.size:
            return None
        flag, size = PREFIX.unpack_from(self._buffer)
        whole = len(self._buffer) >= PREFIX.size + size
        return int(size) if whole or flag > 1 or size > self._max_bytes else None


def only_message(body: bytes | bytearray) -> bytes | None:
    """Return the message of a complete body that is a single message without compression, else None."""
    length = len(body)
    if length < PREFIX.size:
        return None
    flag, size = PREFIX.unpack_from(body)
    return None if flag or size != length - PREFIX.size else bytes(memoryview(body)[PREFIX.size :])


def too_large(size: int, limit: int) -> CallEnded:
    """Return the error for a message that is refused unread, with the text of gRPC's own servers."""
    return CallEnded(
        CallStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, f"SERVER: Received message larger than max ({size} vs. {limit})")
    )


async def decompress_message(data: bytes, window_bits: int, limit: int, bodies: BodyBudget) -> bytes:
    """Return a decompressed message; raises CallEnded, and Overloaded."""
    if not window_bits:
        raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, "a message is compressed, but grpc-encoding names no compression"))
    try:
        message = await decompress(data, window_bits, limit, bodies)
    except NotCompressed as error:
        problem = f"a message is not compressed as grpc-encoding says: {error}"
        raise CallEnded(CallStatus(grpc.StatusCode.INTERNAL, problem)) from None
    if len(message) > limit:
        raise too_large(len(message), limit)
    return message


def _status_fields(status: CallStatus) -> list[tuple[bytes, bytes]]:
    fields = [(b"grpc-status", b"%d" % status.code.value[0])]
    if status.details:
        fields.append((b"grpc-message", _percent_encoded(status.details)))
    return fields + [(name.encode(), value.encode()) for name, value in status.metadata]


def _percent_encoded(text: str) -> bytes:
    octets = text.encode("utf-8", "replace")
    return b"".join([b"%c" % octet if 0x20 <= octet <= 0x7E and octet != 0x25 else b"%%%02X" % octet for octet in octets])
