"""The socket over which frontends send traced requests to the tracer. All frontends share one end.

Each message is a packet, so that several processes may write at once. A full socket drops packets: tracing never waits.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from service.ipc.messages.tracing import RequestTrace

MAX_PACKET_BYTES = 1 << 16
BUFFER_BYTES = 1 << 22
"""Bytes that may wait for the tracer, as far as the system allows it."""
PACKETS_PER_READ = 4096
"""A reader returns after this many packets, so that other callbacks run."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RequestTrace)


class TraceSockets:
    """Both ends. The supervisor keeps both open: a restarted tracer continues with the packets that wait."""

    def __init__(self) -> None:
        """Raises OSError."""
        try:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # macOS has no such sockets; its datagram sockets drop more, because fewer datagrams may wait
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reading, self._writing = ends
        for end in ends:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    @property
    def reading(self) -> int:
        """Return the descriptor of the tracer's end."""
        return self._reading.fileno()

    @property
    def writing(self) -> int:
        """Return the descriptor of the frontends' end."""
        return self._writing.fileno()

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


class TraceWriter:
    """A frontend's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def send(self, trace: RequestTrace) -> bool:
        """Send a request; false if there is no room for it."""
        try:
            self._socket.send(_encoder.encode(trace))
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class TraceReader:
    """The tracer's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def close(self) -> None:
        self._socket.close()

    def read(self) -> Iterator[RequestTrace]:
        """Yield the requests that have arrived, up to PACKETS_PER_READ."""
        for _ in range(PACKETS_PER_READ):
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if not packet:
                return  # nothing can write any more
            yield _decoder.decode(packet)
