"""Two processes, one Unix stream socket pair: frames out, frames in, end-of-file as the death notice.

A frame is a fixed header (total length, message length, id), one message (`messages/`) as msgpack, and trailing bytes for tensors. Frames
queue until `flush`, so that all frames of one event-loop tick leave in one write. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Union

import msgspec

from service.ipc.messages import ALL
from service.ipc.messages.control import Attach
from service.ipc.messages.message import Message

HEADER = struct.Struct("<IIQ")
READ_BYTES = 1 << 18
READS_PER_RECEIVE = 8
"""Most reads of one `receive` call, so that one busy channel cannot keep the event loop from other channels."""
BYTES_PER_FLUSH = READS_PER_RECEIVE * READ_BYTES
"""A `flush` call stops after this many bytes, for the same reason."""
MAX_TAIL_COPY_BYTES = 1 << 20
"""Larger tails stay in the memory that they were received into: a copy of many megabytes would stall the event loop."""
MAX_DESCRIPTORS = 8
"""Descriptors that one read accepts. A frame passes at most one descriptor."""
MAX_COPIED_BYTES = 1 << 16
"""Larger frames are written in place. Smaller frames are joined, so that they leave in one write."""
PIECE = 0xFFFFFFFF
"""Stands in the place of a message's size in the header of a piece of a divided frame; the id is the size of the whole frame."""

_ANCILLARY_BYTES = socket.CMSG_LEN(MAX_DESCRIPTORS * array("i").itemsize)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[ALL])  # noqa: UP007


class Frame(msgspec.Struct, frozen=True):
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
    body = b"".join((packed, *tail))  # to ask each buffer for its size would cost most frames more than another copy
    return HEADER.pack(len(body) + following, len(packed), id) + body


