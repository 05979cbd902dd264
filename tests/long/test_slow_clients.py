"""2,000 clients send their requests a byte at a time while usual clients take 0.7 of the capacity. `make test-all` runs it."""

from __future__ import annotations

import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from loadtest.oip_requests import PATH
from tests.frontend.http2 import peer
from tests.long.fuzz.wire import grpc
from tests.long.others import BODY, ROWS_AT_ONCE, UsualClients, on_planted_device
from tests.long.overload import Lag
from tests.serving import LIMIT_SECONDS, Server

CLIENTS, ROUNDS = 2_000, 3
BYTE_SECONDS = 1.0
"""Interval at which a client sends a part, and checks whether the service has ended its request. The clients begin within one interval."""
PHASE_SECONDS = 8.0
"""Shorter than the limit, so that all slow clients are connected in the whole phase."""
RECEIVE_SECONDS, SWEEP_SECONDS, LAGS = 10.0, 1.0, 10
"""The default limit, how often it is applied, and how many times the worst lag of this process a connection may end later."""
MOST_RATIO = 1.5
"""How many times as long half of the usual requests may take."""
HEAD = b"POST /infer HTTP/1.1\r\nHost: localhost\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
BLOCK = peer.block((b"te", b"trailers"), (b"content-type", b"application/grpc"), path=PATH.encode())
MESSAGE = b"\0\0\0\1\0" + bytes(256)
HELLO = peer.PREFACE + peer.settings()
OPENED = peer.frame(peer.HEADERS, peer.END_HEADERS, 1, BLOCK)


class Way(NamedTuple):
    """A way to send a request slowly: a beginning at once, then the parts in sequence. grpc: whether to the port of gRPC.

    The time limit of the service starts with the beginning.
    """

    begin: bytes
    parts: list[bytes]
    grpc: bool = False


def each(data: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in data]


WAYS = {
    "head": Way(HEAD[:1], each(HEAD[1:] + b"X: " + b"y" * 60)),
    "body": Way(HEAD + LENGTH, each(BODY)),
    "chunks": Way(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", [b"1\r\n%b\r\n" % byte for byte in each(BODY)]),
    "preface": Way(HELLO[:1], each(HELLO[1:]), grpc=True),
    "header block": Way(HELLO + OPENED[:1], each(OPENED[1:]), grpc=True),
    "continuations": Way(
        HELLO + peer.frame(peer.HEADERS, 0, 1, BLOCK[:9]),
        [part for byte in each(BLOCK[9:]) for part in (b"", b"", peer.frame(peer.CONTINUATION, 0, 1, byte))],
        grpc=True,
    ),
    "data": Way(HELLO + OPENED, [peer.frame(peer.DATA, 0, 1, byte) for byte in each(MESSAGE)], grpc=True),
}


def refused(received: bytes) -> bool:
    """Return whether a call of gRPC has ended: its connection may stay open for other calls."""
    return any(frame.kind == peer.HEADERS and frame.flags & peer.END_STREAM for frame in grpc.frames_of(received))


class SlowClient:
    """One request that is sent slowly. borne: seconds until the client last found its request open.

    A client that looks late, because other processes take its core, does not count the time since its last look.
    """

    def __init__(self, server: Server, name: str, way: Way) -> None:
        address = urlsplit(f"//{server.grpc}" if way.grpc else server.address)
        self.name = name
        self.borne = 0.0
        self._grpc = way.grpc
        self._parts = chain([way.begin], way.parts, repeat(b""))
        self._received = b""
        self._client = socket.create_connection((address.hostname, address.port or 0), LIMIT_SECONDS)
        self._client.setblocking(False)
        self._began = time.monotonic()

    def advance(self) -> bool:
        """Send the next part, unless the service has ended the connection or the call. Returns whether it has not."""
        looked = time.monotonic()
        if self._ended():
            return False
        with suppress(ConnectionError):
            self._client.send(next(self._parts))
        self.borne = looked - self._began
        return True

    def _ended(self) -> bool:
        """Read all that has arrived, and return whether it ends the connection or the call."""
        with suppress(BlockingIOError):
            try:
                while part := self._client.recv(1 << 16):
                    self._received += part
            except ConnectionError:
                pass
            return True
        return self._grpc and refused(self._received)

    def close(self) -> None:
        self._client.close()


class Crowd:
    """Slow clients, and how many seconds the service tolerated each of them, by way.

    lag: the worst of this process meanwhile. late: the most seconds by which a client sent a part after it was due. The service has work
    of the same kind, and may get a core as late.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.borne: dict[str, list[float]] = {name: [] for name in WAYS}
        self.lag = self.late = 0.0

    def run(self, clients: int) -> None:
        """Send requests until the service has ended all of them."""
        with Lag() as lag:
            self._send(clients)
        self.lag = max(self.lag, lag.worst)

    @contextmanager
    def beside(self, clients: int) -> Iterator[None]:
        """Run in another thread, and wait for its end."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run, clients)
            yield
            running.result()

    def overdue(self, limit_seconds: float) -> dict[str, float]:
        """Return the ways of clients that the service tolerated for longer than the limit, and how long."""
        allowed = limit_seconds + SWEEP_SECONDS + LAGS * self.lag + self.late
        return {way: max(seconds) for way, seconds in self.borne.items() if max(seconds) > allowed}

    def __str__(self) -> str:
        ways = (f"{way} {len(seconds)} for up to {max(seconds):.1f} s" for way, seconds in self.borne.items())
        return f"{', '.join(ways)}; lag {1000 * self.lag:.0f} ms, late {1000 * self.late:.0f} ms"

    def _send(self, clients: int) -> None:
        """Begin a request at a time, all of them within BYTE_SECONDS, and advance each client every BYTE_SECONDS."""
        began = time.monotonic()
        ways = itertools.islice(itertools.cycle(WAYS.items()), clients)
        starts = deque((began + BYTE_SECONDS * number / clients, *way) for number, way in enumerate(ways))
        waiting = deque[tuple[float, SlowClient]]()
        while starts or waiting:
            if starts and (not waiting or starts[0][0] <= waiting[0][0]):
                due, name, way = starts.popleft()
                self._sleep_until(due)
                client = SlowClient(self._server, name, way)
            else:
                due, client = waiting.popleft()
                self._sleep_until(due)
            if client.advance() and client.borne < LIMIT_SECONDS:
                waiting.append((time.monotonic() + BYTE_SECONDS, client))
            else:
                self.borne[client.name].append(client.borne)
                client.close()

    def _sleep_until(self, due: float) -> None:
        time.sleep(max(0.0, due - time.monotonic()))
        self.late = max(self.late, time.monotonic() - due)


def test_2_000_slow_clients_are_closed_and_delay_nobody(tmp_path: Path, show: Callable[[object], None]) -> None:
    with on_planted_device("slow-device", tmp_path, max_batch_sequences=str(ROWS_AT_ONCE)) as server:
        usual, crowd = UsualClients.of(server, PHASE_SECONDS), Crowd(server)
        comparison = usual.compare(lambda: crowd.beside(CLIENTS), ROUNDS)
        show(f"{comparison}\n{crowd}")
        assert not comparison.failures and not crowd.overdue(RECEIVE_SECONDS)
        assert comparison.holds(MOST_RATIO)
        assert not server.events("bug") and not server.events("library warning")
