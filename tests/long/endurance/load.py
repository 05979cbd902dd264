"""Keeps many connections busy. It does not know the requests and their answers: the clients do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from loadtest.generator.connection import Connection, OpenRequest
from loadtest.generator.http import HttpConnection
from loadtest.target import Target

PATIENCE_SECONDS = 90.0
"""An answer that takes longer is lost."""
WATCH_SECONDS = 1.0
MOST_FAULTS = 100
"""Faults that are kept. More are only counted."""


@dataclass
class Tally:
    """Counts of all events, and faults with their times: the log of the service has the same clock."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def wrong(self, fault: str) -> None:
        self.counts["wrong"] += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(f"{datetime.now(UTC):%H:%M:%S.%f}: {fault}")


class Client(Protocol):
    """Sends requests in sequence on its connection.

    pause: seconds before its next request. leaves: seconds after which it hangs up unless its request is answered, 0 for never.
    """

    pause: float
    leaves: float

    def next_request(self, ending: bool) -> bytes | None:
        """Return the next request, None after the last. ending: it finishes its open work, and begins nothing new."""

    def answered(self, status: int, body: bytes, sent: float) -> None:
        """Check the answer to its request. sent: when the request left, on the clock of time.monotonic."""

    def unanswered(self, reason: str) -> None:
        """Its connection has ended before the answer. An empty reason: it has hung up."""


class Line(HttpConnection):
    """The connection of a client."""

    def __init__(self, load: Load, client: Client) -> None:
        super().__init__(load, ())
        self.client = client
        self.leaving: asyncio.TimerHandle | None = None

    def send(self, request: bytes) -> None:
        self.open.append(OpenRequest(0, time.monotonic()))
        self._transport.write(request)


class Load:
    """Clients that send requests until `size` of them are answered, or until `seconds` have passed."""

    def __init__(self, address: str, clients: Sequence[Client], size: int, seconds: float, tally: Tally) -> None:
        self._target = Target.of(address, "/")
        self._clients = clients
        self._size = size
        self._until = time.monotonic() + seconds
        self._tally = tally
        self._lines: set[Line] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._at_work = len(clients)
        self._ended = asyncio.Event()
        self.answers = 0

    async def run(self) -> None:
        """Return when every client has finished."""
        for client in self._clients:
            self._connect(client)
        while not self._ended.is_set():
            with_time = asyncio.ensure_future(self._ended.wait())
            await asyncio.wait([with_time], timeout=WATCH_SECONDS)
            with_time.cancel()
            self._look_for_lost_answers()

    def answered(self, line: Connection, status: int, body: bytes) -> None:
        """Called by a line with the answer to its request."""
        assert isinstance(line, Line)
        request = line.open.popleft()
        if line.leaving is not None:
            line.leaving.cancel()
            line.leaving = None
        self.answers += 1
        try:
            line.client.answered(status, body, request.since)
        except Exception as error:
            self._tally.wrong(f"{error!r} after {status} {body[:200]!r}")
        self._advance(line)

    def broken(self, line: Connection, reason: str) -> None:
        """Called by a line that the server has closed, or that makes no sense. A line without a request may be closed."""
        assert isinstance(line, Line)
        self._lines.discard(line)
        if line.leaving is not None:
            line.leaving.cancel()
        if line.open:
            line.client.unanswered(reason)
        self._connect(line.client)

    def _advance(self, line: Line) -> None:
        if line.client.pause:
            pause, line.client.pause = line.client.pause, 0.0
            asyncio.get_running_loop().call_later(pause, self._send, line)
        else:
            self._send(line)

    def _send(self, line: Line) -> None:
        if line not in self._lines:
            return
        request = line.client.next_request(self.answers >= self._size or time.monotonic() >= self._until)
        if request is None:
            self._lines.discard(line)
            line.hang_up()
            self._at_work -= 1
            if not self._at_work:
                self._ended.set()
            return
        line.send(request)
        if line.client.leaves:
            line.leaving = asyncio.get_running_loop().call_later(line.client.leaves, self._leave, line)

    def _leave(self, line: Line) -> None:
        self._lines.discard(line)
        line.hang_up()
        line.client.unanswered("")
        self._connect(line.client)

    def _connect(self, client: Client) -> None:
        connecting = asyncio.ensure_future(self._connected(client))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connected(self, client: Client) -> None:
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: Line(self, client), self._target.host, self._target.port)
        self._lines.add(line)
        self._advance(line)

    def _look_for_lost_answers(self) -> None:
        late = time.monotonic() - PATIENCE_SECONDS
        for line in [line for line in self._lines if line.open and line.open[0].since < late]:
            self._tally.wrong(f"no answer in {PATIENCE_SECONDS:g} s")
            self._leave(line)
