"""The loop between engines and the store: lost results, refused work, and the order of changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from service.ipc.messages.message import Message
from service.ipc.messages.store import (
    ReleaseSession,
    ReleaseSessions,
    SaveEnded,
    SaveSession,
    SessionsLeft,
    SessionTaken,
    SessionWanted,
    TakeOutcome,
    TakeSession,
    VerifySession,
)
from service.ipc.session_placement import engine_of_session
from service.log import Log
from service.metrics import Metrics
from service.store import queue
from service.store.queue import ChangeQueue, Queued
from service.store.records import Change, Note, NoteKind, Result, StoreFailed, TakenSession
from service.store.worker import StoreWorker

LIMIT_SECONDS = 60.0
RELEASE = Change(SaveSession("s", 1, 5, exact=True, releases=True), b"state")


class FakeStore:
    """Answers each change with the next of `results`, then with `True`."""

    def __init__(self, *results: Result) -> None:
        self.results = list(results)
        self.applied: list[Message] = []
        self.notes: list[Note] = []
        self.away = False

    def apply(self, changes: Sequence[Change], *, may_seize: bool) -> list[Result]:
        self.applied += [change.message for change in changes]
        return [self.results.pop(0) if self.results else True for _ in changes]

    def renew(self) -> bool:
        if self.away:
            raise StoreFailed("away")
        return True

    def read_inbox(self, seconds: float) -> list[Note]:
        time.sleep(0.01)
        notes, self.notes = self.notes, []
        return notes

    def sweep(self) -> None: ...

    def end(self) -> None: ...


class FakeEngine:
    """Keeps what the worker sends."""

    def __init__(self, place: int = 0) -> None:
        self.place = place
        self.received: list[Message] = []

    def send(self, message: Message, tail: bytes = b"") -> None:
        self.received.append(message)


def run(store: FakeStore, act: Callable[[StoreWorker, Any], None], replies: int) -> list[Message]:
    """Run a worker of two engines until the first has this many replies. Returns them."""

    async def work() -> list[Message]:
        worker, engine = StoreWorker(store, 2, Metrics(), Log("store")), FakeEngine()
        await worker.start()
        act(worker, engine)
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(engine.received) < replies:
                await asyncio.sleep(0.01)
        return engine.received

    return asyncio.run(work())


def test_release_without_a_result_is_sent_again() -> None:
    """It may have been made: then it is refused, and the session is another replica's."""
    store = FakeStore(StoreFailed("timeout"), StoreFailed("timeout"), False)
    [reply] = run(store, lambda worker, engine: worker.add(RELEASE, engine), 1)
    assert reply == SaveEnded("s", 1, owned=True, releases=True)
    assert store.applied == [RELEASE.message] * 3


def test_work_is_refused_at_once_while_the_store_is_away() -> None:
    store = FakeStore()
    store.away = True

    def act(worker: StoreWorker, engine: Any) -> None:
        worker.add(RELEASE, engine)
        worker.add(Change(TakeSession("t", 1, 5, begins=True)), engine)

    assert run(store, act, 2) == [
        SaveEnded("s", 1, owned=True, releases=True, failed=True),
        SessionTaken("t", TakeOutcome.AWAY),
    ]
    assert store.applied == []


def test_refused_save_is_reported() -> None:
    store = FakeStore(False)
    [reply] = run(store, lambda worker, engine: worker.add(Change(SaveSession("s", 1, 5), b"state"), engine), 1)
    assert reply == SaveEnded("s", 1, owned=False, releases=False)


def test_take_of_a_held_session_is_tried_again() -> None:
    store = FakeStore(TakenSession(TakeOutcome.HELD), TakenSession(TakeOutcome.HELD), TakenSession(TakeOutcome.NEW))
    [reply] = run(store, lambda worker, engine: worker.add(Change(TakeSession("s", 1, 5, begins=True)), engine), 1)
    assert reply == SessionTaken("s", TakeOutcome.NEW)


def test_notes_go_to_the_engine_of_their_session() -> None:
    names = [str(number) for number in range(20)]
    store, other = FakeStore(), FakeEngine(1)
    store.notes = [Note(kind, name) for name in names for kind in (NoteKind.WANTED, NoteKind.SEIZED)]
    own = [name for name in names if engine_of_session(name, 2) == 0]

    def act(worker: StoreWorker, engine: Any) -> None:
        worker.engines += [engine, other]  # type: ignore[list-item]

    assert run(store, act, 2 * len(own)) == [message(name) for name in own for message in (SessionWanted, VerifySession)]
    assert other.received == [message(name) for name in names if name not in own for message in (SessionWanted, VerifySession)]


