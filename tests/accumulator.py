"""Callers who know to the last digit what every session of theirs has to answer, and a count of all that they asked for.

The model is `models.accumulator`: integers that a recurrent state sums, exact as long as no more than LONGEST steps are counted.
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

from loadtest.callers import Caller, Reply, Target
from tests import models
from tests.serving import Server, eventually

SMALL = {"state_slots": "64", "max_sessions": "1024", "session_idle_seconds": "600", "batch_budget_ms": "0.1"}
"""Settings of a server on which sessions move to the host and back, and turns take so little of a chunk that many are cut."""
REST = ("requests_in_flight", "queue_depth", "sequences_begun", "sessions", "state_slots_used")
REST_SECONDS = 5.0
"""Nothing is held so long after the last caller has gone; on a quiet machine it is a tenth of a second."""
LONGEST = 8192
ANEW_STEPS = 4096
"""A session that may be as long as this is begun anew."""
CALLERS = 256
USUAL, RARE = 2, 2
"""Names of each caller's own; all callers have them in their turn, so that no more sessions are open than there are names."""
MOST_STEPS, LONG_STEPS = 24, 400
RARELY, LONG, OPEN_ENDED, GOES_ON, BEGINS, HANGS_UP = 0.1, 0.03, 0.25, 0.4, 0.5, 0.05
"""Shares: sequences on a rare name; chunks that are cut, as no turn takes so many steps; sequences without an end; of sequences on a name
that is open, those that go on with it; of the others, those that say that they begin; sequences whose caller hangs up in one chunk."""
HALF_SENT = 0.3
"""Share of those who hang up before the body is whole. Of the others half do so in a chunk that is cut."""
HANGING_UP_SECONDS = (0.001, 0.05)
"""How long who hangs up has waited. By the least of it a request has left."""
PATIENCE_SECONDS = 60.0
SCRAPE_SECONDS = 0.25
NOBODY_HEARD = "client_gone"


# What a session has to answer.


class Account(NamedTuple):
    """The sum of the steps of a session, and how many there were."""

    sum: int = 0
    steps: int = 0

    def plus(self, values: Sequence[int]) -> Account:
        return Account(self.sum + sum(values), self.steps + len(values))

    @classmethod
    def told(cls, value: Sequence[float]) -> Account:
        """What an answer of the model says."""
        return cls(*map(integer, value))


NEW = Account()


def integer(value: float) -> int:
    """How many steps a cell has counted whose tanh this is."""
    return round(math.atanh(value) / models.COUNT) if abs(value) < 1 else sys.maxsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some steps of a session, of -1, 0 and 1 each, and what is said of where it begins and ends."""

    values: Sequence[int]
    starts: bool | None = None
    ends: bool = False

    def request(self, target: Target, name: str) -> bytes:
        body = {"model": "accumulator", "inputs": [[value + 1 for value in self.values]], "session": name, "end": self.ends}
        return target.request(json.dumps(body if self.starts is None else body | {"start": self.starts}).encode())


class Session:
    """One session as its only caller knows it. `possible` has more than one account where he hung up, and cannot know what had run; a
    session that is not open has had nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.possible = {NEW}
        self.unsettled = False
        """Whether the last chunk was not heard of."""

    @property
    def open(self) -> bool:
        return NEW not in self.possible

    @property
    def distinct(self) -> bool:
        """Whether the number of steps will tell which account is the right one, and none is too long."""
        steps = [account.steps for account in self.possible]
        return len(set(steps)) == len(steps) and max(steps) < ANEW_STEPS

    def expected(self, chunk: Chunk) -> set[Account]:
        """What the answer to a chunk may say."""
        return {account.plus(chunk.values) for account in ({NEW} if chunk.starts else self.possible)}

    def answered(self, chunk: Chunk, answer: bytes) -> str | None:
        """What is wrong with an answer; it is believed all the same, so that one fault is counted once."""
        said = json.loads(answer)
        told, expected = Account.told(said["outputs"][0]["value"]), self.expected(chunk)
        steps = said["session"]["steps"]
        self.possible, self.unsettled = {NEW if chunk.ends else told}, False
        if told in expected and steps == told.steps:
            return None
        return f"{self.name}: {told} and {steps} steps, not {expected}, after {chunk}"

    def unheard(self, chunk: Chunk) -> None:
        """Its caller has gone: it was run, or it was not, and then it may still have ended what it was to begin anew."""
        untouched = self.possible | {NEW} if chunk.starts else self.possible
        self.possible, self.unsettled = untouched | ({NEW} if chunk.ends else self.expected(chunk)), True


