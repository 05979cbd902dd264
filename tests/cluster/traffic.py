"""A thousand sessions whose clients know every sum, through a proxy."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.target import JSON, Target
from tests.accumulator import NEW, AccumulatorSession, Chunk
from tests.callers import Caller, Response
from tests.cluster.replicas import Replica

HEADER = "x-session-id"
CONNECTIONS = 16
MOST_STEPS = 8
LOST = ("session_lost", "unknown_session")
"""Codes that report a session that no longer exists."""


@dataclass
class Round:
    """The outcome of one chunk of each session, or of several. lost: names of sessions that were reported as lost."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """Chunks without an answer from the service, by reason: the client does not know whether they were applied."""
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: Round) -> Round:
        return Round(
            self.answered + other.answered, self.lost + other.lost, self.failed + other.failed, self.faults + other.faults
        )


class Traffic:
    """Clients on CONNECTIONS kept-alive connections. A client whose session is lost begins again under another name.

    Under the old name it could meet an older state: a replica keeps its state until the session expires.
    """

    def __init__(self, address: str, sessions: int, seed: int = 0) -> None:
        self._target = Target.of(address, "/infer")
        self._chance = random.Random(seed)
        self._callers: list[Caller | None] = [None] * CONNECTIONS
        self._generation = 0
        self.sessions = [AccumulatorSession(f"pump {seed} {number}") for number in range(sessions)]

    @property
    def names(self) -> list[str]:
        return [session.name for session in self.sessions]

    async def round(self) -> Round:
        """Send a chunk of each session."""
        rounds = await asyncio.gather(*(self._round(number) for number in range(CONNECTIONS)))
        return sum(rounds, Round())

    async def hang_up(self) -> None:
        """Close the connections."""
        for caller in self._callers:
            if caller is not None:
                caller.hang_up()
        await asyncio.sleep(0.1)  # a transport closes in a later turn of the event loop

    async def _round(self, connection: int) -> Round:
        round = Round()
        for place in range(connection, len(self.sessions), CONNECTIONS):
            if not await self._chunk(connection, place, round):
                self._generation += 1
                self.sessions[place] = AccumulatorSession(f"pump again {self._generation}")
                if not await self._chunk(connection, place, round):
                    round.faults.append(f"{self.sessions[place].name} is lost although it begins")
        return round

    async def _chunk(self, connection: int, place: int, round: Round) -> bool:
        """Send a chunk, and return whether its session still exists."""
        session, chance = self.sessions[place], self._chance
        starts = NEW in session.possible
        chunk = Chunk(chance.choices((-1, 0, 1), k=chance.randint(1, MOST_STEPS)), starts)
        body = {"model": "accumulator", "inputs": [[value + 1 for value in chunk.values]], "start": starts}
        request = self._target.request(json.dumps(body).encode(), JSON, f"{HEADER}: {session.name}")
        try:
            reply = await self._ask(connection, request)
        except OSError as error:
            return self._unheard(session, chunk, type(error).__name__, round)
        code = _code(reply)
        if code in LOST:
            round.lost.append(session.name)
            return False
        if code != "ok":
            return self._unheard(session, chunk, code, round)
        if fault := session.answered(chunk, reply.body):
            round.faults.append(fault)
        round.answered += 1
        return True

    def _unheard(self, session: AccumulatorSession, chunk: Chunk, reason: str, round: Round) -> bool:
        round.failed[reason] += 1
        session.unheard(chunk)
        return True

    async def _ask(self, connection: int, request: bytes) -> Response:
        caller = self._callers[connection]
        if caller is None or not caller.connected:
            caller = self._callers[connection] = await Caller.connect(self._target)
        return await caller.ask(request)


def _code(reply: Response) -> str:
    """Return ok, the code of the service's error, or the status of a proxy's."""
    if reply.status == 200:
        return "ok"
    try:
        code: str = json.loads(reply.body)["code"]
    except ValueError:
        return str(reply.status)
    return code


async def owners(names: Sequence[str], replicas: Sequence[Replica]) -> dict[str, str]:
    """Return the address of the replica that has each session; raises AssertionError for a session on several replicas."""
    found: dict[str, str] = {}

    async def look(replica: Replica, names: Sequence[str]) -> None:
        target = Target.of(replica.address, "")
        caller = await Caller.connect(target)
        for name in names:
            if not caller.connected:
                caller = await Caller.connect(target)
            path = name.replace(" ", "%20")
            reply = await caller.ask(f"GET /sessions/{path}/state HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode())
            if reply.status == 200:
                assert name not in found, f"{name} is at {found[name]} and at {replica.host}"
                found[name] = replica.host
        caller.hang_up()

    await asyncio.gather(*(look(replica, names[part::4]) for replica in replicas for part in range(4)))
    return found


async def rounds_during(traffic: Traffic, event: Callable[[], object], settle_seconds: float) -> Round:
    """Send chunks while an event happens in a thread, and then until nothing changes for some time."""
    loop = asyncio.get_running_loop()
    happening = loop.run_in_executor(None, event)
    total, quiet_since = Round(), loop.time()
    while not happening.done() or loop.time() - quiet_since < settle_seconds:
        round = await traffic.round()
        total += round
        if round.lost or round.failed or not happening.done():
            quiet_since = loop.time()
    await happening
    return total
