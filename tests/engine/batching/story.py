"""Sessions and single requests in any order of events, beside a plain account of what each session has been answered.

Every id that is sent adds to its session's sum. What an answer says is the sum of all chunks that were answered before it and of its own;
whatever else happened, to whomever.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.engine.batching.state_slots import Slot
from service.engine.execution.cost_model import Cost
from service.errors import ServiceError, SessionConflict, SessionExpired, SessionLost, TooManySessions, UnknownSession
from service.ipc.messages import FIRST, ModelKey
from service.ipc.session_journal import SessionJournal
from tests.engine.batching.fakes import MODEL, OTHER
from tests.engine.batching.harness import IDLE_SECONDS, POISON, AsynchronousEngine, Caller, House

NAMES = ("a", "b", "c", "d", "e")
MOST_SESSIONS = 3
SLOTS = 2
BUDGET_STEPS = 1
"""Chunks of more than LEAST_STEPS are cut."""


@dataclass
class Account:
    """What a session must have by what its callers were told: sum and steps."""

    sum: float = 0.0
    steps: int = 0


@dataclass
class Sent:
    """A chunk that was sent, and not looked at since."""

    name: str
    caller: Caller
    values: Sequence[int]
    ends: bool
    starts: bool | None


@dataclass
class Story:
    """One engine after the other, with two turns in flight. `told` counts what sessions' callers were refused with."""

    now: float = 0.0
    told: Counter[str] = field(default_factory=Counter)
    events: int = 0

    def __post_init__(self) -> None:
        self.journal = SessionJournal(4 * MOST_SESSIONS)
        self.accounts: dict[str, Account] = {}
        self.buried: set[str] = set()
        """Whose end was told."""
        self.exports: list[tuple[bytes, Account]] = []
        self.sent: list[Sent] = []
        self.single: list[Caller] = []
        self._begin()

    def close(self) -> None:
        self.journal.close()

    def _begin(self) -> None:
        self.engine = AsynchronousEngine(slots=SLOTS, in_flight=2)
        self.engine.per_row = Cost(0.0, 1.0, 0.0)
        self.house = House(engine=self.engine, max_sessions=MOST_SESSIONS, journal=self.journal, batch_seconds=BUDGET_STEPS)
        self.house.now = self.now

    # Events.

    def chunk(self, name: str, values: Sequence[int], starts: bool | None, ends: bool, allowed: float) -> None:
        if starts:
            # Whatever its callers still wait for is refused by this.
            self.accounts.pop(name, None)
        caller = self.house.call(values, session=name, starts=starts, ends=ends, allowed=allowed)
        self.sent.append(Sent(name, caller, values, ends, starts))
        self.look()

    def request(self, values: Sequence[int], model: ModelKey) -> None:
        self.single.append(self.house.call(values, model=model))

    def step(self) -> None:
        self.house.batcher.step()
        self.look()

    def end_of_a_turn(self) -> None:
        self.engine.end()
        self.step()

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.house.now = self.now
        self.step()

    def hang_up(self, which: int) -> None:
        """The chunk has not been answered: nothing of it counts."""
        if self.sent:
            self.house.hang_up(self.sent.pop(which % len(self.sent)).caller)
            self.look()

    def delete(self, name: str) -> None:
        try:
            self.house.batcher.end(name)
        except ServiceError as error:
            self._refused(name, error)
        else:
            self.accounts.pop(name, None)
        self.look()

    def export(self, name: str) -> None:
        try:
            data = self.house.batcher.export(name)
        except ServiceError as error:
            self._refused(name, error)
        else:
            mine = self.accounts[name]
            self.exports = [*self.exports[-3:], (data, Account(mine.sum, mine.steps))]

    def adopt(self, name: str, which: int) -> None:
        if not self.exports:
            return
        data, account = self.exports[which % len(self.exports)]
        try:
            self.house.batcher.adopt(name, data)
        except ServiceError as error:
            assert isinstance(error, SessionConflict | TooManySessions)
        else:
            self.accounts[name] = Account(account.sum, account.steps)
            self.buried.discard(name)

    def death(self) -> None:
        """The engine ends; its successor is sent again what had no answer."""
        sent, self.sent = self.sent, []
        self._begin()
        for one in sent:
            if one.caller.gone:
                continue
            caller = self.house.call(one.values, session=one.name, starts=one.starts, ends=one.ends, allowed=1e9, again=True)
            self.sent.append(Sent(one.name, caller, one.values, one.ends, one.starts))
            self.look()

    # The account.

    def look(self) -> None:
        """Every answer that came is the right one; an answer of a session comes before that of any later chunk of it."""
        self.events += 1
        waiting = []
        for one in self.sent:
            if one.caller.answers:
                account = self.accounts.setdefault(one.name, Account())
                if one.starts:
                    account = self.accounts[one.name] = Account()
                self.buried.discard(one.name)
                account.sum += sum(one.values)
                account.steps += len(one.values)
                assert one.caller.sums == [account.sum]
                assert one.caller.answers[0][0].session_steps == account.steps
                if one.ends:
                    del self.accounts[one.name]
            elif one.caller.errors:
                self._refused(one.name, one.caller.errors[0])
            else:
                waiting.append(one)
        self.sent = waiting

    def _refused(self, name: str, error: ServiceError) -> None:
        self.told[error.code] += 1
        if isinstance(error, SessionExpired):
            assert name not in self.buried, "nobody is told twice"
        if isinstance(error, SessionLost | SessionExpired):
            self.buried.add(name)
            self.accounts.pop(name, None)
        elif isinstance(error, UnknownSession):
            assert name not in self.accounts

    def check(self) -> None:
        """Whatever is held is held by one, and nothing else is."""
        batcher = self.house.batcher
        models = batcher._states._models
        for key, mine in models.items():
            held = list(self._held(key))
            places = [slot.place for slot in held]
            assert len(set(places)) == len(places), "one owner of each place"
            assert all(mine.slots.owns(slot) for slot in held)
            free = [FIRST + index for index in mine.slots._free]
            assert len(set(free)) == len(free)
            assert not set(free) & set(places)
            assert mine.slots.used == len(held), "what is used and what is free are all"
            resting = {id(one) for one in mine.resting}
            assert resting <= {id(session.held) for session in batcher._sessions._open.values()}
        assert len(batcher._sessions) <= MOST_SESSIONS
        records = [session.record for session in batcher._sessions._open.values()]
        records += [gone.record for gone in batcher._sessions._gone.values()] + batcher._sessions._records
        assert sorted(records) == list(range(self.journal.records))

    def _held(self, key: ModelKey) -> list[Slot]:
        batcher = self.house.batcher
        rows = {id(row): row for caller in self.house.callers if caller.ticket for row in caller.ticket.rows}
        sessions = [one.held for one in batcher._sessions._open.values() if one.key == key]
        of_rows = [row for row in rows.values() if row.ticket.request.key == key]
        slots = [held.slot for held in sessions] + [slot for row in of_rows for slot in (row.slot, row.source)]
        return [slot for slot in slots if slot is not None]

    def finish(self) -> None:
        """Everything runs to its end, and when all sessions have expired nothing is held."""
        for _ in range(1000):
            self.end_of_a_turn()
            if self.house.batcher.idle and not self.engine.busy:
                break
        self.look()
        assert not self.sent, "everybody is told"
        assert all(caller.told == (0 if caller.gone else 1) for caller in self.house.callers)
        for caller in self.house.callers:
            if caller in self.single and caller.answers:
                assert caller.sums == caller.expected
        self.time_passes(IDLE_SECONDS)
        self.check()
        assert all(mine.slots.used == 0 for mine in self.house.batcher._states._models.values())
        assert len(self.house.batcher._sessions) == 0


def any_event(story: Story, chance: random.Random) -> None:
    """One event, as likely as it makes for long stories."""
    name = chance.choice(NAMES)
    values = [chance.choice((1, 2, 3))] * chance.choice((1, 2, 5, 20, 40))
    if chance.random() < 0.03:
        values[-1] = POISON
    match chance.choices(range(9), (30, 8, 20, 30, 3, 6, 2, 4, 0.3))[0]:
        case 0:
            ends = chance.random() < 0.2
            starts = chance.choices((None, True, False), (8, 1, 1))[0]
            story.chunk(name, values, starts, ends, chance.choice((1e9, 1e9, 30.0, 90.0)))
        case 1:
            story.request(values, chance.choice((MODEL, OTHER)))
        case 2:
            story.step()
        case 3:
            story.end_of_a_turn()
        case 4:
            story.time_passes(chance.choice((0.5, 20.0, IDLE_SECONDS)))
        case 5:
            story.hang_up(chance.randrange(100))
        case 6:
            story.delete(name)
        case 7:
            story.export(name) if chance.random() < 0.5 else story.adopt(name, chance.randrange(100))
        case _:
            story.death()
