"""Sessions over networks that lose, throttle, stall and cut: no chunk is lost or runs twice. `make test-all` runs it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from loadtest.target import Target
from tests import models
from tests.accumulator import NEW, Account, at_rest
from tests.callers import Caller, Response
from tests.long.bad_network import BadNetwork, Network
from tests.serving import Server, serving

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
    relay, ledger, before = BadNetwork(urlsplit(server.address).port or 0, network), Ledger(), at_rest(server)
    with relay.running():
        target = Target("127.0.0.1", relay.port, "/infer")

        async def run() -> None:
            await asyncio.gather(*(Client(target, number, ledger).run() for number in range(CLIENTS)))

        uvloop.run(run())
    counts = at_rest(server).since(before)
    if counts.in_flight or counts.accepted != counts.outcomes.total() or counts.accepted > ledger.sent:
        ledger.faults.append(f"{ledger.sent} requests, and the service counts {counts}")
    if not ledger.answers <= counts.outcomes["ok"] <= CLIENTS * (CHUNKS + 1):
        ledger.faults.append(f"{ledger.answers} answers, and the service counts {counts}")
    return ledger, relay


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
