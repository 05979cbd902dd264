"""A relay that behaves as a bad network does: it delays, loses, throttles, stalls and cuts connections, with seeded chance.

TCP hides losses, and shows them as pauses: a lost segment, and all later segments, arrive after the time-out of the sender, which
doubles when the segment is lost again.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

SEGMENT_BYTES = 1400
QUEUED_SEGMENTS = 64
"""Bytes on their way in one direction at which the relay stops reading, as with a full window."""
RETRANSMISSION_SECONDS = 0.3


@dataclass(frozen=True)
class Network:
    """A way to be bad. delay_seconds: of each segment, one way. loss: share of the lost segments. bytes_per_second: in each direction, 0
    without a limit. hole_seconds, hole_every: how long nothing passes, and after how many seconds on average. cut: share of the segments
    with which the connection ends.
    """

    delay_seconds: float = 0.0
    loss: float = 0.0
    bytes_per_second: float = 0.0
    hole_seconds: float = 0.0
    hole_every: float = 0.0
    cut: float = 0.0


class Link:
    """One direction of a connection."""

    def __init__(self, network: Network, chance: random.Random) -> None:
        self._network = network
        self._chance = chance
        self._free_at = 0.0
        """When the segment before this one has passed."""
        self._hole_at = self._next_hole(time.monotonic())

    def arrival(self, size: int) -> float:
        """Return when a segment that is sent now arrives."""
        network, now = self._network, time.monotonic()
        start = max(now, self._free_at)
        if network.bytes_per_second:
            start += size / network.bytes_per_second
        if start > self._hole_at:
            start = max(start, self._hole_at + network.hole_seconds)
            self._hole_at = self._next_hole(start)
        timeout = RETRANSMISSION_SECONDS
        while self._chance.random() < network.loss:
            start += timeout
            timeout *= 2
        self._free_at = start
        return start + network.delay_seconds

    def cuts(self) -> bool:
        """Return whether the connection ends instead of passing the next segment."""
        return self._chance.random() < self._network.cut

    def _next_hole(self, now: float) -> float:
        every = self._network.hole_every
        return now + self._chance.expovariate(1 / every) if every else float("inf")


class Cut(Exception):
    """The network ends a connection."""


class BadNetwork:
    """Passes the connections of clients on to a port of this machine. cut: how many it has ended."""

    def __init__(self, target: int, network: Network, seed: int = 0) -> None:
        self._target = target
        self._network = network
        self._seed = seed
        self._numbers = iter(range(1 << 30))
        self._started = threading.Event()
        self.cut = 0
        self.port = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the relay in a thread."""
        self._started.clear()
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(uvloop.run, self._serve())
            self._started.wait()
            try:
                yield
            finally:
                self._loop.call_soon_threadsafe(self._ended.set)
                serving.result()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._ended.wait()
        server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chance = random.Random(f"{self._seed} {next(self._numbers)}")
        onward, to_service = await asyncio.open_connection("127.0.0.1", self._target)
        links = (Link(self._network, chance), Link(self._network, chance))
        pumps = [
            asyncio.ensure_future(self._pump(reader, to_service, links[0])),
            asyncio.ensure_future(self._pump(onward, writer, links[1])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            self.cut += any(pump.done() and isinstance(pump.exception(), Cut) for pump in pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            for side in (writer, to_service):
                side.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
        """Pass one direction on."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_SEGMENTS)
        delivering = asyncio.ensure_future(_deliver(queue, writer))
        try:
            while segment := await reader.read(SEGMENT_BYTES):
                if link.cuts():
                    raise Cut
                await queue.put((link.arrival(len(segment)), segment))
            await queue.put((link.arrival(0), b""))
            await delivering
        finally:
            delivering.cancel()


async def _deliver(queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Write each segment when it arrives. An empty segment is the end."""
    while True:
        arrival, segment = await queue.get()
        await asyncio.sleep(max(0.0, arrival - time.monotonic()))
        if not segment:
            break
        writer.write(segment)
        await writer.drain()
    writer.write_eof()