# What was asked for.


class Counts(NamedTuple):
    """What a server says of its requests: how many it accepted, how many are in flight, and what became of the others."""

    accepted: int
    in_flight: int
    outcomes: Counter[str]

    @classmethod
    def of(cls, metrics: str) -> Counts:
        """Out of the text of /metrics."""
        accepted, in_flight, outcomes = 0, 0, Counter[str]()
        for sample in (one for family in text_string_to_metric_families(metrics) for one in family.samples):
            if sample.name == "seqserve_requests_accepted_total":
                accepted += int(sample.value)
            elif sample.name == "seqserve_requests_in_flight":
                in_flight += int(sample.value)
            elif sample.name == "seqserve_requests_total":
                outcomes[sample.labels["outcome"]] += int(sample.value)
        return cls(accepted, in_flight, outcomes)

    def check(self) -> None:
        """Whatever was accepted is in flight or has one outcome."""
        assert self.accepted == self.in_flight + self.outcomes.total(), self

    def since(self, before: Counts) -> Counts:
        outcomes = Counter({name: count - before.outcomes[name] for name, count in self.outcomes.items()})
        return Counts(self.accepted - before.accepted, self.in_flight - before.in_flight, +outcomes)


def counts(server: Server) -> Counts:
    return Counts.of(server.client.get("/metrics").text)


def at_rest(server: Server) -> Counts:
    """What is counted when nothing is held any more."""
    eventually(lambda: rests(server), REST_SECONDS)
    return counts(server)


def held(server: Server) -> dict[str, float]:
    """Whatever requests and sessions take hold of and have to give back."""
    return {name: server.metric(f"seqserve_{name}") for name in REST}


def rests(server: Server) -> bool:
    """Nothing is held for anybody."""
    return not any(held(server).values())


@dataclass
class Ledger:
    """The callers' side: how many requests they sent, what they were told, and how often they had gone before they were told anything."""

    sent: int = 0
    told: Counter[str] = field(default_factory=Counter)
    gone: int = 0

    def heard(self, reply: Reply) -> str:
        """The code of an answer."""
        code: str = "ok" if reply.status == 200 else json.loads(reply.body)["code"]
        self.told[code] += 1
        return code

    def check(self, counts: Counts) -> None:
        """At rest, what a server says of these requests is what their callers know."""
        counts.check()
        assert counts.in_flight == 0
        assert self.sent == self.told.total() + self.gone == counts.accepted, (self, counts)
        assert not self.told - counts.outcomes, f"told, and not counted so: {self} {counts}"
        assert NOBODY_HEARD not in self.told


async def scrape(caller: Caller, target: Target) -> Counts:
    reply = await caller.ask(f"GET /metrics HTTP/1.1\r\nHost: {target.host}\r\n\r\n".encode())
    assert reply.status == 200
    return Counts.of(reply.body.decode())


async def watch(target: Target, in_flight: list[int], ended: asyncio.Event) -> None:
    """At every scrape, whatever was accepted is in flight, which is noted, or has an outcome."""
    caller = await Caller.connect(target)
    try:
        while not ended.is_set():
            now = await scrape(caller, target)
            now.check()
            in_flight.append(now.in_flight)
            await asyncio.sleep(SCRAPE_SECONDS)
    finally:
        caller.hang_up()


# The callers.


@dataclass
class Told:
    """What came of all sequences. in_flight: at each scrape; faults: whatever an answer should not have said."""

    ledger: Ledger = field(default_factory=Ledger)
    faults: list[str] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    sequences: int = 0
    again: int = 0
    """Chunks that were sent again as one before them, whose caller had gone, had not run."""
    seconds: float = 0.0

    def __str__(self) -> str:
        ledger = self.ledger
        return (
            f"{self.sequences} sequences in {ledger.sent} chunks and {self.seconds:.1f} s: {len(self.faults)} wrong, {ledger.gone} "
            f"hung up, {self.again} sent again, {len(self.in_flight)} scrapes with up to {max(self.in_flight, default=0)} in flight"
        )


