"""Clients that know the exact answer of every chunk of their sessions, and a ledger of all their requests.

The model is `models.accumulator`: its recurrent state sums integers, exactly for up to LONGEST steps.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest.target import Target
from tests import models
from tests.callers import Caller, Response
from tests.serving import Server, eventually

SMALL = {"state_slots": "64", "max_sessions": "1024", "session_idle_seconds": "600", "max_batch_tokens": "256"}
"""Settings with few state slots and small batches: sessions move to the host and back, and chunks run in several batches."""
REST = ("requests_in_flight", "queue_depth", "sequences_begun", "sessions", "state_slots_used")
REST_SECONDS = 5.0
"""Time limit until nothing is held after the last client has disconnected; a quiet machine needs a tenth of a second."""
LONGEST = 8192
RESTART_STEPS = 4096
"""A session that may have this many steps is restarted."""
USUAL, RARE = 2, 2
"""Session names per client, often and rarely used. They bound the number of open sessions."""
MOST_STEPS, LONG_STEPS = 24, 400
RARELY, LONG, OPEN_ENDED, RESUMES, BEGINS, HANGS_UP = 0.1, 0.03, 0.25, 0.4, 0.5, 0.05
"""Shares: sequences on a rare name; chunks too long for one batch; sequences without an end; sequences on an open name that resume it;
sequences on other names that state a start; sequences whose client hangs up during one chunk."""
HALF_SENT = 0.3
"""Share of the hang-ups that happen before the body is complete. Half of the others happen during a long chunk."""
HANGING_UP_SECONDS = (0.001, 0.05)
"""How long a client waits before it hangs up. The shortest wait is long enough to send a request."""
PATIENCE_SECONDS = 60.0
SCRAPE_SECONDS = 0.25
NOBODY_HEARD = "client_gone"


# Expected answers of a session.


class Account(NamedTuple):
    """The sum and the number of the steps of a session."""

    sum: int = 0
    steps: int = 0

    def plus(self, values: Sequence[int]) -> Account:
        return Account(self.sum + sum(values), self.steps + len(values))

    @classmethod
    def told(cls, value: Sequence[float]) -> Account:
        """Return the account that an answer reports."""
        return cls(*map(integer, value))


NEW = Account()


def integer(value: float) -> int:
    """Return the count of a cell from its tanh."""
    return round(math.atanh(value) / models.COUNT) if abs(value) < 1 else sys.maxsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Steps of a session, each -1, 0 or 1, with the flags that start and end the session."""

    values: Sequence[int]
    starts: bool | None = None
    ends: bool = False

    def request(self, target: Target, name: str) -> bytes:
        body = {"model": "accumulator", "inputs": [[value + 1 for value in self.values]], "session": name, "end": self.ends}
        return target.request(json.dumps(body if self.starts is None else body | {"start": self.starts}).encode())


class AccumulatorSession:
    """A session as its only client knows it.

    possible: accounts that the session may have; several after a hang-up, because the client does not know whether the chunk ran. A session
        that is not open has the account NEW.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.possible = {NEW}
        self.unsettled = False
        """Whether the last chunk had no reply."""

    @property
    def open(self) -> bool:
        return NEW not in self.possible

    @property
    def distinct(self) -> bool:
        """Whether the number of steps identifies the account, and no account is too long."""
        steps = [account.steps for account in self.possible]
        return len(set(steps)) == len(steps) and max(steps) < RESTART_STEPS

    def expected(self, chunk: Chunk) -> set[Account]:
        """Return the accounts that the answer to a chunk may report."""
        return {account.plus(chunk.values) for account in ({NEW} if chunk.starts else self.possible)}

    def answered(self, chunk: Chunk, answer: bytes) -> str | None:
        """Return the fault of an answer. The session takes over the reported account, so each error is counted once."""
        reply_body = json.loads(answer)
        told, expected = Account.told(reply_body["outputs"][0]["value"]), self.expected(chunk)
        steps = reply_body["session"]["steps"]
        self.possible, self.unsettled = {NEW if chunk.ends else told}, False
        if told in expected and steps == told.steps:
            return None
        return f"{self.name}: {told} and {steps} steps, not {expected}, after {chunk}"

    def unheard(self, chunk: Chunk) -> None:
        """Note a chunk without a reply. It may have run or not; if it was a restart, the old session may have ended either way."""
        untouched = self.possible | {NEW} if chunk.starts else self.possible
        self.possible, self.unsettled = untouched | ({NEW} if chunk.ends else self.expected(chunk)), True


# Counts of requests.


class Counts(NamedTuple):
    """A server's counts of requests: accepted, in flight, and finished by outcome."""

    accepted: int
    in_flight: int
    outcomes: Counter[str]

    @classmethod
    def of(cls, metrics: str) -> Counts:
        """Read the counts from the text of /metrics."""
        accepted, in_flight, outcomes = 0, 0, Counter[str]()
        for sample in (sample for family in text_string_to_metric_families(metrics) for sample in family.samples):
            if sample.name == "seqserve_requests_accepted_total":
                accepted += int(sample.value)
            elif sample.name == "seqserve_requests_in_flight":
                in_flight += int(sample.value)
            elif sample.name == "seqserve_requests_total":
                outcomes[sample.labels["outcome"]] += int(sample.value)
        return cls(accepted, in_flight, outcomes)

    def check(self) -> None:
        """Check that every accepted request is in flight or has one outcome."""
        assert self.accepted == self.in_flight + self.outcomes.total(), self

    def since(self, before: Counts) -> Counts:
        outcomes = Counter({name: count - before.outcomes[name] for name, count in self.outcomes.items()})
        return Counts(self.accepted - before.accepted, self.in_flight - before.in_flight, +outcomes)


