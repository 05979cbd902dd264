"""The life of sessions: chunks start, continue and end them; clients export, import and close them; idle sessions expire.

`session_table` records which sessions are open, `state_cache` where their states are. This module keeps the two consistent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from service.engine.batching import session_state
from service.engine.batching.session_table import SessionTable
from service.engine.batching.state_cache import StateCache
from service.engine.batching.state_slots import ZERO_SLOT
from service.engine.batching.stored_sessions import StoredSessions
from service.engine.batching.ticket import RequestSequence, Session, Ticket
from service.engine.execution.device_engine import DeviceEngine
from service.errors import InvalidInput, Overloaded, ServiceError, SessionConflict, SessionLost
from service.ipc.messages.inference import Request
from service.ipc.messages.models import ModelKey
from service.ipc.messages.sessions import session_id
from service.ipc.session_file import SessionFile, StateOrigin, StoredTensor
from service.metrics import Metrics


class Sessions:
    """The sessions of one engine. `refuse` is the batcher's: it refuses a ticket and removes its sequences from the queue."""

    def __init__(
        self,
        engine: DeviceEngine,
        table: SessionTable,
        states: StateCache,
        metrics: Metrics,
        clock: Callable[[], float],
        refuse: Callable[[Ticket, ServiceError], None],
        stored: StoredSessions | None = None,
    ) -> None:
        """stored: None for a service without a session store."""
        self._engine = engine
        self._table = table
        self._states = states
        self._metrics = metrics
        self._clock = clock
        self._refuse = refuse
        self.stored = stored
        if stored is not None:
            stored.states = self
            table.on_close = stored.closed

    # Calls of clients.

    def export_state(self, id: str) -> bytes:
        """Return the state of a session as a safetensors file; raises ServiceError."""
        session = self._table.get(id)
        if session.chunks:
            raise SessionConflict(
                f"a chunk of session {session_id(id)!r} is still to run: wait for its answer", field="session"
            )
        if session.uncertain:
            raise _uncertain(session)
        return self.export(session)

    def export(self, session: Session) -> bytes:
        """Return the state of a session without a chunk that runs, as a session file."""
        state = self._states.read(session.location)
        assert state is not None, "a session without a chunk that runs has at least one answered chunk"
        return session_state.pack(state, self._origin(session.key, session.steps))

    def import_file(self, id: str, file: SessionFile, limit: int) -> Session:
        """Open a session with a state from the session store; raises ServiceError."""
        return self.import_state(id, file.origin, file.tensors, file.data, limit, stored=True)

    def import_state(
        self,
        id: str,
        origin: StateOrigin,
        tensors: Mapping[str, StoredTensor],
        data: bytes | memoryview,
        limit: int = 0,
        *,
        stored: bool = False,
    ) -> Session:
        """Open a session with an exported state; raises ServiceError.

        data: the bytes of the tensors. limit: as `SessionTable.open`. stored: the state comes from the session store, not from a client.
        """
        if self._table.find(id) is not None:
            raise SessionConflict(
                f"session {session_id(id)!r} is open: delete it first, or name another session", field="session"
            )
        key = self._engine.newest(origin.model, origin.version)
        if key is None or not self._engine.streams(key):
            raise SessionConflict(
                f"the state is from {origin.model!r} version {origin.version!r}, which has no sessions here",
                field="session",
            )
        session_state.check_origin(origin, self._origin(key, origin.steps))
        state = session_state.unpack(tensors, data, self._engine.save(key, ZERO_SLOT), trusted=stored)
        session = self._table.open(id, key, limit)
        session.location.on_host, session.steps = state, origin.steps
        self._table.rest(session, self._clock())
        if self.stored is not None and not stored:
            self.stored.adopt(session, self.stored.next_ownership())
        return session

    def model_of(self, id: str) -> ModelKey | None:
        """Return the model version of a session, None if it is not open."""
        session = self._table.find(id)
        return None if session is None else session.key

    def end(self, id: str) -> None:
        """End a session and refuse its waiting chunks; raises ServiceError if it is not open."""
        self._end(self._table.get(id), "deleted")

    # Chunks.

    def check(self, request: Request) -> None:
        """Validate a chunk; raises InvalidInput."""
        if len(request.lengths) != 1:
            raise InvalidInput(f"{len(request.lengths)} inputs for one session: send its chunks one by one", field="inputs")
        if not self._engine.streams(request.key):
            parts = self._engine.whole_only(request.key)
            raise InvalidInput(
                f"{request.model} has no sessions, because {' and '.join(parts)} need{'s' if len(parts) == 1 else ''} "
                "a whole sequence: leave session out, and the header x-session-id",
                field="session",
            )

    def check_elsewhere(self, request: Request, again: bool) -> None:
        """Raise the error for a chunk of a version that is not served, if its session ended (once) or belongs to another version."""
        id = request.session
        assert id is not None
        if again or self._table.end_reason(id) or (self._table.find(id) is not None and not request.session_starts):
            self._table.resume(request, again)

    def session_of(self, request: Request, again: bool) -> Session:
        """Return the session that a chunk starts or continues; raises ServiceError. again: another engine ended while it had the chunk."""
        id = request.session
        assert id is not None
        old = self._table.find(id)
        if old is None and not request.opens_session:
            self._table.resume(request, again)  # an error about its end is more precise
            raise Overloaded(
                "no session is opened while the memory limit of the service is nearly used up: retry later, "
                "or give the service more memory",
                field="session",
                retry_after=1,
            )
        if old is not None and request.session_starts and (old.ending or old.key != request.key):
            self._end(old, "restarted")
        elif (
            old is not None
            and old.uncertain
            and not old.chunks
            and not request.session_starts
            and request.session_at != old.steps
        ):
            raise _uncertain(old)
        session = self._table.resume(request, again)
        if session is None:
            session = self._table.open(id, request.key, request.session_limit)
        return session

    def append(self, session: Session, chunk: RequestSequence) -> None:
        """Add a queued chunk to its session. It is ready once every chunk before it has been answered."""
        if self.stored is not None:
            if session.ownership is None:
                session.ownership = self.stored.next_ownership()
            elif chunk.restarts:
                chunk.ownership = self.stored.next_ownership()
        chunk.ready = not session.chunks
        session.chunks.append(chunk)
        self._table.wake(session)

    def advance(self, session: Session, chunk: RequestSequence) -> None:
        """Keep the state of a chunk that has been answered."""
        if chunk.restarts and session.steps:
            self._metrics.sessions_ended.add("restarted")
        session.ownership = chunk.ownership or session.ownership
        session.steps, session.uncertain = chunk.session_steps, False
        session.chunks.popleft()
        if not chunk.keeps_state:
            self._states.release(chunk)
            self._states.discard(session.location)
            self._table.close(session, "ended")
        else:
            self._states.commit(chunk)
            if self.stored is not None:
                self.stored.answered(session)
            if session.chunks:
                session.chunks[0].ready = True
            else:
                self.rest(session)

    def skip(self, session: Session, chunk: RequestSequence) -> None:
        """Remove a chunk that will not run, and refuse the chunks that arrived after it."""
        if chunk not in session.chunks:
            return
        removed = list(session.chunks)[session.chunks.index(chunk) :]
        for _ in removed:
            session.chunks.pop()
        self._follow(session, removed)
        message = f"an earlier chunk of session {session_id(session.id)!r} was not run: send both again, in their order"
        for sequence in removed[1:]:
            self._refuse(sequence.ticket, SessionConflict(message, field="session"))
        self.leave(session)

    def leave(self, session: Session) -> None:
        """Let a session without chunks idle, or close it if none of its chunks was ever answered."""
        if session.chunks:
            return
        if session.steps:
            self.rest(session)
        else:
            self._table.close(session, "unbegun")

    def rest(self, session: Session) -> None:
        """Start the idle time of a session without chunks."""
        self._table.rest(session, self._clock())
        if self.stored is not None:
            self.stored.rested(session)

    # Ends that no client asked for.

    def expire(self) -> None:
        """End the sessions that were idle for too long."""
        for session in self._table.expire(self._clock()):
            self._states.discard(session.location)
        if self.stored is not None:
            self.stored.step()

    def unload(self, key: ModelKey) -> None:
        """End the sessions of a model version. Waiting chunks are refused; other clients get an error once, when they resume."""
        for session in self._table.of(key):
            self.lose(session, "unloaded")

    def lose(self, session: Session, reason: str) -> None:
        """End a session for a reason of UNREPORTED_ENDS. Its chunks are refused, or its client gets an error once, when it resumes."""
        if session.chunks:
            self._end(session, reason, SessionLost)
        else:
            self._states.discard(session.location)
            self._table.lose(session, reason)

    def let_go(self, session: Session) -> None:
        """Close a session that the session store has, so that another replica may continue it."""
        self._states.discard(session.location)
        self._table.close(session, "moved")

    def holds(self, key: ModelKey) -> bool:
        """Return whether a session of this model version is open."""
        return bool(self._table.of(key))

    def count(self) -> None:
        """Update the gauges."""
        self._metrics.sessions.set(len(self._table))
        self._states.count()

    def _end(self, session: Session, reason: str, kind: type[ServiceError] = SessionConflict) -> None:
        chunks, session.chunks = session.chunks, deque()
        self._follow(session, chunks)
        for chunk in chunks:
            message = f"session {session_id(session.id)!r} was {reason.replace('_', ' ')} before this chunk was answered"
            self._refuse(chunk.ticket, kind(message, field="session"))
        self._states.discard(session.location)
        self._table.close(session, reason)

    def _follow(self, session: Session, chunks: Iterable[RequestSequence]) -> None:
        """Note that the store has given a session the turns of chunks that will not run."""
        for chunk in chunks:
            if chunk.ownership is not None and not chunk.ownership.anew:
                assert self.stored is not None
                self.stored.adopt(session, chunk.ownership)

    def _origin(self, key: ModelKey, steps: int) -> StateOrigin:
        return session_state.origin_of(self._engine.spec(key), key, steps)


def _uncertain(session: Session) -> SessionLost:
    return SessionLost(
        f"the newest state of session {session_id(session.id)!r} was lost, and one with {session.steps} steps is left: "
        f"send the steps after it again, with steps = {session.steps}, or begin the session again with start = true",
        field="session",
        steps=session.steps,
    )
