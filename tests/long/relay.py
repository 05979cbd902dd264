"""A TCP relay that records both directions of each connection, and the HTTP responses in such a record."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Recording:
    """The bytes of one connection."""

    requests: bytearray = field(default_factory=bytearray)
    responses: bytearray = field(default_factory=bytearray)


class Relay:
    """Forwards connections to a port of this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.recordings: list[Recording] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.recordings.append(Recording())
                threading.Thread(target=self._serve, args=(client, self.recordings[-1]), daemon=True).start()

    def _serve(self, client: socket.socket, recording: Recording) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            returning = threading.Thread(target=_pump, args=(server, client, recording.responses), daemon=True)
            returning.start()
            _pump(client, server, recording.requests)
            returning.join()


def _pump(source: socket.socket, sink: socket.socket, record: bytearray) -> None:
    """Forward bytes until the end of the source, and record them before they can have an effect."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            record += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Response:
    """A response. json: whether it comes from the service, whose errors are JSON too, and not from a proxy."""

    status: int
    json: bool
    body: bytes


def responses(data: bytes) -> list[Response]:
    """Return the complete responses in the bytes of a connection, up to a switch to another protocol."""
    found = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        head, data = data[:end].lower(), data[end + 4 :]
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            continue
        body, data = _body(head, data)
        found.append(Response(status, b"\r\ncontent-type: application/json" in head, body))
        if status == 101:
            break
    return found


def _body(head: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Return the body of a response and the bytes after it."""
    if b"\r\ntransfer-encoding: chunked" in head:
        body = b""
        while size := int(data.split(b"\r\n", 1)[0] or b"0", 16):
            start = data.index(b"\r\n") + 2
            body, data = body + data[start : start + size], data[start + size + 2 :]
        return body, data.partition(b"\r\n\r\n")[2]
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    size = int(length[1]) if length else 0
    return data[:size], data[size:]