def decode(frame: bytes | memoryview) -> Frame:
    """Return what `encode` has encoded; raises ValueError for anything else."""
    try:
        length, packed_length, id = HEADER.unpack_from(frame)
        begin = HEADER.size + packed_length
        message = _decoder.decode(memoryview(frame)[HEADER.size : begin])
    except (struct.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a frame: {error}") from None
    if len(frame) != HEADER.size + length or packed_length > length:
        raise ValueError(f"the frame has {len(frame)} bytes and says {HEADER.size + length}")
    return Frame(message, id, memoryview(frame)[begin:])


class _LargeFrame:
    """A frame with a large tail while it arrives: memory of its size, which is filled from the start."""

    def __init__(self, start: bytearray, size: int) -> None:
        """start: the bytes that have arrived."""
        # A bytearray is cleared at once: milliseconds for many megabytes. The system clears these pages one by one as they are filled.
        # Huge pages would cost less in all, but the system may take milliseconds to find one.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(memory)
        self.memory[: len(start)] = start
        self._filled = len(start)
        self.piece_left = size - len(start)
        """Bytes that follow before the next header: all that are missing, unless the frame is divided."""

    @property
    def missing(self) -> int:
        """Return the number of bytes that have not arrived."""
        return len(self.memory) - self._filled

    def receive(self, end: socket.socket) -> tuple[int, list[int]]:
        """Read once. Returns the number of bytes, which is 0 at end-of-file, and the descriptors."""
        space = self.memory[self._filled : self._filled + min(READ_BYTES, self.piece_left)]
        size, ancillary, _flags, _address = end.recvmsg_into([space], _ANCILLARY_BYTES)
        self.fill(size)
        return size, _descriptors(ancillary)

    def fill(self, size: int) -> None:
        """Count bytes that were read."""
        self._filled += size
        self.piece_left -= size

    def copy(self, data: memoryview) -> int:
        """Take the first bytes of the current piece from others. Returns their number."""
        size = min(len(data), self.piece_left)
        self.memory[self._filled : self._filled + size] = data[:size]
        self.fill(size)
        return size


class Channel:
    """One end of the pair. `open` turns false at end-of-file; the owner then closes the channel.

    Frames arrive in the order in which they were sent, so `frames_sent` on one end and `frames_received` on the other tell
    which frames have arrived.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._buffer = memoryview(bytearray(READ_BYTES))
        """The buffer of every read: an allocation of this size for each read would take four times as long as the read."""
        self._received = bytearray()
        self._large: _LargeFrame | None = None
        """The frame that arrives now, if its tail is large. `_received` is empty while a part of it is next."""
        self._sockets: deque[int] = deque()
        self._outgoing: deque[tuple[bytearray | memoryview, list[int]]] = deque()
        """Bytes that wait, with the descriptors to pass with them. A bytearray without descriptors takes further small frames."""
        self._divided: deque[memoryview] = deque()
        """The rest of frames that leave in pieces when nothing else waits, and the size of the first of them."""
        self._divided_bytes = 0
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

    def send_divided(self, frame: bytes) -> None:
        """Queue one encoded frame, which later frames may overtake if it is large: they would wait behind many megabytes."""
        if not self.open or len(frame) <= READ_BYTES:
            self.send(frame)
            return
        self.frames_sent += 1
        self._divided.append(memoryview(frame))

    def _next_piece(self) -> None:
        frame = self._divided.popleft()
        size = self._divided_bytes = self._divided_bytes or len(frame)
        piece, rest = frame[:READ_BYTES], frame[READ_BYTES:]
        self._outgoing += (memoryview(HEADER.pack(len(piece), PIECE, size)), []), (piece, [])
        if rest:
            self._divided.appendleft(rest)
        else:
            self._divided_bytes = 0

    @property
    def outgoing(self) -> bool:
        """Whether bytes wait to be written."""
        return bool(self._outgoing or self._divided)

    def flush(self) -> bool:
        """Write what the socket accepts, up to BYTES_PER_FLUSH; true when everything was written."""
        limit = self.bytes_sent + BYTES_PER_FLUSH
        while (self._outgoing or self._divided) and self.open:
            if self.bytes_sent >= limit:
                return False
            if not self._outgoing:
                self._next_piece()
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
            if descriptors:
                self._close_all(descriptors)
            self._outgoing.popleft()
            if sent < len(data):
                self._outgoing.appendleft((memoryview(data)[sent:], []))
        return True

    def receive(self) -> list[Frame]:
        """Return every complete frame received so far. An end-of-file is seen in the call after the last frames before it.

        If there is much to read, some of it is left for the next call. Call this again whenever the channel is readable.
        """
        frames: list[Frame] = []
        for _ in range(READS_PER_RECEIVE):
            of_large = 0 if self._large is None else self._large.piece_left
            expected = min(READ_BYTES, of_large) or READ_BYTES
            try:
                size, descriptors = self._read()
            except BlockingIOError:
                break
            except OSError:
                size, descriptors = 0, []
            self._sockets += descriptors
            if not size:
                self.open = False
                break
            frames += self._take_frames(0 if of_large else size)
            if size < expected and not descriptors:
                break  # nothing more has arrived; descriptors also end a read early
        self.frames_received += len(frames)
        return frames

    def close(self) -> None:
        """Close the socket; the other end sees end-of-file."""
        self.open = False
        for _, descriptors in self._outgoing:
            self._close_all(descriptors)
        self._close_all(self._sockets)
        self._outgoing.clear()
        self._divided.clear()
        self._socket.close()

    def _read(self) -> tuple[int, list[int]]:
        """Read once. Returns the number of bytes, which is 0 at end-of-file, and the descriptors."""
        if self._large is not None and self._large.piece_left:
            return self._large.receive(self._socket)
        size, ancillary, _flags, _address = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
        return size, _descriptors(ancillary) if ancillary else []

    def _take_frames(self, size: int) -> list[Frame]:
        """Return the frames that are complete. size: bytes of the last read that are in the buffer."""
        frames, start, large_bytes = [] if self._large is None else self._take_large_frame(), 0, 0
        if follows := bool(self._received):
            self._received += self._buffer[:size]
        with memoryview(self._received) if follows else self._buffer[:size] as view:
            while len(view) - start >= HEADER.size:
                length, packed_length, id = HEADER.unpack_from(view, start)
                begin, end = start + HEADER.size, start + HEADER.size + length
                if packed_length == PIECE:
                    if self._large is None:
                        self._large = _LargeFrame(bytearray(), id)
                    self._large.piece_left = length
                    start = begin + self._large.copy(view[begin:])
                    frames += self._take_large_frame()
                    continue
                if end > len(view):
                    large_bytes = end - start if length - packed_length > MAX_TAIL_COPY_BYTES and self._large is None else 0
                    break
                message = _decoder.decode(view[begin : begin + packed_length])
                tail = bytes(view[begin + packed_length : end])
                attached = socket.socket(fileno=self._sockets.popleft()) if type(message) is Attach else None
                frames.append(Frame(message, id, tail, attached))
                start = end
        if follows:
            del self._received[:start]
        elif start < size:
            self._received += self._buffer[start:size]
        if large_bytes:
            self._large = _LargeFrame(self._received, large_bytes)
            self._received.clear()
        return frames

    def _take_large_frame(self) -> list[Frame]:
        large = self._large
        if large is None or large.missing:
            return []
        self._large = None
        _length, packed_length, id = HEADER.unpack_from(large.memory)
        end = HEADER.size + packed_length
        message = _decoder.decode(large.memory[HEADER.size : end])
        return [Frame(message, id, large.memory[end:].toreadonly())]

    @staticmethod
    def _close_all(descriptors: list[int] | deque[int]) -> None:
        while descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptors.pop())


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that arrived with a read."""
    descriptors = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return descriptors.tolist()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def send_now(channel: Channel, message: Message, id: int = 0) -> None:
    """Send one message without trailing bytes and write it at once."""
    channel.send(encode(message, id))
    channel.flush()
