"""Gives the requests of arriving blocks their state handles: chunks get the handles of their sessions.

A block of chunks that continue open sessions is looked up in one dictionary. Each chunk is looked at alone if any of them starts or ends
a session, names the steps of its session, or meets a session that is not open.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.session_table import ArrivingChunk, Session, SessionTable
from service.engine.batching.sessions import Sessions
from service.engine.batching.taken_sessions import Waiting
from service.engine.execution.device_engine import DeviceEngine
from service.errors import InvalidInput, Overloaded, ServiceError


class Arrivals:
    """Requests with states, before they are queued.

    submit: the batcher's. It takes a block that had to wait for the session store. refuse: the batcher's. It refuses a request.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        table: SessionTable,
        sessions: Sessions,
        submit: Callable[[QueuedBlock], None],
        refuse: Callable[[QueuedBlock, int, ServiceError], None],
    ) -> None:
        self._engine = engine
        self._table = table
        self._states = table.states
        self._sessions = sessions
        self._submit = submit
        self._refuse = refuse
        self._held: dict[tuple[object, int], None] = {}
        """The requests that wait for the session store, by owner and id."""

    def refusal(self, block: QueuedBlock) -> ServiceError | None:
        """Return the error of a block of chunks or with states that its model cannot run."""
        key = block.model
        if block.sessions and not self._engine.streams(key):
            parts = self._engine.whole_only(key)
            return InvalidInput(
                f"{key.name} has no sessions, because {' and '.join(parts)} need{'s' if len(parts) == 1 else ''} "
                "a whole sequence: leave session out, and the header x-session-id",
                field="session",
            )
        if block.has_states and not self._engine.spec(key).states:
            return InvalidInput(f"{key.name} has no states that a request may bring or ask for: leave them out", field="states")
        return None

    def attach(self, block: QueuedBlock) -> QueuedBlock | None:
        """Return the block of the requests that may be queued now, with their state handles; None if there are none."""
        options, stored = block.options, self._sessions.stored
        if not block.sessions:
            return self._attach_states(block)
        store_is_asked = stored is not None and stored.is_asked
        if not (options.starts or options.ends or options.resubmitted or block.at or store_is_asked):
            handles = self._table.handles(block.model)
            of_chunks = [handles.get(session) for session in block.sessions]
            if None not in of_chunks and block.sequences == block.requests and block.shortest > 0:
                self._states.add_pending(block.model, of_chunks, block.lengths)  # type: ignore[arg-type]
                block.handles = np.array(of_chunks)
                return block
        return self._attach_each(block)

    def check_elsewhere(self, block: QueuedBlock, index: int) -> None:
        """Raise the error for a chunk of a version that is not served, if its session ended (once) or belongs to another version."""
        chunk = _chunk(block, index)
        is_open = self._table.find(chunk.session) is not None and not chunk.options.starts
        if chunk.options.resubmitted or self._table.end_reason(chunk.session) or is_open:
            self._table.resume(chunk)

    def cancel(self, owner: object, id: int) -> bool:
        """Forget a request that waits for the session store. Returns whether it waited."""
        return self._held.pop((owner, id), self) is not self

    def cancel_owner(self, owner: object) -> int:
        """Forget the requests of an owner that wait for the session store. Returns their number."""
        held = [request for request in self._held if request[0] is owner]
        for request in held:
            del self._held[request]
        return len(held)

    def _attach_states(self, block: QueuedBlock) -> QueuedBlock:
        """Give each sequence of a block a handle. The requests bring states or ask for them."""
        states, key = memoryview(block.columns.states), block.model
        size = len(states) // block.sequences
        handles = [self._states.open() for _ in range(block.sequences)]
        for row, handle in enumerate(handles if size else ()):
            self._states.keep_on_host(key, handle, self._engine.state_from(key, states[size * row : size * (row + 1)]))
        block.handles = np.array(handles)
        return block

    def _attach_each(self, block: QueuedBlock) -> QueuedBlock | None:
        options, handles = block.options, dict[int, int]()
        if (options.starts or options.ends) and len(set(block.sessions)) < block.requests:
            # A chunk that starts or ends its session is queued before the next chunk is looked at.
            for index in range(block.requests):
                self._submit(block.select([index]))
            return None
        for index in range(block.requests):
            try:
                session = self._session_of(block, index)
                if session is None:
                    continue
                if block.lengths[index] == 0:
                    self._sessions.end_after_chunks(session, block.select([index]))
                    continue
                self._sessions.arrived(session, block, index)
                handles[index] = session.handle
            except ServiceError as error:
                self._refuse(block, index, error)
            except Exception:
                for arrived in range(len(handles)):
                    self._sessions.skip(_with_handles(block, handles), arrived, queued=False)
                raise
        return _with_handles(block, handles) if handles else None

    def _session_of(self, block: QueuedBlock, index: int) -> Session | None:
        """Return the session that a chunk starts or continues, None if the chunk waits for the session store; raises ServiceError."""
        chunk = _chunk(block, index)
        if block.sequences != block.requests:
            raise InvalidInput(f"{block.counts[index]} inputs for one session: send its chunks one by one", field="inputs")
        if self._hold(block, index, chunk):
            return None
        old = self._table.find(chunk.session)
        if old is None and not chunk.options.opens:
            self._table.resume(chunk)  # an error about its end is more precise
            raise Overloaded(
                "no session is opened while the memory limit of the service is nearly used up: retry later, "
                "or give the service more memory",
                field="session",
                retry_after=1,
            )
        if old is not None and chunk.options.starts and (old.ending or old.key != chunk.key):
            self._sessions.close(old, "restarted")
        elif old is not None and self._is_unsure_of(old, chunk):
            raise self._table.uncertain_error(old)
        return self._table.resume(chunk) or self._table.open(chunk.session, chunk.key, chunk.options.limit)

    def _is_unsure_of(self, session: Session, chunk: ArrivingChunk) -> bool:
        """Return whether a chunk may follow a later state than its session has."""
        if not session.uncertain or chunk.options.starts or self._states.pending[session.handle]:
            return False
        return chunk.at != int(self._states.steps[session.handle])

    def _hold(self, block: QueuedBlock, index: int, chunk: ArrivingChunk) -> bool:
        """Keep a chunk until this replica owns its session. Returns False if it can be queued now. Raises Overloaded."""
        stored, request, waits = self._sessions.stored, (block.owner, block.ids[index]), False

        def proceed() -> None:
            del self._held[request]
            self._submit(block.select([index]))

        def refuse(error: ServiceError) -> None:
            del self._held[request]
            self._refuse(block, index, error)

        if stored is None:
            return False
        begins, anew = chunk.options.starts is not False and not chunk.at, chunk.options.starts is True
        self._held[request] = None  # the store is asked only for work that has not ended
        try:
            waiting = Waiting(
                proceed, refuse, lambda: request not in self._held, chunk.options.limit, begins, anew, is_chunk=True
            )
            waits = stored.hold(chunk.session, waiting)
        finally:
            if not waits:
                del self._held[request]
        return waits


def _chunk(block: QueuedBlock, index: int) -> ArrivingChunk:
    """Return a chunk of a block."""
    at = block.at[index] if block.at else -1
    return ArrivingChunk(block.sessions[index], block.model, block.options, None if at < 0 else at)


def _with_handles(block: QueuedBlock, handles: dict[int, int]) -> QueuedBlock:
    """Return a block of the chunks at these places, with the handles of their sessions."""
    attached = block.select(list(handles))
    attached.handles = np.array(list(handles.values()))
    return attached
