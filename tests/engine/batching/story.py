"""Sessions and single requests in any order of events, checked against a plain account of each session.

Every id adds to the sum of its session. The answer to a chunk is the sum of this chunk and of all chunks answered before it, in any
order of events.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.engine.batching.state_slots import FIRST_SLOT
from service.engine.batching.tenant_queue import NO_HANDLE
from service.engine.execution.cost_model import Cost
from service.errors import ServiceError, SessionConflict, SessionExpired, SessionLost, TooManySessions, UnknownSession
from service.ipc.messages.models import ModelKey
from service.ipc.session_journal import SessionJournal
from tests.engine.batching.harness import (
    IDLE_SECONDS,
    MODEL,
    OTHER,
    OVERFLOW,
    POISON,
    AsynchronousEngine,
    BatcherHarness,
    FakeClient,
)

NAMES = ("a", "b", "c", "d", "e")
MOST_SESSIONS = 3
SLOTS = 2
BUDGET_STEPS = 1
"""Small enough that chunks of more than LEAST_STEPS run in several batches."""


@dataclass
class Account:
    """The sum and the steps of a session, as its answers report them."""

    sum: float = 0.0
    steps: int = 0


@dataclass
class SentChunk:
    """A chunk whose answer has not been checked yet."""

    name: str
    client: FakeClient
    values: Sequence[int]
    ends: bool
    starts: bool | None


@dataclass
class Story:
    """Successive engines, each with two batches in flight. `errors` counts the error codes that sessions received."""

    now: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    events: int = 0

    def __post_init__(self) -> None:
        self.journal = SessionJournal(4 * MOST_SESSIONS)
        self.accounts: dict[str, Account] = {}
        self.reported: set[str] = set()
        """Sessions whose unnoticed end has been reported."""
        self.exports: list[tuple[bytes, Account]] = []
        self.sent: list[SentChunk] = []
        self.single: list[FakeClient] = []
        self._begin()

    def close(self) -> None:
        self.journal.close()

    def _begin(self) -> None:
        self.engine = AsynchronousEngine(slots=SLOTS, in_flight=2)
        self.engine.per_row = Cost(0.0, 1.0, 0.0)
        self.harness = BatcherHarness(
            engine=self.engine, max_sessions=MOST_SESSIONS, journal=self.journal, batch_seconds=BUDGET_STEPS
        )
        self.harness.now = self.now

    # Events.

    def chunk(self, name: str, values: Sequence[int], starts: bool | None, ends: bool, allowed: float) -> None:
        if starts and any(chunk.name == name and chunk.ends for chunk in self.sent):
            # The session ends, and its chunks that still wait are refused.
            self.accounts.pop(name, None)
        client = self.harness.call(values, session=name, starts=starts, ends=ends, allowed=allowed)
        self.sent.append(SentChunk(name, client, values, ends, starts))
        self.check_answers()

    def request(self, values: Sequence[int], model: ModelKey) -> None:
        self.single.append(self.harness.call(values, model=model))

    def step(self) -> None:
        self.harness.batcher.step()
        self.check_answers()

    def end_of_batch(self) -> None:
        self.engine.end_batch()
        self.step()

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.harness.now = self.now
        self.step()

    def disconnect(self, which: int) -> None:
        """Cancel a chunk, which then does not count."""
        if self.sent:
            self.harness.disconnect(self.sent.pop(which % len(self.sent)).client)
            self.check_answers()

    def delete(self, name: str) -> None:
        try:
            self.harness.batcher.sessions.end(name)
        except ServiceError as error:
            self._count_refusal(name, error)
        else:
            self.accounts.pop(name, None)
        self.check_answers()

    def export(self, name: str) -> None:
        try:
            data = self.harness.batcher.sessions.export_state(name)
        except ServiceError as error:
            self._count_refusal(name, error)
        else:
            account = self.accounts[name]
            self.exports = [*self.exports[-3:], (data, Account(account.sum, account.steps))]

    def adopt(self, name: str, which: int) -> None:
        if not self.exports:
            return
        data, account = self.exports[which % len(self.exports)]
        try:
            self.harness.import_state(name, data)
        except ServiceError as error:
            assert isinstance(error, SessionConflict | TooManySessions)
        else:
            self.accounts[name] = Account(account.sum, account.steps)
            self.reported.discard(name)

    def engine_ends(self) -> None:
        """End the engine. The next engine receives the unanswered chunks again."""
        sent, self.sent = self.sent, []
        self._begin()
        for chunk in sent:
            if chunk.client.disconnected:
                continue
            client = self.harness.call(
                chunk.values, session=chunk.name, starts=chunk.starts, ends=chunk.ends, allowed=1e9, resubmitted=True
            )
            self.sent.append(SentChunk(chunk.name, client, chunk.values, chunk.ends, chunk.starts))
            self.check_answers()

    # The account.

    def check_answers(self) -> None:
        """Check that every answer is correct, and that the answers of a session come in order."""
        self.events += 1
        waiting = []
        for chunk in self.sent:
            if chunk.client.answers and not chunk.client.answers[0][0].finite:
                assert OVERFLOW in chunk.values
                self._refused_as_not_finite(chunk)
            elif chunk.client.answers:
                account = self.accounts.setdefault(chunk.name, Account())
                if chunk.starts:
                    account = self.accounts[chunk.name] = Account()
                self.reported.discard(chunk.name)
                account.sum += sum(chunk.values)
                account.steps += len(chunk.values)
                assert chunk.client.sums == [account.sum]
                assert chunk.client.answers[0][0].session_steps == account.steps
                if chunk.ends:
                    del self.accounts[chunk.name]
            elif chunk.client.errors:
                self._chunk_refused(chunk.name, chunk.client.errors[0])
            else:
                waiting.append(chunk)
        self.sent = waiting

    def _refused_as_not_finite(self, chunk: SentChunk) -> None:
        """The session is as before the chunk."""
        self.errors["not_finite"] += 1
        self.reported.discard(chunk.name)

    def _chunk_refused(self, name: str, error: ServiceError) -> None:
        if isinstance(error, SessionExpired):
            assert name not in self.reported, "an end is reported once"
        if isinstance(error, SessionLost | SessionExpired):
            self.reported.add(name)
        self._count_refusal(name, error)

    def _count_refusal(self, name: str, error: ServiceError) -> None:
        """Count the error of a chunk or of a question. A question does not consume the error for the next chunk."""
        self.errors[error.code] += 1
        if isinstance(error, SessionLost | SessionExpired):
            self.accounts.pop(name, None)
        elif isinstance(error, UnknownSession):
            assert name not in self.accounts

    def check(self) -> None:
        """Check that every used slot belongs to one state handle, and every journal record has exactly one use."""
        states, table = self.harness.states, self.harness.batcher.sessions._table
        for key, slots in states._models.items():
            free = slots.free.free().tolist()
            used = set(range(FIRST_SLOT, FIRST_SLOT + slots.free.used + len(free))) - set(free)
            assert len(set(free)) == len(free) and len(used) == slots.free.used
            running = [running.batch for running in self.harness.batcher._runs._running.values() if running.batch.model == key]
            writes = [slot for batch in running if batch.write_slots is not None for slot in batch.write_slots.tolist()]
            held = [*states.slots.tolist(), *states._begun.values(), *writes]
            assert used <= set(held)
            assert all(slots.holders[slot] != NO_HANDLE for slot in used) and (slots.holders[free] == NO_HANDLE).all()
        open_handles = [session.handle for session in table._open.values()]
        assert len(set(open_handles)) == len(open_handles) <= MOST_SESSIONS
        assert not set(open_handles) & {*states._free_handles, *states._closing}
        records = [session.record for session in table._open.values()]
        records += [ended.record for ended in table._ended.values()] + table._free_records
        assert sorted(records) == list(range(self.journal.records))

    def finish(self) -> None:
        """Run everything to its end. After all sessions have expired no slot is used."""
        for _ in range(1000):
            self.end_of_batch()
            if self.harness.batcher.idle and not self.engine.busy:
                break
        self.check_answers()
        assert not self.sent, "every chunk has a reply"
        assert all(client.replies == (0 if client.disconnected else 1) for client in self.harness.clients)
        for client in self.harness.clients:
            if client in self.single and client.answers:
                assert client.sums == client.expected
        self.time_passes(IDLE_SECONDS)
        self.check()
        for slots in self.harness.states._models.values():
            assert (slots.free.used, slots.busy, slots.writing, slots.behind) == (0, 0, 0, 0)
        assert len(self.harness.states._free_handles) == len(self.harness.states.pending)
        assert len(self.harness.batcher.sessions._table) == 0


def any_event(story: Story, chance: random.Random) -> None:
    """Cause a random event, with probabilities that keep stories long."""
    name = chance.choice(NAMES)
    values = [chance.choice((1, 2, 3))] * chance.choice((1, 2, 5, 20, 40))
    if chance.random() < 0.03:
        values[-1] = POISON
    match chance.choices(range(9), (30, 8, 20, 30, 3, 6, 2, 4, 0.3))[0]:
        case 0:
            ends = chance.random() < 0.2
            if chance.random() < 0.03:
                values[-1] = OVERFLOW
            starts = chance.choices((None, True, False), (8, 1, 1))[0]
            story.chunk(name, values, starts, ends, chance.choice((1e9, 1e9, 30.0, 90.0)))
        case 1:
            story.request(values, chance.choice((MODEL, OTHER)))
        case 2:
            story.step()
        case 3:
            story.end_of_batch()
        case 4:
            story.time_passes(chance.choice((0.5, 20.0, IDLE_SECONDS)))
        case 5:
            story.disconnect(chance.randrange(100))
        case 6:
            story.delete(name)
        case 7:
            story.export(name) if chance.random() < 0.5 else story.adopt(name, chance.randrange(100))
        case _:
            story.engine_ends()


def tell_story(seed: int, events: int) -> None:
    """Run random events and check the state after each. An error names the seed."""
    story, chance = Story(), random.Random(seed)
    try:
        for _ in range(events):
            any_event(story, chance)
            story.check()
        story.finish()
    except BaseException as fault:
        fault.add_note(f"in the story of seed {seed}")
        raise
    finally:
        story.close()