def counts(server: Server) -> Counts:
    return Counts.of(server.scrape())


def at_rest(server: Server) -> Counts:
    """Return the counts once nothing is held any longer."""
    eventually(lambda: rests(server), REST_SECONDS)
    return counts(server)


def held(server: Server) -> dict[str, float]:
    """Return the metrics of all resources that requests and sessions acquire and must release."""
    return {name: server.metric(f"seqserve_{name}") for name in REST}


def rests(server: Server) -> bool:
    """Return whether nothing is held."""
    return not any(held(server).values())


@dataclass
class Ledger:
    """The clients' counts: requests sent, replies by code, and hang-ups before a reply."""

    sent: int = 0
    told: Counter[str] = field(default_factory=Counter)
    gone: int = 0

    def heard(self, reply: Response) -> str:
        """Count a reply and return its code."""
        code: str = "ok" if reply.status == 200 else json.loads(reply.body)["code"]
        self.told[code] += 1
        return code

    def check(self, counts: Counts) -> None:
        """Check that the server's counts, at rest, match the clients' counts."""
        counts.check()
        assert counts.in_flight == 0
        assert self.sent == self.told.total() + self.gone == counts.accepted, (self, counts)
        assert not self.told - counts.outcomes, f"the server counted other outcomes: {self} {counts}"
        assert NOBODY_HEARD not in self.told


