"""Accepts connections on a listening socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from service.frontend.guards.connection_share import ConnectionShare
from service.frontend.http1.tls import HANDSHAKE_SECONDS

ACCEPT_PAUSE_SECONDS, MAX_ACCEPTS = 0.001, 64
"""Pause between two rounds of accepting connections, and the most connections of one round."""
MAX_EXCESS = 10
"""A frontend above its share pauses for each connection above it, and for this many at most."""
FULL_PAUSE_SECONDS = 0.02
"""Pause before accepting a connection for which another must close."""
FULL_HANDSHAKE_SECONDS = 1.0
"""How long a handshake may take once there is no room for further connections."""
ERROR_PAUSE_SECONDS = 1.0
"""Pause after accepting a connection has failed."""


class SharedPort(NamedTuple):
    """A listening socket that all frontends inherit, and this frontend's share of its connections."""

    listening: socket.socket
    share: ConnectionShare


class Listener:
    """Accepts connections on the socket that all frontends inherit, so that each frontend gets its share of them.

    The other ways to share a port break a promise that this class keeps:
    - uvicorn's `sockets=` accepts until no connection waits. The first frontend to wake would take a whole burst.
    - With SO_REUSEPORT the kernel assigns each connection to a frontend by a hash. Connections to a hanging frontend would wait although
      other frontends are free. The kernel would reset the connections that a frontend has not accepted when it dies.

    A frontend accepts a few connections, and pauses while the others accept. A frontend above the mean of all frontends also pauses before
    it accepts. It then accepts the connections that the others have left, more each time: they may hang.
    """

    def __init__(
        self,
        port: SharedPort,
        make_protocol: Callable[[], asyncio.Protocol],
        make_room: Callable[[int], bool],
        connections: Callable[[], int],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """make_protocol: returns the protocol for a new connection. make_room: returns whether another connection may be accepted; takes
        the number of accepted connections that are not open yet. connections: returns the number of open connections. tls: returns the
        context of a new connection, None for plain text.
        """
        port.listening.setblocking(False)
        self._listening, self._share = port
        self._make_protocol = make_protocol
        self._make_room = make_room
        self._connections = connections
        self._tls = tls
        self._connecting: dict[asyncio.Task[Any], float] = {}
        """The connections that are not open yet, and when they were accepted. The oldest is first."""
        self._pausing: asyncio.TimerHandle | None = None
        self._left = 0
        """How many connections the last round above the share accepted, because the others left them."""

    def open(self) -> None:
        """Start to accept connections."""
        self.publish()
        asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept_share)

    def close(self) -> None:
        """Accept the connections that wait, and close the port here: the last frontend that closes it would reset them."""
        if self._pausing is not None:
            self._pausing.cancel()
        asyncio.get_running_loop().remove_reader(self._listening.fileno())
        with suppress(OSError):  # no connection waits any more
            for _ in range(MAX_ACCEPTS):
                if not self._make_room(len(self._connecting)):
                    break
                self._start(self._listening.accept()[0])
        self._listening.close()
        self._share.withdraw()

    def publish(self) -> None:
        """Let the other frontends know how many connections this frontend has. Called now and then, because connections close."""
        self._share.publish(self._connections() + len(self._connecting))

    def _accept_share(self) -> None:
        """Accept connections up to this frontend's share of them."""
        self.publish()
        excess = self._share.excess()
        if excess:
            self._pause(min(excess, MAX_EXCESS) * ACCEPT_PAUSE_SECONDS, self._accept_left)
        else:
            self._left = 0
            self._accept(self._share.allowance())

    def _accept_left(self) -> None:
        """Accept connections that the other frontends have not accepted during a pause."""
        self._left += 1
        self._accept(self._left)

    def _accept(self, most: float) -> None:
        """Accept up to `most` connections. Then pause if others may wait."""
        try:
            for _ in range(int(min(most, MAX_ACCEPTS))):
                if not self._make_room(len(self._connecting)):
                    self._end_long_handshakes()
                    self._pause(FULL_PAUSE_SECONDS, self._accept_share)
                    return
                self._start(self._listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            self._left = 0
            self.open()  # another frontend was faster, or the client disconnected
        except OSError:
            # Usually no file descriptor is left. Without the pause the event loop would do nothing but try again.
            self._pause(ERROR_PAUSE_SECONDS, self._accept_share)
        else:
            self.publish()
            self._pause(ACCEPT_PAUSE_SECONDS, self._accept_share)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening.fileno())
        self._pausing = loop.call_later(seconds, then)

    def _end_long_handshakes(self) -> None:
        """Close the connections of clients that leave their handshakes open: they would keep all others out."""
        now = asyncio.get_running_loop().time()
        for task in [task for task, accepted in self._connecting.items() if now - accepted > FULL_HANDSHAKE_SECONDS]:
            task.cancel()

    def _start(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._connect(connection))
        self._connecting[task] = loop.time()
        task.add_done_callback(self._connecting.__delitem__)

    async def _connect(self, connection: socket.socket) -> None:
        tls = self._tls()
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection, **options)
        except OSError:
            connection.close()  # the client disconnected, or its handshake failed
