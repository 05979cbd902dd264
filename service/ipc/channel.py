"""Two processes, one Unix stream socket pair: frames out, frames in, end-of-file as the death notice.

A frame is a fixed header (total length, message length, id), one message (`messages.py`) as msgpack, and trailing bytes for tensors. Frames
queue until `flush`, so that all frames of one event-loop tick leave in one write. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import msgspec

from service.ipc.messages import ALL, Attach, Message

HEADER = struct.Struct("<IIQ")
READ_BYTES = 1 << 18
READS_PER_RECEIVE = 8
"""Reads of one `receive` call at most, so that one busy channel cannot keep the event loop from the others."""
BYTES_PER_FLUSH = READS_PER_RECEIVE * READ_BYTES
"""A `flush` call stops after this many bytes, for the same reason."""
MAX_TAIL_COPY_BYTES = 1 << 20
"""Larger tails stay in the memory that they were received into: a copy of many megabytes would stall the event loop."""
MAX_COPIED_BYTES = 1 << 16
"""Larger frames are written from where they are. Smaller frames are joined, so that they leave in one write."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[ALL])  # noqa: UP007


class Frame(NamedTuple):
    """One received message. `tail` holds the trailing bytes, `attached` the socket of an Attach message.

    A tail above MAX_TAIL_COPY_BYTES is the memory that it was received into.
    """

    message: Message
    id: int
    tail: bytes | memoryview
    attached: socket.socket | None = None


def encode(message: Message, id: int = 0, tail: Sequence[Any] = (), following: int = 0) -> bytes:
    """Return one frame as bytes; `tail` is any number of contiguous buffers.

    following: size of the trailing bytes that are not in `tail`, but go to `Channel.send` next to the frame.
    """
    packed = _encoder.encode(message)
    length = len(packed) + following
    for buffer in tail:
        length += len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes
    return b"".join((HEADER.pack(length, len(packed), id), packed, *tail))


def replace_message(frame: bytes, message: Message) -> bytes:
    """Return an encoded frame with another message and the same id and trailing bytes."""
    length, packed_length, id = HEADER.unpack_from(frame)
    tail = memoryview(frame)[HEADER.size + packed_length :]
    return encode(message, id, (tail,), following=length - packed_length - len(tail))


class Channel:
    """One end of the pair. `open` turns false at end-of-file; the owner then closes the channel.

    Frames arrive in the order in which they were sent, so `frames_sent` on one end and `frames_received` on the other tell
    which have arrived.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()
        self._sockets: deque[int] = deque()
        self._outgoing: deque[tuple[bytearray | memoryview, list[int]]] = deque()
        """Bytes that wait, with the descriptors to pass with them. A bytearray without descriptors takes further small frames."""
        self.open = True
        self.frames_sent = 0
        self.frames_received = 0
        self.bytes_sent = 0
        self.writes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes, attached: socket.socket | None = None, following: bytes | memoryview = b"") -> None:
        """Queue one encoded frame, with a socket to pass if any; the caller may close its own copy afterwards.

        following: the trailing bytes that are not in the frame. They are not copied.
        """
        if not self.open:
            return
        self.frames_sent += 1
        if attached is not None:
            self._outgoing.append((memoryview(frame), [os.dup(attached.fileno())]))
            return
        last = self._outgoing[-1][0] if self._outgoing else None
        if len(frame) > MAX_COPIED_BYTES:
            self._outgoing.append((memoryview(frame), []))
        elif isinstance(last, bytearray):
            last.extend(frame)
        else:
            self._outgoing.append((bytearray(frame), []))
        if following:
            self._outgoing.append((memoryview(following), []))

    @property
    def outgoing(self) -> bool:
        """Whether bytes wait to be written."""
        return bool(self._outgoing)

    def flush(self) -> bool:
        """Write what the socket accepts, up to BYTES_PER_FLUSH; true when everything was written."""
        limit = self.bytes_sent + BYTES_PER_FLUSH
        while self._outgoing and self.open:
            if self.bytes_sent >= limit:
                return False
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
            self._outgoing.popleft()
            if sent < len(data):
                self._outgoing.appendleft((memoryview(data)[sent:], []))
        return True

    def receive(self) -> list[Frame]:
        """Return every complete frame received so far. An end-of-file is seen in the call after the last frames before it.

        With much to read some of it is left for the next call. Call this again whenever the channel is readable.
        """
        for _ in range(READS_PER_RECEIVE):
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
            if len(data) < READ_BYTES and not descriptors:
                break  # nothing more has arrived; descriptors also end a read early
        return self._take_frames()

    def close(self) -> None:
        """Close the socket; the other end sees end-of-file."""
        self.open = False
        for _, descriptors in self._outgoing:
            self._close_all(descriptors)
        self._close_all(self._sockets)
        self._outgoing.clear()
        self._socket.close()

    def _take_frames(self) -> list[Frame]:
        frames, handed_over = [], False
        view, start = memoryview(self._received), 0
        while len(view) - start >= HEADER.size:
            length, packed_length, id = HEADER.unpack_from(view, start)
            begin, end = start + HEADER.size, start + HEADER.size + length
            if end > len(view):
                break
            message = _decoder.decode(view[begin : begin + packed_length])
            tail: bytes | memoryview
            if length - packed_length <= MAX_TAIL_COPY_BYTES:
                tail = bytes(view[begin + packed_length : end])
            else:
                tail, handed_over = view[begin + packed_length : end].toreadonly(), True
            frames.append(Frame(message, id, tail, self._take_socket(message)))
            start = end
        if handed_over:
            self._received = bytearray(view[start:])
        else:
            view.release()
            del self._received[:start]
        self.frames_received += len(frames)
        return frames

    def _take_socket(self, message: Message) -> socket.socket | None:
        return socket.socket(fileno=self._sockets.popleft()) if type(message) is Attach else None

    @staticmethod
    def _close_all(descriptors: list[int] | deque[int]) -> None:
        while descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptors.pop())


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def send_now(channel: Channel, message: Message, id: int = 0) -> None:
    """Send one message without trailing bytes and write it at once."""
    channel.send(encode(message, id))
    channel.flush()
