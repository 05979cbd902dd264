"""The frames of HTTP/2: their types, flags and error codes, and how they are checked and written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
"""Size of the header of every frame."""
MAX_FRAME_BYTES = 1 << 14
"""Largest payload that this side accepts, and that every peer accepts."""
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = (1 << 16) - 1
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITIZED = 0x4, 0x8, 0x20
read_header = struct.Struct(">HBBBI").unpack_from
"""Returns the upper 16 and the lower 8 bits of the payload's size, the type, the flags and the stream."""
_SETTING = struct.Struct(">HI")
WORD = struct.Struct(">I")
_pack_header = struct.Struct(">BHBBI").pack
_CONNECTION_FRAMES = {SETTINGS: "a SETTINGS", PING: "a PING", GOAWAY: "a GOAWAY"}
"""Frames that belong to no stream."""
_SIZES = {RST_STREAM: ("an RST_STREAM", 4), PING: ("a PING", 8), WINDOW_UPDATE: ("a WINDOW_UPDATE", 4)}
"""Frames whose payload always has the same size."""


class Setting(IntEnum):
    """The settings of a connection that this side reads or sends."""

    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer violated the protocol or a limit: the connection ends. The text is sent with GOAWAY."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Flood(ConnectionFault):
    """The peer sends too many frames that are cheap to send but not to handle."""

    def __init__(self, text: str) -> None:
        super().__init__(ErrorCode.ENHANCE_YOUR_CALM, text)


class StreamFault(Exception):
    """The peer violated the protocol on one stream, which ends."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


def check_frame(kind: int, stream: int, size: int) -> None:
    """Raise ConnectionFault or StreamFault for a frame that no client may send, on this stream or with this size."""
    if stream and kind in _CONNECTION_FRAMES:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{_CONNECTION_FRAMES[kind]} frame belongs to a stream")
    if kind in _SIZES and size != _SIZES[kind][1]:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "{} frame does not have {} bytes".format(*_SIZES[kind]))
    if kind == GOAWAY and size < 8:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY frame is too short")
    if kind == PUSH_PROMISE:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")
    if kind == PRIORITY and not stream:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a PRIORITY frame belongs to no stream")
    if kind == PRIORITY and size != 5:
        raise StreamFault(ErrorCode.FRAME_SIZE_ERROR)


def read_settings(flags: int, payload: bytes) -> dict[int, int]:
    """Return the content of a SETTINGS frame; raises ConnectionFault for values that RFC 9113 does not allow."""
    if len(payload) % _SETTING.size or (flags & ACK and payload):
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame has a wrong size")
    if len(payload) > 64 * _SETTING.size:
        raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
    for name, value in _SETTING.iter_unpack(payload):
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is not 0 or 1")
        if name == Setting.MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value < 1 << 24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of range")
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is out of range")
    return dict(_SETTING.iter_unpack(payload))


def without_padding(payload: bytes) -> bytes:
    """Return the content of a padded frame; raises ConnectionFault."""
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame has more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def headers_payload(flags: int, stream: int, payload: bytes) -> bytes:
    """Return the part of a header block in a HEADERS frame; raises ConnectionFault."""
    if stream % 2 == 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client's streams have odd numbers")
    if flags & PADDED:
        payload = without_padding(payload)
    if not flags & PRIORITIZED:
        return payload
    if len(payload) < 5:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a HEADERS frame is too short")
    return payload[5:]


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    """Return a whole frame."""
    size = len(payload)
    return _pack_header(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def header_frames(block: bytes, flags: int, stream: int) -> bytes:
    """Return a header block as one HEADERS frame, with CONTINUATION frames if it is large. flags: without END_HEADERS."""
    if len(block) <= MAX_FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]
    frames = [frame(HEADERS, flags, stream, parts[0])]
    frames += [frame(CONTINUATION, 0, stream, part) for part in parts[1:-1]]
    return b"".join((*frames, frame(CONTINUATION, END_HEADERS, stream, parts[-1])))


def response_frames(headers: bytes, data: bytes | memoryview, trailers: bytes, stream: int) -> bytes:
    """Return a whole response whose parts each fit into a frame. headers, trailers: header blocks."""
    headers_size, size, trailers_size = len(headers), len(data), len(trailers)
    pack_start, pack_end = _response_packers(headers_size, trailers_size)
    start = pack_start(0, headers_size, HEADERS, END_HEADERS, stream, headers, size >> 16, size & 0xFFFF, DATA, 0, stream)
    return start + data + pack_end(0, trailers_size, HEADERS, END_HEADERS | END_STREAM, stream, trailers)


@lru_cache(maxsize=16)
def _response_packers(headers_size: int, trailers_size: int) -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    return struct.Struct(f">BHBBI{headers_size}sBHBBI").pack, struct.Struct(f">BHBBI{trailers_size}s").pack


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Return the SETTINGS frame of this side."""
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(name, value) for name, value in settings.items()]))


def window_update(stream: int, size: int) -> bytes:
    """Return the frame that lets the peer send `size` more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, WORD.pack(size))


def reset_frame(stream: int, code: ErrorCode) -> bytes:
    """Return the frame that ends a stream."""
    return frame(RST_STREAM, 0, stream, WORD.pack(code))


def goaway_frame(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """Return the frame that ends a connection after the stream `last_stream`."""
    return frame(GOAWAY, 0, 0, WORD.pack(last_stream) + WORD.pack(code) + text.encode())
