"""Replicas with real batchers and real mover protocols over a simulated network that loses, delays and repeats messages.

Replicas stop, continue, crash and start again, and learn of each other late. Clients send chunks to any replica, in sequence for each
session, lose replies and send chunks again. Every answer is checked against the client's own account of its session, and two replicas may
never serve the same session at once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from service.errors import ServiceError, SessionConflict, SessionExpired, SessionLost, SessionUnreachable, UnknownSession
from service.ipc.messages import Message
from service.mover.protocol import MoverProtocol
from tests.engine.batching.harness import PATIENCE_SECONDS, BatcherHarness, FakeClient

NAMES = ("a", "b")
REPLICAS = 3
MAX_IN_FLIGHT = 24
"""Further messages are lost."""


@dataclass
class Packet:
    """A message on its way between two replicas."""

    sender: str
    receiver: str
    message: Message
    tail: bytes


@dataclass
class SentChunk:
    """A chunk without a reply."""

    client: FakeClient
    replica: Replica
    values: Sequence[int]
    starts: bool
    at: int | None


@dataclass
class Account:
    """A client's knowledge of its session. unsure: the values of a chunk that may or may not have been applied."""

    sum: float = 0.0
    steps: int = 0
    open: bool = False
    unsure: Sequence[int] = ()
    sent: SentChunk | None = None


class Replica:
    """One process after another at one address. `local` has the messages between its engine and its mover."""

    def __init__(self, place: int, generation: int, story: Story) -> None:
        self.place = place
        self.id = f"{generation:03d}-{place}"
        self.story = story
        self.running = True
        self.alive = True
        self.harness = BatcherHarness(replica=self.id, max_sessions=8)
        self.harness.now = story.now
        self.local: deque[tuple[bool, Message, bytes]] = deque()
        """Whether it goes to the engine, the message and its trailing bytes."""
        self.mover = MoverProtocol(self.id, self._to_engine, self._to_peer, PATIENCE_SECONDS)
        assert self.harness.transfers is not None
        self.transfers = self.harness.transfers
        self.transfers.attach(lambda message, tail: self.local.append((False, message, bytes(tail))))
        self.knows: dict[int, str] = {}
        """The id at each address, as far as this replica knows it."""
        self.gone: set[str] = set()

    def _to_engine(self, session: str, message: Message, tail: bytes | memoryview) -> None:
        self.local.append((True, message, bytes(tail)))

    def _to_peer(self, peer: str, message: Message, tail: bytes | memoryview) -> None:
        self.story.send(Packet(self.id, peer, message, bytes(tail)))

    def pass_local(self) -> None:
        """Deliver the oldest message between the engine and the mover."""
        if self.local and self.active:
            to_engine, message, tail = self.local.popleft()
            if to_engine:
                self.transfers.handle(message, tail)
            else:
                self.mover.from_engine(message, tail, self.story.now)

    @property
    def active(self) -> bool:
        return self.running and self.alive

    def step(self) -> None:
        """Run a batch, and all work that is due."""
        if self.active:
            self.harness.now = self.story.now
            self.harness.batcher.step()
            self.mover.tick(self.story.now)

    def serves(self, session: str) -> bool:
        """Return whether a chunk of a session would be answered here without a question to another replica."""
        return (
            self.alive
            and self.harness.batcher.sessions._table.find(session) is not None
            and session not in self.transfers._moves.departures
        )