def tell(url: str, *, callers: int, sequences: int, seed: int = 0, wrong: int = 0) -> Told:
    """So many callers with so many sequences each, one after the other. wrong: how many of them send, once, another step than they account
    for."""
    return uvloop.run(_tell(Target.of(url, "/infer"), callers, sequences, seed, wrong))


async def _tell(target: Target, callers: int, sequences: int, seed: int, wrong: int) -> Told:
    told, ended = Told(), asyncio.Event()
    watching = asyncio.ensure_future(watch(target, told.in_flight, ended))
    tellers = [Teller(target, f"{seed}-{number}", random.Random(f"{seed}-{number}"), told) for number in range(callers)]
    for teller in tellers[:wrong]:
        teller.lies = 1
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
    """One caller, on one connection at a time, with sessions of its own. lies: how many chunks it will not send as it accounts for them."""

    def __init__(self, target: Target, name: str, chance: random.Random, told: Told) -> None:
        self._target = target
        self._chance = chance
        self._told = told
        self._caller: Caller | None = None
        self._usual = [Session(f"{name} usual {number}") for number in range(USUAL)]
        self._rare = [Session(f"{name} rare {number}") for number in range(RARE)]
        self.lies = 0

    async def tell(self, sequences: int) -> None:
        """So many sequences, and then the ends of those that were left open."""
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

    async def _sequence(self, session: Session) -> None:
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
        """Of one sequence, which has a drift of its own, so that no two sums are likely to be the same; the last one may end it."""
        chance = self._chance
        count, drift = chance.randint(1, 4), chance.random()
        open_ended = chance.random() < OPEN_ENDED
        for number in range(count):
            steps = chance.randint(MOST_STEPS, LONG_STEPS) if chance.random() < LONG else chance.randint(1, MOST_STEPS)
            values = chance.choices((1, -1, 0), (drift, 1 - drift, 0.2), k=steps)
            yield values, number == count - 1 and not open_ended

    def _starts(self, session: Session, *, first: bool) -> bool | None:
        """Whatever can be said, and what it means is known."""
        chance = self._chance
        if not session.distinct:
            return True
        if first or session.unsettled:
            anew = chance.random() < (1 - GOES_ON if session.open else BEGINS)
            return True if anew else None
        return chance.choice((None, False)) if session.open else None

    async def _ask(self, session: Session, chunk: Chunk) -> None:
        request = self._request(session, chunk)
        while (reply := await self._reply(request, PATIENCE_SECONDS)) is not None:
            if self._settled(session, chunk, reply):
                return
            self._told.again += 1
            await asyncio.sleep(0.001)
        self._told.faults.append(f"{session.name}: no answer in {PATIENCE_SECONDS} s to {chunk}")
        session.unheard(chunk)

    async def _leave(self, session: Session, chunk: Chunk) -> None:
        """Hang up while a chunk is under way: before its body is whole, or when it is."""
        request, chance = self._request(session, chunk), self._chance
        if chance.random() < HALF_SENT:
            whole = request.index(b"\r\n\r\n") + 4
            await self._reply(request[: chance.randint(whole, len(request) - 1)], HANGING_UP_SECONDS[0])
            return
        reply = await self._reply(request, chance.uniform(*HANGING_UP_SECONDS))
        if reply is None:
            session.unheard(chunk)
            return
        self._settled(session, chunk, reply)

    def _settled(self, session: Session, chunk: Chunk, reply: Reply) -> bool:
        """Takes an answer into account. False when the chunk is to be sent again: the one before it, whose caller has gone, did not run, or
        ends the session."""
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

    def _request(self, session: Session, chunk: Chunk) -> bytes:
        if self.lies:
            self.lies -= 1
            first, *others = chunk.values
            chunk = Chunk([1 if first < 1 else -1, *others], chunk.starts, chunk.ends)
        return chunk.request(self._target, session.name)

    async def _reply(self, request: bytes, patience_seconds: float) -> Reply | None:
        """None when the caller lost patience, and hung up."""
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


def faults_of(told: Iterable[str]) -> str:
    """Some of them, for a message."""
    return "\n".join(list(told)[:5])
