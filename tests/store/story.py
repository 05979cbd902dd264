"""Replicas with real batchers over one real store, in which anything happens at any time. The time is the story's.

Replicas stop, continue, crash and end in order; engines and store processes crash; the store goes away and returns. Clients send the chunks
of their sessions to any replica, lose replies and send chunks again, and begin and end sessions. A client checks every answer against the
values that it has sent.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from service.errors import ServiceError, SessionConflict, SessionExpired, SessionLost, SessionUnreachable, UnknownSession
from service.ipc.messages.message import Message
from service.ipc.messages.store import (
    SaveEnded,
    SaveSession,
    SessionTaken,
    SessionWanted,
    TakeOutcome,
    TakeSession,
    VerifySession,
)
from service.ipc.session_journal import SessionJournal
from service.store.folder import FolderStore
from service.store.records import LEASE_SECONDS, Change, NoteKind, Result, StoreFailed, TakenSession
from tests.engine.batching.harness import BatcherHarness, FakeClient

NAMES = ("a", "b")
REPLICAS = 3
CHECKPOINT_CHUNKS = 2
STEPS = 3
"""Most steps of a chunk."""
AHEAD_SECONDS = 3600.0


class TimedStore(FolderStore):
    """A store whose leases follow the time of a story, and which can be away."""

    def __init__(self, folder: Path, replica: str, story: Story) -> None:
        super().__init__(folder, replica, 3600.0)
        self._story = story

    def renew(self) -> bool:
        had = self._is_alive(self._replica)
        self._story.leases[self._replica] = self._story.now
        return had

    def _is_alive(self, replica: str) -> bool:
        return self._story.now - self._story.leases.get(replica, -LEASE_SECONDS) < LEASE_SECONDS


class Replica:
    """One process after another at one address. `local` has the messages between its engine and its store process."""

    def __init__(self, place: int, generation: int, story: Story) -> None:
        self.id, self.place = f"{generation:03d}-{place}", place
        self.story = story
        self.running, self.flushes = True, False
        self.store = TimedStore(story.folder, self.id, story)
        self.journal = SessionJournal(32)
        self.leased_since: float | None = None
        self.start_engine()
        self.renew()

    def start_engine(self) -> None:
        """Start an engine, the first or the successor of one that crashed."""
        self.harness = BatcherHarness(checkpoint_chunks=CHECKPOINT_CHUNKS, max_sessions=16, journal=self.journal)
        self.set_clock()
        self.local: deque[tuple[Message, bytes]] = deque()
        self.answers: deque[tuple[Message, bytes]] = deque()
        self.held: dict[str, TakeSession] = {}
        self.unsure: list[Change] = []
        """Releases whose result was lost. They may have been made."""
        assert self.harness.stored is not None
        self.stored = self.harness.stored
        self._attach()

    def _attach(self) -> None:
        self.stored.attach(lambda message, tail: self.local.append((message, bytes(tail))))

    def crash_store_process(self) -> None:
        """Lose what the store process has, after it made some changes whose results it did not report."""
        for _ in range(self.story.chance.randint(0, len(self.local))):
            self.pass_change()
        for waiting in (self.local, self.answers, self.held, self.unsure):
            waiting.clear()
        self.leased_since = None
        self.stored.detach()
        self._attach()
        self.renew()

    def renew(self) -> None:
        if self.story.away:
            self.leased_since = None
            return
        if not self.store.renew() or self.leased_since is None:
            self.leased_since = self.story.now
        unsure, self.unsure = self.unsure, []
        for change in unsure:
            self.store.apply([change], may_seize=False)
            self._save_ended(change, True)

    def pass_change(self) -> None:
        """Make the oldest change of the engine."""
        if self.local:
            message, state = self.local.popleft()
            assert isinstance(message, TakeSession | SaveSession) or not state
            self._change(Change(message, state))  # type: ignore[arg-type]

    def _change(self, change: Change) -> None:
        may_seize = self.leased_since is not None and self.story.now - self.leased_since > LEASE_SECONDS
        not_made = isinstance(change.message, SaveSession) and change.message.releases and self.story.chance.random() < 0.05
        flushes = self.flushes and isinstance(change.message, TakeSession)
        if self.story.away or not_made or flushes:
            result: Result = StoreFailed("away")
        else:
            [result] = self.store.apply([change], may_seize=may_seize)
        match change.message:
            case TakeSession() as message:
                taken = result if isinstance(result, TakenSession) else TakenSession(TakeOutcome.AWAY)
                self.story.counts[taken.outcome] += 1
                if taken.outcome is TakeOutcome.HELD:
                    self.held[message.session] = message
                    return
                reply = SessionTaken(message.session, taken.outcome, taken.begun, taken.exact, taken.ended)
                self.answers.append((reply, taken.state))
            case SaveSession(releases=True) if not self.story.away and self.story.chance.random() < 0.1:
                self.unsure.append(change)
                self.story.counts["lost results"] += 1
            case SaveSession():
                self._save_ended(change, result)

    def _save_ended(self, change: Change, result: Result) -> None:
        message = change.message
        assert isinstance(message, SaveSession)
        failed = isinstance(result, StoreFailed)
        if message.releases or message.anew or not (failed or result):
            ended = SaveEnded(message.session, message.ownership, failed or bool(result), message.releases, failed)
            self.answers.append((ended, b""))

    def pass_answer(self) -> None:
        """Deliver the oldest message to the engine."""
        if self.answers:
            self.stored.handle(*self.answers.popleft())

    def read_notes(self) -> None:
        if not self.story.away:
            for kind, session in self.store.read_inbox(0.0):
                if kind is not NoteKind.RELEASED:
                    self.answers.append(((SessionWanted if kind is NoteKind.WANTED else VerifySession)(session), b""))

    def take_again(self) -> None:
        held, self.held = self.held, {}
        for message in held.values():
            self._change(Change(message))

    def step(self) -> None:
        """Run a batch, and all work that is due."""
        self.set_clock()
        self.harness.batcher.step()

    def set_clock(self) -> None:
        """Set the clock of this host. The clocks of the hosts are hours apart."""
        self.harness.now = self.story.now + AHEAD_SECONDS * self.place

    def everything(self) -> None:
        """Do all that is due."""
        if not self.running:
            return
        self.renew()
        self.read_notes()
        self.take_again()
        while self.local or self.answers:
            self.pass_change()
            self.pass_answer()
        self.step()


@dataclass
class Client:
    """A client and the values of its session. known: how many of them were answered. sent: a chunk without a reply, and its replica.

    ends: whether that is the last chunk of its session. told: an error has said how many steps are left. healed: a chunk was answered
    after everything had healed.
    """

    values: list[int] = field(default_factory=list)
    known: int = 0
    open: bool = False
    sent: FakeClient | None = None
    replica: Replica | None = None
    starts: bool = False
    ends: bool = False
    told: bool = False
    healed: bool = False


@dataclass
class Story:
    """The replicas, the store and the clients. `counts` counts the events.

    gentle: replicas only end in order, and nothing fails. connected: replicas reach the store at any time. Then every session has other
    values, and half of the chunks do not name the steps before them. Otherwise an earlier copy of a session could answer.
    """

    folder: Path
    chance: random.Random
    gentle: bool = False
    connected: bool = False
    now: float = 100.0
    away: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    leases: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generation, self.heals = 0, False
        self.replicas = [Replica(place, 0, self) for place in range(REPLICAS)]
        self.clients = {name: Client() for name in NAMES}

    # Clients.

    def chunk(self, name: str) -> None:
        """Send the next chunk of a session, to any replica that runs."""
        client, replica = self.clients[name], self.chance.choice(self.replicas)
        if client.sent is not None or not replica.running:
            return
        client.starts = not client.open or self.chance.random() < 0.03
        client.ends = not self.heals and self.chance.random() < 0.05
        if client.starts:
            client.known, client.values = 0, [] if self.connected else client.values
        size = self.chance.randint(1, STEPS)
        while len(client.values) < client.known + size:
            client.values.append(self.chance.randint(1, 9))
        chunk = client.values[client.known : client.known + size]
        names_steps = not client.starts and (client.told or not self.connected or self.chance.random() < 0.5)
        replica.set_clock()
        client.replica, client.told = replica, False
        client.sent = replica.harness.call(
            chunk, session=name, starts=client.starts or None, ends=client.ends, at=client.known if names_steps else None
        )

    def lose_reply(self, name: str) -> None:
        """The client stops waiting for a reply. With steps, it sends the chunk again later."""
        client = self.clients[name]
        if client.sent is not None and client.replica is not None and not client.sent.replies:
            client.replica.harness.disconnect(client.sent)
            self._forget_chunk(client)
            self.counts["lost replies"] += 1

    def _forget_chunk(self, client: Client) -> None:
        client.sent = None
        client.open = client.open and not (client.starts or client.ends or self.connected)

    def read_replies(self) -> None:
        for client in self.clients.values():
            if client.sent is not None and client.sent.replies:
                sent, client.sent = client.sent, None
                if sent.errors:
                    self._refused(client, sent.errors[0])
                else:
                    self._answered(client, sent)

    def _answered(self, client: Client, sent: FakeClient) -> None:
        [(answer, _)] = sent.answers
        client.known, client.open = client.known + len(sent.sequences[0]), not client.ends
        assert answer.session_steps == client.known
        assert sent.sums == [float(sum(client.values[: client.known]))], "the sum of all values so far"
        client.healed = self.heals
        self.counts["answers"] += 1

    def _refused(self, client: Client, error: ServiceError) -> None:
        self.counts[error.code] += 1
        if isinstance(error, SessionConflict | SessionLost) and error.steps:
            assert error.steps <= len(client.values), "a state of this session"
            client.known, client.told = error.steps, True
        elif isinstance(error, SessionLost | SessionExpired | UnknownSession | SessionConflict):
            client.open = False
        else:
            assert isinstance(error, SessionUnreachable), error

    # Events.

    def crash(self, place: int) -> None:
        """End all processes of a replica. Another begins at its address."""
        self.generation += 1
        self._lose_requests(self.replicas[place])
        self.replicas[place] = Replica(place, self.generation, self)

    def crash_engine(self, place: int) -> None:
        if self.replicas[place].running:
            self._lose_requests(self.replicas[place])
            self.replicas[place].start_engine()

    def end(self, place: int) -> None:
        """End a replica in order: it answers what it can, saves its sessions and lets go of them."""
        replica = self.replicas[place]
        if not replica.running or self.away:
            return
        for _ in range(5):
            replica.everything()
            self.read_replies()
        for client in self.clients.values():
            if client.replica is replica and client.sent is not None:
                replica.harness.disconnect(client.sent)  # the frontends end first
        self._lose_requests(replica)
        replica.flushes = True
        for _ in range(20):
            replica.everything()
            self.read_replies()
            if not replica.stored.release_some(8):
                break
        else:
            raise AssertionError("sessions are left")
        self.leases.pop(replica.id)
        self.crash(place)

    def _lose_requests(self, replica: Replica) -> None:
        for client in self.clients.values():
            if client.replica is replica and client.sent is not None:
                self._forget_chunk(client)

    def any_event(self) -> None:
        """Cause a random event."""
        name, place = self.chance.choice(NAMES), self.chance.randrange(REPLICAS)
        replica = self.replicas[place]
        is_apart = 0 if self.gentle or self.connected else 1
        faults = (3 * is_apart, 0 if self.gentle else 1, 0 if self.gentle else 1, is_apart, 0 if self.gentle else 1)
        match self.chance.choices(range(11), (30, 30, 30, 5, *faults, 1, 12))[0]:
            case 0:
                self.chunk(name)
            case 1 if replica.running:
                self.chance.choice((replica.pass_change, replica.pass_answer, replica.step))()
            case 2 if replica.running:
                self.chance.choice((replica.read_notes, replica.take_again, replica.renew))()
            case 3:
                self.lose_reply(name)
            case 4:
                replica.running = not replica.running
                self.counts["stops"] += 1
            case 5:
                self.crash(place)
                self.counts["crashes"] += 1
            case 6:
                self.crash_engine(place)
                self.counts["engine crashes"] += 1
            case 7:
                self.away = not self.away
                self.counts["away"] += 1
            case 8:
                if replica.running:
                    replica.crash_store_process()
                    self.counts["store process crashes"] += 1
            case 9:
                self.end(place)
                self.counts["ends"] += 1
            case _:
                self.now += self.chance.choice((0.01, 0.1) if self.gentle else (0.01, 0.1, 0.4, 0.4, 1.0))
                for other in self.replicas:
                    if self.connected:
                        other.everything()
                    elif other.running and (self.gentle or self.chance.random() < 0.8):
                        other.renew()
        self.read_replies()

    def finish(self) -> None:
        """Everything heals: then each session is served again, and no work waits."""
        self.away, self.heals = False, True
        for replica in self.replicas:
            replica.running = True
        for round in range(90):
            for name in NAMES if 30 < round < 60 else ():
                self.chunk(name)
            for replica in self.replicas:
                replica.everything()
            self.read_replies()
            self.now += 0.3
        assert all(client.healed and client.sent is None for client in self.clients.values())
        assert not any(replica.stored._waiting or replica.stored._departing for replica in self.replicas)