@dataclass
class Story:
    """The replicas, the network and the clients. `counts` counts the events."""

    now: float = 100.0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.generation = 0
        self.network: list[Packet] = []
        self.accounts = {name: Account() for name in NAMES}
        self.cut: set[tuple[int, int]] = set()
        """Pairs of addresses, the smaller first, between which nothing passes."""
        self.replicas: list[Replica] = []
        for place in range(REPLICAS):
            self.replicas.append(Replica(place, 0, self))
        for replica in self.replicas:
            self.learn_all(replica)

    # The network.

    def send(self, packet: Packet) -> None:
        if len(self.network) < MAX_IN_FLIGHT:
            self.network.append(packet)

    def deliver(self, which: int, *, keep: bool = False) -> None:
        """Deliver any message. keep: it will be delivered again."""
        if not self.network:
            return
        index = which % len(self.network)
        packet = self.network[index] if keep else self.network.pop(index)
        for replica in self.replicas:
            if replica.id == packet.receiver and replica.active and packet.sender not in replica.gone:
                self.counts[type(packet.message).__name__] += 1
                replica.mover.from_peer(packet.sender, packet.message, packet.tail, self.now)
        self.check()

    def lose(self, which: int) -> None:
        if self.network:
            self.network.pop(which % len(self.network))

    def learn(self, replica: Replica, place: int) -> None:
        """A replica learns which process is at an address, and that process learns of the replica, as over a connection."""
        other = self.replicas[place]
        if replica is other or not replica.active or not self._connected(replica, other):
            return
        if not other.alive:
            self._note(replica, place, "")
        elif other.running:
            self._note(replica, place, other.id)
            self._note(other, replica.place, replica.id)
        self._update(other)
        self._update(replica)

    def learn_all(self, replica: Replica) -> None:
        for place in range(REPLICAS):
            self.learn(replica, place)

    def _note(self, replica: Replica, place: int, id: str) -> None:
        before = replica.knows.get(place)
        if before and before != id:
            replica.gone.add(before)
        replica.knows[place] = id

    def _update(self, replica: Replica) -> None:
        """Tell a mover which replicas there are."""
        if not replica.active:
            return
        reachable = {
            id
            for place, id in replica.knows.items()
            if id and (other := self.replicas[place]).id == id and other.active and self._connected(replica, other)
        }
        known = {id for id in replica.knows.values() if id}
        complete = len(replica.knows) == REPLICAS - 1
        replica.mover.peers_changed(reachable, known, replica.gone, complete=complete, now=self.now)

    def _connected(self, one: Replica, other: Replica) -> bool:
        first, second = sorted((one.place, other.place))
        return (first, second) not in self.cut

    def toggle_cut(self, one: int, other: int) -> None:
        if one != other:
            self.cut ^= {(min(one, other), max(one, other))}
            for replica in self.replicas:
                self._update(replica)

    # Replicas.

    def toggle_pause(self, place: int) -> None:
        self.replicas[place].running = not self.replicas[place].running
        self.counts["pauses"] += 1
        for replica in self.replicas:
            self._update(replica)

    def crash(self, place: int) -> None:
        """End a process. Another process begins at its address; the other replicas learn of it later."""
        old = self.replicas[place]
        old.alive = False
        self.generation += 1
        self.counts["crashes"] += 1
        for account in self.accounts.values():
            if account.sent is not None and account.sent.replica is old:
                self._lose_reply(account)
        self.replicas[place] = Replica(place, self.generation, self)
        for replica in self.replicas:
            self._update(replica)

    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for replica in self.replicas:
            replica.step()
        self.check()

    # Clients.

    def chunk(self, name: str, place: int, values: Sequence[int], *, says_steps: bool, restarts: bool = False) -> None:
        """Send the next chunk of a session, or repeat the chunk about which the client is unsure."""
        account, replica = self.accounts[name], self.replicas[place]
        if account.sent is not None:
            return
        starts = restarts or not account.open
        if account.unsure and not starts:
            values, says_steps = account.unsure, True
        if starts:
            account.unsure = ()
        at = account.steps if says_steps and not starts else None
        replica.harness.now = max(replica.harness.now, self.now if replica.running else 0.0)
        client = replica.harness.call(values, session=name, starts=starts, at=at)
        account.sent = SentChunk(client, replica, values, starts, at)
        self.check()

    def give_up(self, name: str) -> None:
        """A client disconnects."""
        account = self.accounts[name]
        if account.sent is not None and not account.sent.client.replies:
            account.sent.replica.harness.disconnect(account.sent.client)
            self._lose_reply(account)

    def _lose_reply(self, account: Account) -> None:
        assert account.sent is not None
        sent, account.sent = account.sent, None
        if sent.starts:
            account.open = False  # it may or may not have begun: the client begins again
        else:
            account.unsure = sent.values
        self.counts["lost replies"] += 1

    def lose_reply(self, name: str) -> None:
        """The reply to a chunk is lost on its way, or the client has stopped waiting for it."""
        account = self.accounts[name]
        if account.sent is not None and account.sent.replica.active:
            if account.sent.at is None:
                # Without its steps, a chunk that still waits could be applied after its own repetition.
                account.sent.replica.harness.disconnect(account.sent.client)
            self._lose_reply(account)

    # Checks.

    def check(self) -> None:
        for name, account in self.accounts.items():
            serving = [replica.id for replica in self.replicas if replica.serves(name)]
            assert len(serving) <= 1, f"{serving} serve {name}"
            if account.sent is not None and account.sent.client.replies:
                self._take_reply(name, account)

    def _take_reply(self, name: str, account: Account) -> None:
        assert account.sent is not None
        sent, account.sent = account.sent, None
        if sent.client.errors:
            self._refused(account, sent, sent.client.errors[0])
            return
        if sent.starts:
            account.sum, account.steps = 0.0, 0
        account.sum += sum(sent.values)
        account.steps += len(sent.values)
        account.open, account.unsure = True, ()
        assert sent.client.sums == [account.sum], f"{name} at {sent.replica.id}"
        assert sent.client.answers[0][0].session_steps == account.steps
        self.counts["answers"] += 1

    def _refused(self, account: Account, sent: SentChunk, error: ServiceError) -> None:
        self.counts[error.code] += 1
        if isinstance(error, SessionConflict):
            assert sent.at is not None, "only a chunk that names its steps finds another number"
            assert account.unsure and error.steps == account.steps + len(account.unsure)
            account.sum += sum(account.unsure)
            account.steps += len(account.unsure)
            account.unsure = ()
        elif isinstance(error, SessionLost | SessionExpired | UnknownSession):
            assert self.counts["crashes"] or isinstance(error, SessionExpired), f"{error.code} without a crash"
            account.open, account.unsure = False, ()
        else:
            assert isinstance(error, SessionUnreachable), error

    def finish(self) -> None:
        """Everything heals: then each session is served again, and no work waits."""
        self.cut.clear()
        for replica in self.replicas:
            replica.running = True
        for _ in range(40):
            for replica in self.replicas:
                self.learn_all(replica)
            for _ in range(200):
                self.deliver(0)
                for replica in self.replicas:
                    replica.pass_local()
                    replica.step()
            self.time_passes(0.1)
        assert not any(replica.transfers._waiting or replica.transfers._moves.departures for replica in self.replicas)
        for name, account in self.accounts.items():
            assert account.sent is None
            for _ in range(6):
                self.chunk(name, random.randrange(REPLICAS), [1], says_steps=True)
                for _ in range(100):
                    self.deliver(0)
                    for replica in self.replicas:
                        replica.pass_local()
                        replica.step()
                    self.time_passes(0.001)
            assert account.open and account.sent is None, f"{name} is served again"


