"""Sessions over networks that lose, throttle, stall and cut: no chunk is lost or runs twice.

A relay delays, loses, throttles, stalls and cuts connections, with seeded chance. TCP hides losses, and shows them as pauses: a lost
segment, and all later segments, arrive after the time-out of the sender, which doubles when the segment is lost again.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from loadtest.target import Target
from tests import models
from tests.accumulator import NEW, Account, at_rest
from tests.callers import Caller, Response
from tests.serving import Server, serving

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
        self._numbers = count()
        self.cut = 0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chance = random.Random(f"{self._seed} {next(self._numbers)}")
        onward, to_service = await asyncio.open_connection("127.0.0.1", self._target)
        ways = ((reader, to_service), (onward, writer))
        try:
            async with asyncio.TaskGroup() as pumps:
                for way in ways:
                    pumps.create_task(self._pump(*way, Link(self._network, chance)))
        except* Cut:
            self.cut += 1
        except* OSError:
            pass
        finally:
            for side in (writer, to_service):
                side.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
        """Pass one direction on."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_SEGMENTS)
        async with asyncio.TaskGroup() as delivering:
            delivering.create_task(_deliver(queue, writer))
            while segment := await reader.read(SEGMENT_BYTES):
                if link.cuts():
                    raise Cut
                await queue.put((link.arrival(len(segment)), segment))
            await queue.put((link.arrival(0), b""))


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


# The clients.

CLIENTS, CHUNKS, MOST_STEPS = 32, 20, 200
PATIENCE_SECONDS, RETRY_SECONDS = 60.0, 0.1
ATTEMPTS = 100
NETWORKS = {
    "losses": Network(delay_seconds=0.15, loss=0.2),
    "low bandwidth": Network(bytes_per_second=10_240.0),
    "holes": Network(hole_seconds=30.0, hole_every=20.0),
    "cuts": Network(delay_seconds=0.02, cut=0.1),
}


class Ledger:
    """The requests and answers of all clients. resent: chunks that were sent again. known: resent chunks that had run before."""

    def __init__(self) -> None:
        self.sent = self.answers = self.resent = self.known = 0
        self.faults: list[str] = []
        self.lost: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"{self.sent} requests, {self.answers} answers, {self.resent} sent again for {dict(self.lost)}, {self.known} of them had run"


class Client:
    """A client that sends the chunks of one session, and repeats each chunk until it knows that the chunk has run."""

    def __init__(self, target: Target, number: int, ledger: Ledger) -> None:
        self._target = target
        self._name = f"bad network {number}"
        self._chance = random.Random(number)
        self._ledger = ledger
        self._caller: Caller | None = None
        self._account = NEW

    async def run(self) -> None:
        for _ in range(CHUNKS):
            await self._send(self._chance.choices((-1, 0, 1), k=self._chance.randint(1, MOST_STEPS)))
        await self._send([1], end=True)
        if self._caller is not None:
            self._caller.hang_up()

    async def _send(self, values: list[int], *, end: bool = False) -> None:
        expected = self._account.plus(values)
        body = {"model": "accumulator", "inputs": [[value + 1 for value in values]], "session": self._name, "end": end}
        request = self._target.request(json.dumps(body | {"steps": self._account.steps}).encode())
        for attempt in range(ATTEMPTS):
            self._ledger.resent += attempt > 0
            reply = await self._reply(request)
            if reply is not None and self._settles(reply, expected, again=attempt > 0, end=end):
                self._account = expected
                return
            await asyncio.sleep(RETRY_SECONDS)
        self._ledger.faults.append(f"{self._name}: no answer")

    def _settles(self, reply: Response, expected: Account, *, again: bool, end: bool) -> bool:
        """Return whether the chunk has run. The service tells how many steps the session has when a chunk does not continue it."""
        body = json.loads(reply.body)
        if reply.status == 200:
            self._ledger.answers += 1
            told = Account.told(body["outputs"][0]["value"])
            if told != expected:
                self._ledger.faults.append(f"{self._name}: {told}, not {expected}")
            return True
        steps = body.get("steps")
        if reply.status == 409 and again and steps in (expected.steps, 0 if end else expected.steps):
            self._ledger.known += 1
            return True
        if not (reply.status == 408 or (reply.status == 409 and again and steps is None)):
            self._ledger.faults.append(f"{self._name}: {reply} and not {expected}")
        return False

    async def _reply(self, request: bytes) -> Response | None:
        """Return the reply, or None if the connection ends before it."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                if self._caller is None or not self._caller.connected:
                    self._caller = await Caller.connect(self._target)
                self._ledger.sent += 1
                return await self._caller.ask(request)
        except OSError as error:  # a TimeoutError too
            self._ledger.lost[type(error).__name__] += 1
            if self._caller is not None:
                self._caller.hang_up()
            return None


def sent_over(network: Network, server: Server) -> tuple[Ledger, BadNetwork]:
    """Run all clients. Wrong counts of the service are among the faults of the ledger."""
    bad, ledger, before = BadNetwork(urlsplit(server.address).port or 0, network), Ledger(), at_rest(server)

    async def run() -> None:
        async with await asyncio.start_server(bad.relay, "127.0.0.1", 0) as relay:
            target = Target("127.0.0.1", relay.sockets[0].getsockname()[1], "/infer")
            await asyncio.gather(*(Client(target, number, ledger).run() for number in range(CLIENTS)))

    uvloop.run(run())
    counts = at_rest(server).since(before)
    if counts.in_flight or counts.accepted != counts.outcomes.total() or counts.accepted > ledger.sent:
        ledger.faults.append(f"{ledger.sent} requests, and the service counts {counts}")
    if not ledger.answers <= counts.outcomes["ok"] <= CLIENTS * (CHUNKS + 1):
        ledger.faults.append(f"{ledger.answers} answers, and the service counts {counts}")
    return ledger, bad


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.accumulator(tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_every_chunk_runs_once_on_a_bad_network(
    network: Network, folder: Path, tmp_path: Path, show: Callable[[object], None]
) -> None:
    with serving(folder, tmp_path, session_idle_seconds="600") as server:
        ledger, relay = sent_over(network, server)
        show(f"{ledger}, {relay.cut} connections cut")
        assert not ledger.faults
        assert bool(network.cut) == (relay.cut > 0)
        assert not server.events("bug") and not server.events("library warning")
