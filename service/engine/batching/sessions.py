"""The life of sessions: chunks start, continue and end them; clients export, import and close them; idle sessions expire.

`session_table` records which sessions are open, `state_cache` where their states are. This module keeps the two consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from service.engine.batching import session_state
from service.engine.batching.assembly import result_without_steps
from service.engine.batching.request_block import BlockRequest, QueuedBlock
from service.engine.batching.session_table import Restart, Session, SessionTable
from service.engine.batching.state_cache import close_handles
from service.engine.batching.state_slots import ZERO_SLOT
from service.engine.batching.stored_sessions import StoredSessions
from service.engine.execution.device_engine import DeviceEngine
from service.errors import ServiceError, SessionConflict, SessionLost
from service.ipc.messages.models import ModelKey
from service.ipc.messages.sessions import session_id
from service.ipc.session_file import SessionFile, StateOrigin, StoredTensor
from service.metrics import Metrics


class Sessions:
    """The sessions of one engine.

    withdraw: the batcher's. It takes the chunks of a session that arrived behind another from the queue and from the batches in flight, and
    returns them in the order of their arrival. The place of the other among all arrivals is -1 for all chunks.
    refuse: the batcher's. It refuses a request, and counts it.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        table: SessionTable,
        metrics: Metrics,
        clock: Callable[[], float],
        withdraw: Callable[[Session, int], list[BlockRequest]],
        refuse: Callable[[QueuedBlock, int, ServiceError], None],
        stored: StoredSessions | None = None,
    ) -> None:
        """stored: None for a service without a session store."""
        self._engine = engine
        self._table = table
        self._states = table.states
        self._metrics = metrics
        self._clock = clock
        self._withdraw = withdraw
        self._refuse = refuse
        self._ends: dict[int, QueuedBlock] = {}
        """Requests that only end a session and wait for its chunks, by the handle of the session."""
        self.stored = stored
        if stored is not None:
            stored.states = self
            table.on_close = stored.closed

    # Calls of clients.

    def export_state(self, id: str) -> bytes:
        """Return the state of a session as a safetensors file; raises ServiceError."""
        session = self._table.get(id)
        if self._states.pending[session.handle]:
            raise SessionConflict(
                f"a chunk of session {session_id(id)!r} is still to run: wait for its answer", field="session"
            )
        if session.uncertain:
            raise self._table.uncertain_error(session)
        return self.export(session)

    def export(self, session: Session) -> bytes:
        """Return the state of a session without a chunk that runs, as a session file."""
        state = self._states.read(session.key, session.handle)
        assert state is not None, "a session without a chunk that runs has at least one answered chunk"
        return session_state.pack(state, self._origin(session.key, int(self._states.steps[session.handle])))

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
        self._states.keep_on_host(key, session.handle, state)
        self._states.steps[session.handle] = self._states.next_steps[session.handle] = origin.steps
        self._states.last_use[session.handle] = self._clock()
        if self.stored is not None and not stored:
            self.stored.adopt(session, self.stored.next_ownership())
        return session

    def model_of(self, id: str) -> ModelKey | None:
        """Return the model version of a session, None if it is not open."""
        session = self._table.find(id)
        return None if session is None else session.key

    def end(self, id: str) -> None:
        """End a session and refuse its waiting chunks; raises ServiceError if it is not open."""
        self.close(self._table.get(id), "deleted")

    # Chunks.

    def arrived(self, session: Session, block: QueuedBlock, index: int) -> None:
        """Count a chunk that is about to be queued."""
        handle, steps = session.handle, block.lengths[index]
        ownership = None
        if self.stored is not None and (session.ownership is None or block.options.starts):
            ownership = self.stored.next_ownership()
            if session.ownership is None:
                session.ownership, ownership = ownership, None
        if block.options.starts:
            session.restarts.append(Restart(self._states.next_steps[handle], ownership))
            self._states.next_steps[handle] = 0
        self._states.add_pending(session.key, [handle], [steps])
        if block.options.ends:
            self._table.note(session, ending=True)

    def end_after_chunks(self, session: Session, block: QueuedBlock) -> None:
        """Answer a request that only ends a session, once every chunk before it has been answered. block: has this request alone."""
        self._table.note(session, ending=True)
        self._ends[session.handle] = block
        self._end_if_due(session.handle)

    def cancel_ends(self, owner: object, id: int | None = None) -> int:
        """Forget the requests of an owner that only end a session, or one of them. Returns their number."""
        ends = [(handle, block) for handle, block in self._ends.items() if block.owner is owner and id in (None, block.ids[0])]
        for handle, _ in ends:
            del self._ends[handle]
            self._table.note(self._table.of_handle(handle), ending=False)
        return len(ends)

    def answered(self, block: QueuedBlock, handles: list[int]) -> None:
        """Note that chunks of a block were answered and their states are kept. handles: of their sessions."""
        self._states.end_pending(block.model, handles)
        options = block.options
        if options.starts or options.ends or block.at or self.stored is not None:
            for session in map(self._table.of_handle, handles):
                self._note_answer(session, block)
        for handle in self._ends.keys() & set(handles) if self._ends else ():
            self._end_if_due(handle)

    def _note_answer(self, session: Session, block: QueuedBlock) -> None:
        """Note the answer to a chunk that may change more than the steps of its session."""
        if block.at or block.options.starts:
            self._table.note(session, uncertain=False)
        if block.options.starts:
            restart = session.restarts.pop(0)
            session.ownership = restart.ownership or session.ownership
            if restart.steps_before:
                self._metrics.sessions_ended.add("restarted")
        if block.options.ends:
            self._table.close(session, "ended")
        elif self.stored is not None:
            self.stored.answered(session)

    def skip(self, block: QueuedBlock, index: int, *, queued: bool = True) -> None:
        """Free the states of a request that has left without an answer. Chunks of its session that arrived after it are refused.

        queued: false for a request that was refused before it was queued, so that no chunk has arrived after it.
        """
        assert block.handles is not None
        if not block.sessions:
            close_handles(self._states, block, index)
            return
        session = self._table.of_handle(int(block.handles[index]))
        later = self._withdraw(session, int(block.orders[index])) if queued else []
        self._remove(session, [(block, index), *later])
        if queued:
            message = f"an earlier chunk of session {session_id(session.id)!r} was not run: send both again, in their order"
            self._refuse_chunks(session, later, message)
        self.leave(session)

    def leave(self, session: Session) -> None:
        """Let a session without chunks idle, or close it if none of its chunks was ever answered."""
        handle = session.handle
        if handle in self._ends:
            self._end_if_due(handle)
        elif not self._states.pending[handle]:
            if self._states.steps[handle]:
                self.rest(session)
            else:
                self._table.close(session, "unbegun")

    def rest(self, session: Session) -> None:
        """Start the idle time of a session without chunks."""
        self._states.last_use[session.handle] = self._clock()
        if self.stored is not None:
            self.stored.rested(session)

    # Ends that no client asked for.

    def expire(self) -> None:
        """End the sessions that were idle for too long."""
        self._table.expire(self._clock())
        if self.stored is not None:
            self.stored.step()

    def unload(self, key: ModelKey) -> None:
        """End the sessions of a model version. Waiting chunks are refused; other clients get an error once, when they resume."""
        for session in self._table.of(key):
            self.lose(session, "unloaded")

    def lose(self, session: Session, reason: str) -> None:
        """End a session for a reason of UNREPORTED_ENDS. Its chunks are refused, or its client gets an error once, when it resumes."""
        if self._states.pending[session.handle] or session.handle in self._ends:
            self.close(session, reason, SessionLost)
        else:
            self._table.lose(session, reason)

    def holds(self, key: ModelKey) -> bool:
        """Return whether a session of this model version is open."""
        return bool(self._table.of(key))

    def count(self) -> None:
        self._metrics.sessions.set(len(self._table))
        self._states.count()

    def close(self, session: Session, reason: str, kind: type[ServiceError] = SessionConflict) -> None:
        """End a session, and refuse its chunks with an error of this kind."""
        chunks = self._withdraw(session, -1)
        self._remove(session, chunks)
        message = f"session {session_id(session.id)!r} was {reason.replace('_', ' ')} before this chunk was answered"
        self._refuse_chunks(session, chunks, message, kind)
        self._table.close(session, reason)

    def _remove(self, session: Session, chunks: Iterable[BlockRequest]) -> None:
        """Undo the arrival of the newest chunks of a session, which will not run. chunks: in the order of their arrival."""
        handle, next_steps, ownerships = session.handle, self._states.next_steps, []
        for block, index in reversed(list(chunks)):
            self._states.end_pending(block.model, [handle])
            if block.options.starts:
                restart = session.restarts.pop()
                next_steps[handle] = restart.steps_before
                ownerships.append(restart.ownership)
            else:
                next_steps[handle] -= block.lengths[index]
            if block.options.ends:
                self._table.note(session, ending=False)
        for ownership in reversed(ownerships):
            if ownership is not None and not ownership.anew:
                # The store has given the session to this chunk.
                assert self.stored is not None
                self.stored.adopt(session, ownership)

    def _refuse_chunks(
        self, session: Session, chunks: Iterable[BlockRequest], message: str, kind: type[ServiceError] = SessionConflict
    ) -> None:
        """Refuse chunks that were taken from the queue, and a request that only ends their session."""
        for block, index in chunks:
            self._refuse(block, index, kind(message, field="session"))
        end = self._ends.pop(session.handle, None)
        if end is not None:
            self._table.note(session, ending=False)
            self._refuse(end, 0, kind(message, field="session"))

    def _end_if_due(self, handle: int) -> None:
        """Answer the request that only ends a session, if every chunk before it has been answered."""
        if not self._states.pending[handle]:
            block, session = self._ends.pop(handle), self._table.of_handle(handle)
            block.owner.answer(block, result_without_steps(int(self._states.steps[handle])), self._clock())
            self._table.close(session, "ended")
            self._metrics.sequences.add(*block.model.labels)

    def _origin(self, key: ModelKey, steps: int) -> StateOrigin:
        return session_state.origin_of(self._engine.spec(key), key, steps)