def test_sessions_that_an_ended_engine_waits_for_are_not_taken() -> None:
    store, ended = FakeStore(), FakeEngine(1)
    store.results = [
        TakenSession(TakeOutcome.HELD),
        TakenSession(TakeOutcome.HELD),
        TakenSession(TakeOutcome.NEW),
        TakenSession(TakeOutcome.NEW),
    ]

    def act(worker: StoreWorker, engine: Any) -> None:
        worker.engines += [engine, ended]  # type: ignore[list-item]
        worker.add(Change(TakeSession("s", 1, 5, begins=True)), engine)
        worker.add(Change(TakeSession("t", 1, 5, begins=True)), ended)  # type: ignore[arg-type]
        asyncio.get_running_loop().create_task(lose(worker))

    async def lose(worker: StoreWorker) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while worker._waiting_takes.keys() != {"s", "t"}:
                await asyncio.sleep(0)
        worker.lose(ended)  # type: ignore[arg-type]

    assert run(store, act, 1) == [SessionTaken("s", TakeOutcome.NEW)]
    assert not ended.received


class HoldingEngine(FakeEngine):
    """Has sessions, and releases the requested number of them."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.rpc, self.held, self.left = self, held, 0

    async def call(self, release: ReleaseSessions, *_: Any, **__: Any) -> tuple[SessionsLeft, bytes]:
        self.held -= min(release.limit, self.held)
        return SessionsLeft(self.held), b""


@pytest.mark.parametrize("away, left", [(False, 0), (True, 5)])
def test_sessions_are_flushed_while_the_store_answers(away: bool, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.store.worker.AWAY_SECONDS", 0.1)
    store, engine, metrics = FakeStore(), HoldingEngine(5), Metrics()
    store.away = away

    async def work() -> None:
        flushed = StoreWorker(store, 1, metrics, Log("store"))
        flushed.engines.append(engine)  # type: ignore[arg-type]
        await flushed.start()
        await flushed.flush(LIMIT_SECONDS)

    asyncio.run(work())
    assert engine.held == metrics.sessions_not_saved.values[()][0] == left


def test_bug_in_the_work_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor starts another. An error of the store is no bug."""

    class Broken(FakeStore):
        def sweep(self) -> None:
            raise RuntimeError("bug")

    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)

    async def work() -> None:
        worker = StoreWorker(Broken(), 1, Metrics(), Log("store"))
        await worker.start()
        async with asyncio.timeout(LIMIT_SECONDS):
            while not statuses:
                await asyncio.sleep(0.01)

    asyncio.run(work())
    assert statuses == [1]


def queued(change: Change) -> Queued[str]:
    return Queued(change, "engine", 0.0)


def test_changes_of_a_session_stay_in_order_and_urgent_ones_come_first() -> None:
    changes = ChangeQueue[str]()
    sent = [
        Change(SaveSession("a", 1, 5), b"old"),
        Change(SaveSession("a", 1, 5), b"new"),
        Change(SaveSession("b", 1, 5), b"b"),
        Change(TakeSession("c", 1, 5, begins=True)),
        Change(ReleaseSession("b")),
        Change(TakeSession("b", 1, 5, begins=True)),
    ]
    lost = [changes.add(queued(change)) for change in sent]
    assert [each and each.change.state for each in lost] == [None, b"old", None, None, None, None]
    assert [each.change for each in changes.next_batch()] == [sent[3], sent[2], sent[4], sent[5], sent[1]]
    assert not changes.waiting


def test_full_queue_keeps_the_older_state(monkeypatch: Any) -> None:
    monkeypatch.setattr(queue, "MAX_WAITING_BYTES", 4)
    changes = ChangeQueue[str]()
    assert changes.add(queued(Change(SaveSession("a", 1, 5), b"1234"))) is None
    refused = queued(Change(SaveSession("a", 1, 5), b"12345"))
    assert changes.add(refused) is refused
    assert [each.change.state for each in changes.next_batch()] == [b"1234"]