def any_event(story: Story, chance: random.Random) -> None:
    """Cause a random event."""
    name, place = chance.choice(NAMES), chance.randrange(REPLICAS)
    which = chance.randrange(1 << 16)
    match chance.choices(range(12), (16, 16, 1, 1, 22, 12, 5, 1.5, 0.6, 0.5, 7, 3))[0]:
        case 0:
            values = [chance.choice((1, 2, 3))] * chance.choice((1, 2, 3))
            story.chunk(name, place, values, says_steps=chance.random() < 0.5, restarts=chance.random() < 0.05)
        case 1:
            story.deliver(which)
        case 2:
            story.deliver(which, keep=True)
        case 3:
            story.lose(which)
        case 4:
            story.replicas[place].pass_local()
            story.check()
        case 5:
            story.replicas[place].step()
            story.check()
        case 6:
            story.time_passes(chance.choice((0.001, 0.01, 0.02, 0.1, 0.4)))
        case 7:
            story.toggle_pause(place)
        case 8:
            story.toggle_cut(place, chance.randrange(REPLICAS))
        case 9:
            story.crash(place)
        case 10:
            story.give_up(name) if chance.random() < 0.5 else story.lose_reply(name)
        case _:
            story.learn(story.replicas[place], chance.randrange(REPLICAS))
