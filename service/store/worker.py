"""The loop of the store process: passes changes of the engines to the store in batches, and notes of other replicas to the engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from service.errors import EngineLost, ServiceError
from service.ipc.async_channel import AsyncChannel
from service.ipc.channel import Channel, Frame, encode
from service.ipc.messages.inference import EngineStatus
from service.ipc.messages.message import Message
from service.ipc.messages.store import (
    DropSession,
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
from service.ipc.rpc import Rpc
from service.ipc.session_placement import engine_of_session
from service.log import Log
from service.metrics import Metrics
from service.store.queue import ChangeQueue, Queued
from service.store.records import (
    INBOX_WAIT_SECONDS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    Change,
    NoteKind,
    Result,
    Store,
    StoreFailed,
    TakenSession,
)

PATIENCE_SECONDS = 4.0
"""How long a chunk waits for a session of another replica: longer than the lease of a replica that has crashed."""
TAKE_AGAIN_SECONDS = 0.2
"""How often this replica tries again to take a session of another replica without a note from that replica."""
SWEEP_SECONDS = 60.0
ENGINE_SECONDS = 5.0
"""How long an engine may take to release a part of its sessions."""
FLUSHED_AT_ONCE = 1000
PAUSE_SECONDS = 0.01
"""Between two looks at the progress of a flush."""
UNSURE_SECONDS = 60.0
"""A release without a result is sent again for this long: the store may be away, or the record may be damaged."""
AWAY_SECONDS = 5.0
"""A flush ends if the store was away for this long."""


class Engine:
    """The channel to one engine."""

    def __init__(self, worker: StoreWorker, channel: Channel) -> None:
        self._worker = worker
        self._channel = AsyncChannel(channel, self._handle, self._lose)
        self.rpc = Rpc(self._channel.send, "an engine")
        self.place: int | None = None
        self.left = 1
        """How many sessions it still holds in a flush, as far as it has said."""

    def send(self, message: Message, tail: bytes = b"") -> None:
        """Send a message to the engine, unless it has ended."""
        if self._channel.open:
            self._channel.send(encode(message, tail=(tail,)))

    def _handle(self, frame: Frame) -> None:
        match frame.message:
            case EngineStatus(place=place):
                self.place = place
            case TakeSession() | SaveSession() | ReleaseSession() | DropSession() as message:
                self._worker.add(Change(message, bytes(frame.tail)), self)
            case _:
                self.rpc.handle_reply(frame)

    def _lose(self) -> None:
        self.rpc.close(EngineLost("the engine ended"))
        self._worker.lose(self)


class StoreWorker:
    """The only user of the store in this replica. It holds nothing that a restart of its process would lose: engines send again."""

    def __init__(self, store: Store, engine_count: int, metrics: Metrics, log: Log) -> None:
        self._store = store
        self._engine_count = engine_count
        self._metrics = metrics
        self._log = log
        self.engines: list[Engine] = []
        self._queue = ChangeQueue[Engine]()
        self._wake = asyncio.Event()
        self._waiting_takes: dict[str, Queued[Engine]] = {}
        """The sessions of other replicas that this replica waits for."""
        self._leased_since: float | None = None
        """Since when this replica has a lease without a gap. None: the store does not answer."""
        self._unsure: list[Queued[Engine]] = []
        """Releases without a result: they may have been made. They are sent again when the store answers."""
        self._flushing = self._ended = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take the lease of this replica, and begin to work."""
        await self._renew_once()
        for work in (self._run(), self._renew(), self._retry_takes(), self._read_inbox(), self._sweep()):
            self._start(work)

    def attach(self, channel: Channel) -> None:
        """Add an engine."""
        self.engines.append(Engine(self, channel))

    def lose(self, engine: Engine) -> None:
        """Forget an engine that has ended, and what it waits for."""
        self.engines.remove(engine)
        self._waiting_takes = {
            session: queued for session, queued in self._waiting_takes.items() if queued.sender is not engine
        }

    def add(self, change: Change, sender: Engine) -> None:
        """Make a change soon."""
        is_retried = isinstance(change.message, SaveSession) and change.message.again
        queued = Queued(change, sender, self._now(), is_retried)
        if isinstance(change.message, TakeSession):
            self._waiting_takes.pop(change.message.session, None)
        if self._leased_since is None or (self._flushing and isinstance(change.message, TakeSession)):
            self._reject(queued, StoreFailed("the session store does not answer"))
        else:
            self._add(queued)

    async def flush(self, seconds: float) -> None:
        """Save all sessions, let go of them, and end the lease of this replica. Takes no more sessions."""
        self._flushing = True
        begun = left = await self._left(0)
        until, give_up_at = self._now() + seconds, self._now() + AWAY_SECONDS
        while left and self._now() < min(until, give_up_at):
            if self._leased_since is not None:
                give_up_at = self._now() + AWAY_SECONDS
                if self._queue.waiting < FLUSHED_AT_ONCE:
                    left = await self._left(1 + FLUSHED_AT_ONCE // max(1, len(self.engines)))
            await asyncio.sleep(PAUSE_SECONDS)
        left = await self._left(0)
        self._metrics.sessions_not_saved.add(by=left)
        if begun:
            (self._log.warning if left else self._log.info)("sessions saved", sessions=begun - left, left=left)
        self._ended = True
        with suppress(StoreFailed):
            await asyncio.to_thread(self._store.end)

    async def _left(self, limit: int) -> int:
        """Release up to `limit` sessions of each engine. Returns how many are left in all engines."""
        for engine in list(self.engines):
            with suppress(ServiceError):  # it holds what it held before, unless it has ended
                reply, _ = await engine.rpc.call(ReleaseSessions(limit), SessionsLeft, timeout=ENGINE_SECONDS)
                engine.left = reply.sessions
        return sum(engine.left for engine in self.engines)

    # Changes.

    def _add(self, queued: Queued[Engine]) -> None:
        lost = self._queue.add(queued)
        if lost is queued:
            self._reject(queued, StoreFailed("too many states wait for the session store"))
        elif lost is not None:
            self._metrics.session_saves.add("skipped")
        if self._queue.waiting:
            self._wake.set()

    def _reject(self, queued: Queued[Engine], error: StoreFailed) -> None:
        """Tell the engine that its change was not tried."""
        message = queued.change.message
        if isinstance(message, SaveSession) and message.releases and not queued.is_retried:
            self._metrics.session_saves.add("failed")
            queued.sender.send(SaveEnded(message.session, message.ownership, owned=True, releases=True, failed=True))
        else:
            self._finish(queued, error)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._queue.next_batch()
            may_seize = self._leased_since is not None and self._now() - self._leased_since > LEASE_SECONDS
            changes = [queued.change for queued in batch]
            results = await asyncio.to_thread(self._store.apply, changes, may_seize=may_seize)
            for queued, result in zip(batch, results, strict=True):
                self._finish(queued, result)
            if not self._queue.waiting:
                self._wake.clear()

    def _finish(self, queued: Queued[Engine], result: Result) -> None:
        """Tell the engine the result of its change."""
        if isinstance(result, StoreFailed) and self._leased_since is not None:
            self._log.capped("error", "session store failed", error=str(result))
        match queued.change.message:
            case TakeSession() as message:
                self._finish_take(
                    queued, message, result if isinstance(result, TakenSession) else TakenSession(TakeOutcome.AWAY)
                )
            case SaveSession() as message:
                self._finish_save(queued, message, result)

    def _finish_take(self, queued: Queued[Engine], message: TakeSession, taken: TakenSession) -> None:
        waited = self._now() - queued.since
        if taken.outcome is TakeOutcome.HELD and waited < PATIENCE_SECONDS and not self._flushing:
            self._waiting_takes[message.session] = queued
            return
        outcome = TakeOutcome.AWAY if taken.outcome is TakeOutcome.HELD else taken.outcome
        self._metrics.session_takes.add(outcome)
        if outcome is TakeOutcome.TAKEN:
            self._metrics.session_take_seconds.observe(waited)
        reply = SessionTaken(message.session, outcome, taken.begun, taken.exact, taken.ended)
        queued.sender.send(reply, taken.state)

    def _finish_save(self, queued: Queued[Engine], message: SaveSession, result: Result) -> None:
        failed = isinstance(result, StoreFailed)
        if failed and message.releases and self._now() - queued.since < UNSURE_SECONDS:
            self._unsure.append(queued._replace(is_retried=True))
            return
        outcome = "failed" if failed else "saved" if result else "refused"
        self._metrics.session_saves.add(outcome)
        if outcome == "saved":
            self._metrics.session_save_seconds.observe(self._now() - queued.since)
        if message.releases or message.anew or outcome == "refused":
            # A release that is sent again may have been made before: then another replica may have the session rightly.
            failed = failed and not queued.is_retried
            owned = failed or outcome == "saved" or queued.is_retried
            queued.sender.send(SaveEnded(message.session, message.ownership, owned, message.releases, failed))

    async def _retry_takes(self) -> None:
        """Try again to take sessions of other replicas: the lease of their owner may have ended."""
        while True:
            await asyncio.sleep(TAKE_AGAIN_SECONDS)
            for session in list(self._waiting_takes):
                self._take_again(session)

    def _take_again(self, session: str) -> None:
        queued = self._waiting_takes.pop(session, None)
        if queued is not None:
            self._add(queued)

    # Other replicas.

    async def _read_inbox(self) -> None:
        while True:
            try:
                notes = await asyncio.to_thread(self._store.read_inbox, INBOX_WAIT_SECONDS)
            except StoreFailed:
                await asyncio.sleep(RENEW_SECONDS)
                continue
            for kind, session in notes:
                match kind:
                    case NoteKind.RELEASED:
                        self._take_again(session)
                    case NoteKind.WANTED:
                        self._pass_on(SessionWanted(session))
                    case NoteKind.SEIZED:
                        self._pass_on(VerifySession(session))

    def _pass_on(self, message: SessionWanted | VerifySession) -> None:
        """Send a message to the engine of its session. Without that engine, the other replica asks again, or the session is lost."""
        place = engine_of_session(message.session, self._engine_count)
        for engine in self.engines:
            if engine.place == place:
                engine.send(message)

    # Time.

    async def _renew(self) -> None:
        while not self._ended:
            await self._renew_once()
            await asyncio.sleep(RENEW_SECONDS)

    async def _renew_once(self) -> None:
        try:
            had_lease = await asyncio.to_thread(self._store.renew)
        except StoreFailed as error:
            self._leased_since = None
            self._log.capped("error", "session store away", error=str(error))
            self._metrics.session_store_up.set(0)
            return
        if self._leased_since is None or not had_lease:
            self._leased_since = self._now()
        self._metrics.session_store_up.set(1)
        unsure, self._unsure = self._unsure, []
        for queued in unsure:
            self._add(queued)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._store.sweep)
            except StoreFailed as error:
                self._log.capped("error", "old sessions not removed", error=str(error))
            await asyncio.sleep(SWEEP_SECONDS)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """End the process after a bug in its work: the supervisor starts another, and the engines send again."""
        if not task.cancelled() and task.exception() is not None:
            self._log.error("bug", error=repr(task.exception()))
            os._exit(1)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
