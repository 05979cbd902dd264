"""The connections to the other replicas: it looks up their addresses, connects to each, and accepts their connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from service.access.peer_keys import PeerKeys
from service.ipc.channel import Frame
from service.ipc.messages import Goodbye, Message
from service.log import Log
from service.mover.addresses import Address, CannotLookUp, look_up
from service.mover.handshake import NotAPeer
from service.mover.link import Link, accept, dial
from service.mover.membership import Membership, Spot

LOOK_UP_SECONDS = 2.0
REDIAL_SECONDS, MAX_REDIAL_SECONDS = 0.1, 2.0
"""Pause before another attempt at an address that refuses connections or does not answer. It doubles each time."""
SELF_SECONDS = 10.0
"""Pause before the address of this replica is tried again."""
MAX_UNPROVEN = 64
"""Connections that may be in their handshake; further connections are closed."""


class Peers:
    """All links of one mover. `on_change` is called when a replica appears or disappears, `on_message` with each message."""

    def __init__(
        self,
        peers: str,
        keys: PeerKeys,
        replica: str,
        max_bytes: int,
        log: Log,
        on_change: Callable[[], None],
        on_message: Callable[[str, Frame], None],
        is_ready: Callable[[], bool],
    ) -> None:
        """peers: the setting. replica: the id of this replica. max_bytes: of a state."""
        self._peers = peers
        self._keys = keys
        self._replica = replica
        self._max_bytes = max_bytes
        self._log = log
        self._on_change = on_change
        self._on_message = on_message
        self._is_ready = is_ready
        self.membership = Membership()
        self._links: dict[str, list[Link]] = {}
        self._dialing: dict[Address, asyncio.Task[None]] = {}
        self._accepting: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None
        self._looking_up: asyncio.Task[None] | None = None

    def start(self, tls: ssl.SSLContext | None) -> None:
        """Connect to the other replicas from now on. tls: the context of outgoing connections, None for plain text."""
        self._tls = tls
        self._looking_up = asyncio.ensure_future(self._look_up())

    def close(self) -> None:
        """Close all connections."""
        for task in (self._looking_up, *self._dialing.values(), *self._accepting):
            if task is not None:
                task.cancel()
        for links in self._links.values():
            for link in links:
                link.close()

    def send(self, replica: str, message: Message, tail: bytes | memoryview = b"") -> None:
        """Send a message to a replica; it is lost without a connection.

        Two replicas may have connected to each other. Both send over the connection that the replica with the smaller id has opened, so
        their messages arrive in order.
        """
        links = self._links.get(replica, [])
        if links:
            wanted = self._replica < replica
            next((link for link in links if link.dialed is wanted), links[0]).send(message, tail)

    def ready(self) -> list[str]:
        """Return the replicas that take over sessions."""
        reachable = self.membership.reachable
        return sorted(id for id, links in self._links.items() if id in reachable and any(link.ready for link in links))

    async def flush(self) -> None:
        """Wait until all sent messages have left this process."""
        await asyncio.gather(*(link.flush() for links in self._links.values() for link in links))

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, certificate: bytes) -> None:
        """Serve a connection that another replica has opened. certificate: of this replica, empty without TLS."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._accepting) >= MAX_UNPROVEN:
            writer.close()
            return
        self._accepting.add(task)
        try:
            link = await accept(reader, writer, self._keys, self._replica, certificate, self._max_bytes)
        except NotAPeer as error:
            self._refused(writer.get_extra_info("peername"), error)
            writer.close()
            return
        except (OSError, EOFError, TimeoutError):
            writer.close()
            return
        finally:
            self._accepting.discard(task)
        if link.peer == self._replica:
            link.close()
            return
        await self._serve(link)

    async def _look_up(self) -> None:
        """Follow the list of addresses."""
        while True:
            try:
                addresses = await look_up(self._peers)
            except CannotLookUp as error:
                self._log.capped("warning", "peers not looked up", error=str(error))
            else:
                self._follow(addresses)
            self.membership.tick(asyncio.get_running_loop().time())
            self._on_change()
            await asyncio.sleep(LOOK_UP_SECONDS)

    def _follow(self, addresses: set[Address]) -> None:
        self.membership.listed(addresses, asyncio.get_running_loop().time())
        for address in addresses - self._dialing.keys():
            self._dialing[address] = asyncio.ensure_future(self._keep_connected(address))
        for address in self._dialing.keys() - addresses:
            # A connection that is open stays: the replica may take its time to end.
            self._dialing.pop(address).cancel()

    async def _keep_connected(self, address: Address) -> None:
        redial = REDIAL_SECONDS
        while True:
            spot, pause = Spot.UNKNOWN, redial
            redial = min(2 * redial, MAX_REDIAL_SECONDS)
            try:
                link = await dial(*address, self._keys, self._replica, self._tls, self._max_bytes)
            except ConnectionRefusedError:
                spot = Spot.REFUSES
            except NotAPeer as error:
                self._refused(f"{address.host}:{address.port}", error)
                pause = LOOK_UP_SECONDS
            except (OSError, EOFError, TimeoutError):
                pass
            else:
                if link.peer != self._replica:
                    self.membership.found(address, Spot.CONNECTED, link.peer)
                    await asyncio.shield(self._start(self._serve(link)))
                    self.membership.found(address, Spot.UNKNOWN)
                    redial = REDIAL_SECONDS
                    continue  # at once: its sessions depend on whether it has ended
                link.close()
                spot, pause = Spot.SELF, SELF_SECONDS
            self.membership.found(address, spot)
            self._on_change()
            await asyncio.sleep(pause)

    def _start(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine that continues even if nothing waits for it."""
        task = asyncio.ensure_future(serving)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    async def _serve(self, link: Link) -> None:
        """Receive the messages of a replica until its connection ends."""
        peer, loop = link.peer, asyncio.get_running_loop()
        links = self._links.setdefault(peer, [])
        links.append(link)
        if len(links) == 1:
            self._log.info("peer connected", peer=peer)
        self.membership.connected(peer)
        self._on_change()
        try:
            await link.run(self._handle, self._is_ready)
        except NotAPeer as error:
            self._refused(peer, error)
        finally:
            links.remove(link)
            if not links:
                del self._links[peer]
                self._log.info("peer disconnected", peer=peer)
            self.membership.disconnected(peer, loop.time())
            self._on_change()

    def _handle(self, link: Link, frame: Frame) -> None:
        if isinstance(frame.message, Goodbye):
            self.membership.said_goodbye(link.peer)
            self._on_change()
        else:
            self._on_message(link.peer, frame)

    def _refused(self, peer: object, error: NotAPeer) -> None:
        self._log.capped("warning", "peer refused", peer=str(peer), reason=str(error))
