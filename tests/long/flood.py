"""Connections that send nothing: many idle connections that stay, and new connections that come and go."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from urllib.parse import urlsplit

from tests.serving import Server

NEW_PER_SECOND, NEW, NEW_AT_ONCE, NEW_BETWEEN_PROBES = 2_000, 20_000, 3_000, 400
"""New connections a second and in all, how many of these are open at a time, and how many are opened between two probes."""
ROUND_SECONDS = 0.01
SOURCES = [f"127.0.1.{number}" for number in range(1, 9)]
"""Addresses of the clients: one address has too few ports."""
BIND_WITHOUT_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)
"""Lets several connections from one port go to different ports of the service."""


class ConnectionFlood:
    """Connections that send nothing. opened: the new connections so far."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.address)
        self._address = (address.hostname, address.port)
        self._sources = cycle(SOURCES)
        self._idle: list[socket.socket] = []
        self._new: deque[socket.socket] = deque()
        self._ended = threading.Event()
        self.opened, self.seconds = 0, 0.0

    def open_idle(self, connections: int, probe: Callable[[], None]) -> None:
        """Open connections that stay. probe: as for `running`."""
        while len(self._idle) < connections:
            self._paced(NEW_BETWEEN_PROBES, lambda: self._idle.append(self._connect()))
            probe()

    @contextmanager
    def running(self, probe: Callable[[], None]) -> Iterator[None]:
        """Open new connections during the context, and at least NEW. Each closes after NEW_AT_ONCE others.

        probe: a new client, which is answered after the service has accepted the connections before it. The flood continues meanwhile, and
        waits for the answer before the next probe. Where the service accepts fewer connections, the flood slows down: it would only
        fill the queue of the kernel.
        """
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._run, probe)
            try:
                yield
            finally:
                self._ended.set()
                running.result()

    def close(self) -> None:
        for client in (*self._idle, *self._new):
            client.close()

    def __str__(self) -> str:
        return f"{len(self._idle)} idle connections, {self.opened} new ones, {self.opened / self.seconds:.0f} a second"

    def _run(self, probe: Callable[[], None]) -> None:
        began = due = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            probing = pool.submit(probe)
            while not self._ended.is_set() or self.opened < NEW:
                due = max(due + NEW_BETWEEN_PROBES / NEW_PER_SECOND, time.monotonic())
                self._paced(NEW_BETWEEN_PROBES, self._open_new)
                probing.result()
                probing = pool.submit(probe)
                time.sleep(max(0.0, due - time.monotonic()))
            probing.result()
        self.seconds = time.monotonic() - began

    def _paced(self, connections: int, connect: Callable[[], None]) -> None:
        due, opened = time.monotonic(), 0
        while opened < connections:
            for _ in range(min(connections - opened, round(2 * NEW_PER_SECOND * ROUND_SECONDS))):
                connect()
                opened += 1
            due += ROUND_SECONDS
            time.sleep(max(0.0, due - time.monotonic()))

    def _open_new(self) -> None:
        self._new.append(self._connect())
        self.opened += 1
        if len(self._new) > NEW_AT_ONCE:
            self._new.popleft().close()

    def _connect(self) -> socket.socket:
        """Begin a connection, which the kernel completes."""
        client = socket.socket()
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_IP, BIND_WITHOUT_PORT, 1)
        client.bind((next(self._sources), 0))
        begun = client.connect_ex(self._address)
        assert begun in (0, errno.EINPROGRESS), errno.errorcode[begun]
        return client


@contextmanager
def flooded(server: Server, idle: int, probe: Callable[[], None]) -> Iterator[ConnectionFlood]:
    """Keep idle connections open during the context. probe: as for `ConnectionFlood.running`."""
    flood = ConnectionFlood(server)
    try:
        flood.open_idle(idle, probe)
        yield flood
    finally:
        flood.close()