async def scrape(caller: Caller, target: Target) -> Counts:
    reply = await caller.ask(f"GET /metrics HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode())
    assert reply.status == 200
    return Counts.of(reply.body.decode())


async def watch(target: Target, in_flight: list[int], ended: asyncio.Event) -> None:
    """Scrape the metrics repeatedly, check the counts, and note how many requests are in flight."""
    caller = await Caller.connect(target)
    try:
        while not ended.is_set():
            now = await scrape(caller, target)
            now.check()
            in_flight.append(now.in_flight)
            await asyncio.sleep(SCRAPE_SECONDS)
    finally:
        caller.hang_up()


# The clients.


@dataclass
class Told:
    """The outcome of all sequences. in_flight: requests at each scrape; faults: wrong answers."""

    ledger: Ledger = field(default_factory=Ledger)
    faults: list[str] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    sequences: int = 0
    again: int = 0
    """Chunks that were sent again because the chunk before them had been cancelled and not run."""
    seconds: float = 0.0

    def __str__(self) -> str:
        ledger = self.ledger
        return (
            f"{self.sequences} sequences in {ledger.sent} chunks and {self.seconds:.1f} s: {len(self.faults)} wrong, {ledger.gone} "
            f"hung up, {self.again} sent again, {len(self.in_flight)} scrapes with up to {max(self.in_flight, default=0)} in flight"
        )


def tell(url: str, *, callers: int, sequences: int, seed: int = 0) -> Told:
    """Run `callers` clients, each with `sequences` sequences in turn."""
    return uvloop.run(_tell(Target.of(url, "/infer"), callers, sequences, seed))


async def _tell(target: Target, callers: int, sequences: int, seed: int) -> Told:
    told, ended = Told(), asyncio.Event()
    watching = asyncio.ensure_future(watch(target, told.in_flight, ended))
    tellers = [Teller(target, f"{seed}-{number}", random.Random(f"{seed}-{number}"), told) for number in range(callers)]
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as telling:
            for teller in tellers:
                telling.create_task(teller.tell(sequences))
        told.seconds = time.monotonic() - began
    finally:
        ended.set()
        for teller in tellers:
            teller.hang_up()
        await watching
    return told


class Teller:
    """One client, on one connection at a time, with its own sessions."""

    def __init__(self, target: Target, name: str, chance: random.Random, told: Told) -> None:
        self._target = target
        self._chance = chance
        self._told = told
        self._caller: Caller | None = None
        self._usual = [AccumulatorSession(f"{name} usual {number}") for number in range(USUAL)]
        self._rare = [AccumulatorSession(f"{name} rare {number}") for number in range(RARE)]

    async def tell(self, sequences: int) -> None:
        """Send this many sequences, then end the open sessions."""
        for _ in range(sequences):
            chance = self._chance
            session = chance.choice(self._rare if chance.random() < RARELY else self._usual)
            await self._sequence(session)
            self._told.sequences += 1
        for session in (*self._usual, *self._rare):
            await self._ask(session, Chunk([1], self._starts(session, first=True), ends=True))

    def hang_up(self) -> None:
        if self._caller is not None:
            self._caller.hang_up()

    async def _sequence(self, session: AccumulatorSession) -> None:
        chance, chunks = self._chance, list(self._chunks())
        unheard = chance.randrange(len(chunks)) if chance.random() < HANGS_UP else -1
        for number, (values, ends) in enumerate(chunks):
            chunk = Chunk(values, self._starts(session, first=number == 0), ends)
            if number == unheard:
                long = Chunk(list(values) * (LONG_STEPS // len(values)), chunk.starts, ends)
                await self._leave(session, chance.choice((chunk, long)))
            else:
                await self._ask(session, chunk)

    def _chunks(self) -> Iterator[tuple[list[int], bool]]:
        """Yield the chunks of one sequence. A random drift makes equal sums unlikely; the last chunk may end it."""
        chance = self._chance
        count, drift = chance.randint(1, 4), chance.random()
        open_ended = chance.random() < OPEN_ENDED
        for number in range(count):
            steps = chance.randint(MOST_STEPS, LONG_STEPS) if chance.random() < LONG else chance.randint(1, MOST_STEPS)
            values = chance.choices((1, -1, 0), (drift, 1 - drift, 0.2), k=steps)
            yield values, number == count - 1 and not open_ended

    def _starts(self, session: AccumulatorSession, *, first: bool) -> bool | None:
        """Return a random start flag among the values whose effect the client can predict."""
        chance = self._chance
        if not session.distinct:
            return True
        if first or session.unsettled:
            restart = chance.random() < (1 - RESUMES if session.open else BEGINS)
            return True if restart else None
        return chance.choice((None, False)) if session.open else None

    async def _ask(self, session: AccumulatorSession, chunk: Chunk) -> None:
        request = chunk.request(self._target, session.name)
        while (reply := await self._reply(request, PATIENCE_SECONDS)) is not None:
            if self._settled(session, chunk, reply):
                return
            self._told.again += 1
            await asyncio.sleep(0.001)
        self._told.faults.append(f"{session.name}: no answer in {PATIENCE_SECONDS} s to {chunk}")
        session.unheard(chunk)

    async def _leave(self, session: AccumulatorSession, chunk: Chunk) -> None:
        """Hang up during a chunk, before or after its body is complete."""
        request, chance = chunk.request(self._target, session.name), self._chance
        if chance.random() < HALF_SENT:
            whole = request.index(b"\r\n\r\n") + 4
            await self._reply(request[: chance.randint(whole, len(request) - 1)], HANGING_UP_SECONDS[0])
            return
        reply = await self._reply(request, chance.uniform(*HANGING_UP_SECONDS))
        if reply is None:
            session.unheard(chunk)
            return
        self._settled(session, chunk, reply)

    def _settled(self, session: AccumulatorSession, chunk: Chunk, reply: Response) -> bool:
        """Process a reply. Returns False if the chunk must be sent again, because the cancelled chunk before it interfered."""
        code = self._told.ledger.heard(reply)
        if code == "session_conflict" and session.unsettled:
            return False
        if code == "ok":
            fault = session.answered(chunk, reply.body)
        else:
            fault = f"{session.name}: {reply.body!r} to {chunk}"
            session.unheard(chunk)
        self._told.faults += [fault] if fault else []
        return True

    async def _reply(self, request: bytes, patience_seconds: float) -> Response | None:
        """Return the reply, or None after hanging up because it took too long."""
        self._told.ledger.sent += 1
        if self._caller is None or not self._caller.connected:
            self._caller = await Caller.connect(self._target)
        try:
            async with asyncio.timeout(patience_seconds):
                return await self._caller.ask(request)
        except TimeoutError:
            self._caller.hang_up()
            self._told.ledger.gone += 1
            return None


def start_sessions(url: str, names: Sequence[str], callers: int = 32) -> Counter[str]:
    """Send a single step per session."""
    return uvloop.run(_start_sessions(Target.of(url, "/infer"), iter(names), callers))


async def _start_sessions(target: Target, names: Iterator[str], callers: int) -> Counter[str]:
    ledger = Ledger()

    async def start_some() -> None:
        caller = await Caller.connect(target)
        for name in names:
            ledger.heard(await caller.ask(Chunk([1]).request(target, name)))
        caller.hang_up()

    await asyncio.gather(*[start_some() for _ in range(callers)])
    return ledger.told


def faults_of(told: Iterable[str]) -> str:
    """Return some of the errors for a message."""
    return "\n".join(list(told)[:5])
