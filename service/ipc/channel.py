"""Two processes, one Unix stream socket pair: frames out, frames in, death at end-of-file.

A frame is a fixed header (length, body length, kind, id), a msgspec body, and trailing bytes for tensors. Frames queue until
`flush`, so that all frames of one loop tick leave in one write. Nothing here blocks, and nothing here knows what a frame means.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

HEADER = struct.Struct("<IIHxxQ")
READ_BYTES = 1 << 18
READS_AT_ONCE = 16
"""One receive takes at most this many reads, so that one busy peer cannot keep the loop from the others."""

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Kind(IntEnum):
    """What a frame is. The first block goes between fronts and engines, the second between the supervisor and its children."""

    SUBMIT = 1
    CANCEL = 2
    ANSWER = 3
    REFUSAL = 4
    ENGINE_STATUS = 5
    LOAD = 6
    TRACE = 7
    TRACED = 8
    RESUBMIT = 9
    EXPORT = 10
    ADOPT = 11
    END = 12
    DONE = 13
    RELEASE = 14
    MODEL_OF = 15

    SETTINGS = 16
    ATTACH = 17
    READY = 18
    FAILED = 19
    DRAIN = 20
    GATHER = 21
    COUNTS = 22
    SCRAPE = 23
    SCRAPED = 24
    INDEX = 25
    INDEXED = 26
    LOAD_MODEL = 27
    UNLOAD_MODEL = 28
    PREPARE = 29
    SERVE = 30
    CLOSE = 31
    CLOSED = 32
    FORGET = 33


class Frame(NamedTuple):
    """One message. `attached` is the socket that came with it, if any."""

    kind: int
    id: int
    body: bytes
    tail: bytes
    attached: socket.socket | None = None

    def read(self, kind: type[T]) -> T:
        """The body as a value of `kind`; raises msgspec.ValidationError if it is something else."""
        return msgspec.msgpack.decode(self.body, type=kind)


def encode(kind: int, id: int, body: Any = None, tail: Iterable[Any] = ()) -> bytes:
    """One frame as bytes; `tail` is any number of contiguous buffers."""
    packed = _encoder.encode(body)
    payload = b"".join((packed, *tail))
    return HEADER.pack(len(payload), len(packed), kind, id) + payload


def of_kind(kind: Kind, frame: bytes) -> bytes:
    """The same frame as one of another kind."""
    length, body_length, _, id = HEADER.unpack_from(frame)
    return HEADER.pack(length, body_length, kind, id) + frame[HEADER.size :]


class Channel:
    """One end of the pair. `open` turns false at the peer's end-of-file; its owner then closes it.

    Frames leave and come in order, so that `frames_sent` at one end and `frames_received` at the other say which of them have come.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()
        self._sockets: deque[int] = deque()
        self._outgoing: deque[tuple[bytearray, list[int]]] = deque()
        self.open = True
        self.frames_sent = 0
        self.frames_received = 0
        self.bytes_sent = 0
        self.writes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes, attached: socket.socket | None = None) -> None:
        """Queue one encoded frame, with a socket to hand over if wanted; the caller may close its own copy afterwards."""
        if not self.open:
            return
        self.frames_sent += 1
        if attached is not None:
            self._outgoing.append((bytearray(frame), [os.dup(attached.fileno())]))
        elif self._outgoing and not self._outgoing[-1][1]:
            self._outgoing[-1][0].extend(frame)
        else:
            self._outgoing.append((bytearray(frame), []))

    @property
    def outgoing(self) -> bool:
        """Whether anything is left to write."""
        return bool(self._outgoing)

    def flush(self) -> bool:
        """Write what the socket takes; true when nothing is left to write."""
        while self._outgoing and self.open:
            data, descriptors = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                return False
            except OSError:
                self.open = False
                break
            self.bytes_sent += sent
            self.writes += 1
            self._close_all(descriptors)
            del data[:sent]
            if not data:
                self._outgoing.popleft()
        return True

    def receive(self) -> list[Frame]:
        """Every whole frame that has come, the ones before an end-of-file included."""
        for _ in range(READS_AT_ONCE):
            try:
                data, descriptors, _flags, _address = socket.recv_fds(self._socket, READ_BYTES, 8)
            except BlockingIOError:
                break
            except OSError:
                data, descriptors = b"", []
            self._sockets.extend(descriptors)
            if not data:
                self.open = False
                break
            self._received += data
        return self._take_frames()

    def close(self) -> None:
        """Give the socket back; the peer sees end-of-file."""
        self.open = False
        for _, descriptors in self._outgoing:
            self._close_all(descriptors)
        self._close_all(self._sockets)
        self._outgoing.clear()
        self._socket.close()

    def _take_frames(self) -> list[Frame]:
        frames = []
        view, at = memoryview(self._received), 0
        while len(view) - at >= HEADER.size:
            length, body_length, kind, id = HEADER.unpack_from(view, at)
            start, end = at + HEADER.size, at + HEADER.size + length
            if end > len(view):
                break
            body, tail = bytes(view[start : start + body_length]), bytes(view[start + body_length : end])
            frames.append(Frame(kind, id, body, tail, self._take_socket(kind)))
            at = end
        view.release()
        del self._received[:at]
        self.frames_received += len(frames)
        return frames

    def _take_socket(self, kind: int) -> socket.socket | None:
        return socket.socket(fileno=self._sockets.popleft()) if kind == Kind.ATTACH else None

    @staticmethod
    def _close_all(descriptors: list[int] | deque[int]) -> None:
        while descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptors.pop())


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def tell(control: Channel, kind: Kind, body: Any = None, id: int = 0) -> None:
    """One control frame, written now."""
    control.send(encode(kind, id, body))
    control.flush()
