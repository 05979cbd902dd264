"""Clients that stream sessions to several replicas, over HTTP and WebSocket, and know the exact answer of every chunk.

A client chooses the replica of a session as a proxy with consistent hashing does: by rendezvous hashing over the replicas that are ready.
When the replicas change, so do the places of some sessions.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from loadtest.callers import Caller, Target
from tests.accumulator import NEW, Account

READY_SECONDS = 0.1
"""Interval of the checks whether replicas are ready."""
STEPS = 3
"""Of each chunk."""
PATIENCE_SECONDS = 20.0
RETRY_SECONDS = 0.02


@dataclass
class Report:
    """What the clients have seen. pauses: seconds until a chunk was answered by another replica than the one before, by client's clock.
    others: the same for all other chunks."""

    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Answers after which the client has sent the chunk again, as they say."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    reconnected: int = 0
    """WebSockets that the service closed with the code that tells the client to come back."""


class Places:
    """Which replicas are ready."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """addresses: HOST:PORT of all replicas that may be started."""
        self._addresses = addresses
        self.ready: list[str] = []

    async def watch(self) -> None:
        """Follow the readiness of all replicas."""
        while True:
            answers = await asyncio.gather(*map(self._is_ready, self._addresses))
            self.ready = [address for address, ready in zip(self._addresses, answers, strict=True) if ready]
            await asyncio.sleep(READY_SECONDS)

    def of(self, session: str) -> str:
        """Return the address for the next chunk of a session."""
        return max(self.ready, key=lambda address: blake2b(f"{address} {session}".encode(), digest_size=8).digest(), default="")

    def drop(self, address: str) -> None:
        """A connection to a replica has failed: it is not ready, until the next check."""
        self.ready = [ready for ready in self.ready if ready != address]

    @staticmethod
    async def _is_ready(address: str) -> bool:
        try:
            async with asyncio.timeout(1.0):
                caller = await Caller.connect(Target.of(f"http://{address}", "/infer"))
                try:
                    reply = await caller.ask(f"GET /readyz HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
                finally:
                    caller.hang_up()
        except (OSError, TimeoutError, EOFError):
            return False
        return reply.status == 200


class Stream:
    """A session and its client."""

    def __init__(self, name: str, places: Places, report: Report, interval: float) -> None:
        self.name = name
        self.account = NEW
        self._places = places
        self._report = report
        self._interval = interval
        self._chance = random.Random(name)
        self._last = ""
        """The address that answered last."""
        self._connected_to = ""
        """The address of a connection that stays with its replica, even if the session's place changes."""

    async def run(self, until: asyncio.Event) -> None:
        """Send chunk after chunk."""
        await asyncio.sleep(self._chance.random() * self._interval)
        while not until.is_set():
            await self._chunk([self._chance.choice((-1, 0, 1)) for _ in range(STEPS)])
            await asyncio.sleep(self._interval * self._chance.uniform(0.8, 1.2))

    async def _chunk(self, values: Sequence[int]) -> None:
        """Send a chunk until it is answered."""
        began, reason = time.monotonic(), "not sent"
        while time.monotonic() - began < PATIENCE_SECONDS:
            address = self._places.of(self.name)
            body = {"input": [value + 1 for value in values], "steps": self.account.steps}
            reply: dict[str, object] = {"code": "no replica is ready"}
            try:
                if address:
                    reply = await self._ask(address, body)
            except (OSError, EOFError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                self._places.drop(self._connected_to or address)
                reply = {"code": type(error).__name__}
            if "code" not in reply:
                self._answered(values, reply, address, began)
                return
            reason = f"{address}: {reply}"
            if reply["code"] == "session_conflict" and reply.get("steps") == self.account.steps + STEPS:
                # The chunk was applied, and its answer was lost with the connection.
                self.account = self.account.plus(values)
                self._report.refused["applied already"] += 1
                return
            self._report.refused[str(reply["code"])] += 1
            if str(reply["code"]).startswith("session_") and reply["code"] != "session_unreachable":
                break
            await asyncio.sleep(RETRY_SECONDS)
        self._report.failed.append(f"{self.name} at {self.account.steps} steps: {reason}")
        self.account = NEW

    def _answered(self, values: Sequence[int], reply: dict[str, object], address: str, began: float) -> None:
        now, report = time.monotonic(), self._report
        told = Account.told(reply["outputs"][0]["value"])  # type: ignore[index]
        expected = self.account.plus(values)
        if told != expected:
            report.wrong.append(f"{self.name}: {told}, not {expected}")
        report.answered += 1
        if self._last and self._last != address:
            report.pauses.append((began, now - began))
        else:
            report.others.append(now - began)
        self.account, self._last = told, address

    async def _ask(self, address: str, body: dict[str, object]) -> dict[str, object]:
        """Return the reply to a chunk, or its error."""
        raise NotImplementedError

    async def close(self) -> None:
        """Hang up."""


class HttpStream(Stream):
    """Sends chunks to POST /infer, over one connection for each replica."""

    def __init__(self, name: str, places: Places, report: Report, interval: float) -> None:
        super().__init__(name, places, report, interval)
        self._caller: tuple[str, Caller] | None = None

    async def _ask(self, address: str, body: dict[str, object]) -> dict[str, object]:
        target = Target.of(f"http://{address}", "/infer")
        if self._caller is None or self._caller[0] != address or not self._caller[1].connected:
            await self.close()
            self._caller = address, await Caller.connect(target)
        fields = {"model": "accumulator", "inputs": [body["input"]], "session": self.name, "steps": body["steps"]}
        async with asyncio.timeout(PATIENCE_SECONDS):
            reply = await self._caller[1].ask(target.request(json.dumps(fields).encode()))
        answer: dict[str, object] = json.loads(reply.body)
        return answer

    async def close(self) -> None:
        if self._caller is not None:
            self._caller[1].hang_up()
            self._caller = None


class SocketStream(Stream):
    """Sends chunks over a WebSocket, which stays with its replica until that closes it."""

    def __init__(self, name: str, places: Places, report: Report, interval: float) -> None:
        super().__init__(name, places, report, interval)
        self._socket: ClientConnection | None = None

    async def _ask(self, address: str, body: dict[str, object]) -> dict[str, object]:
        if self._socket is None:
            self._connected_to = address
            self._socket = await connect(f"ws://{address}/stream?model=accumulator&session={self.name}", proxy=None)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._socket.send(json.dumps(body))
                answer: dict[str, object] = json.loads(await self._socket.recv())
        except ConnectionClosed as closed:
            self._socket = None
            if closed.rcvd is not None and closed.rcvd.code == 1012:
                self._report.reconnected += 1
            raise
        return answer

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    def _answered(self, values: Sequence[int], reply: dict[str, object], address: str, began: float) -> None:
        super()._answered(values, reply, self._connected_to, began)


class Streams:
    """All clients of a test, while they run."""

    def __init__(self, addresses: Sequence[str], *, http: int, sockets: int, interval: float) -> None:
        """http, sockets: how many sessions of each kind. interval: mean seconds between two chunks of a session."""
        self.report = Report()
        self._places = Places(addresses)
        self._streams: list[Stream] = [
            *(HttpStream(f"http-{number}", self._places, self.report, interval) for number in range(http)),
            *(SocketStream(f"socket-{number}", self._places, self.report, interval) for number in range(sockets)),
        ]
        self._until = asyncio.Event()

    async def __aenter__(self) -> Streams:
        self._watching = asyncio.ensure_future(self._places.watch())
        while not self._places.ready:
            await asyncio.sleep(READY_SECONDS)
        self._running = [asyncio.ensure_future(stream.run(self._until)) for stream in self._streams]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._until.set()
        await asyncio.gather(*self._running)
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        await asyncio.gather(*(stream.close() for stream in self._streams))
        await asyncio.sleep(READY_SECONDS)  # transports close in a later tick


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
