"""Accepts connections on a listening socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

ACCEPT_PAUSE_SECONDS, MAX_ACCEPTS = 0.001, 64
"""Pause between two rounds of accepting connections, and the most connections of one round."""
FULL_PAUSE_SECONDS = 0.02
"""Pause before accepting a connection for which another must close."""
ERROR_PAUSE_SECONDS = 1.0
"""Pause after accepting a connection has failed."""


class Listener:
    """Accepts connections on the socket that all frontends inherit, so that each frontend gets its share of them.

    The other ways to share a port break a promise that this class keeps:
    - uvicorn's `sockets=` accepts until no connection waits. The first frontend to wake would take a whole burst.
    - With SO_REUSEPORT the kernel assigns each connection to a frontend by a hash. Connections to a hanging frontend would wait although
      other frontends are free. The kernel would reset the connections that a frontend has not accepted when it dies.

    A frontend accepts one connection, pauses while the others accept, and doubles the number while connections keep waiting.
    """

    def __init__(
        self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol], make_room: Callable[[], bool]
    ) -> None:
        """make_protocol: returns the protocol for a new connection. make_room: returns whether another connection may be accepted."""
        listening.setblocking(False)
        self._listening = listening
        self._make_protocol = make_protocol
        self._make_room = make_room
        self._connecting: set[asyncio.Task[Any]] = set()
        self._reopening: asyncio.TimerHandle | None = None
        self._accepts_per_round = 1
        self._last_round = 0.0

    def open(self) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept_round)

    def close(self) -> None:
        """Stop accepting connections; other frontends accept the waiting connections."""
        if self._reopening is not None:
            self._reopening.cancel()
        asyncio.get_running_loop().remove_reader(self._listening.fileno())

    def _accept_round(self) -> None:
        now = asyncio.get_running_loop().time()
        busy = now - self._last_round < 5 * ACCEPT_PAUSE_SECONDS
        self._accepts_per_round = min(MAX_ACCEPTS, 2 * self._accepts_per_round) if busy else 1
        self._last_round = now
        try:
            for _ in range(self._accepts_per_round):
                if not self._make_room():
                    self._pause(FULL_PAUSE_SECONDS)
                    return
                self._start(self._listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # another frontend was faster, or the client disconnected
        except OSError:
            # Usually no file descriptor is left. Without the pause the event loop would do nothing but try again.
            self._pause(ERROR_PAUSE_SECONDS)
            return
        self._pause(ACCEPT_PAUSE_SECONDS)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening.fileno())
        self._reopening = loop.call_later(seconds, self.open)

    def _start(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client disconnected
