"""The batches in flight, and the requests that leave them without an answer: their clients disconnect, or their sessions end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, field

from service.engine.batch import Batch
from service.engine.batching.assembly import Assembly
from service.engine.batching.request_block import BlockOwner, BlockRequest, QueuedBlock, arrival_of
from service.engine.batching.session_table import Session
from service.engine.batching.sessions import Sessions
from service.engine.batching.state_cache import StateCache, StateMoves
from service.engine.batching.tenant_queue import Piece


class RunningBatch(Struct, eq=False):
    """A batch in flight.

    pieces: its last blocks, each with the request that it belongs to. moves: of the states of the others, None without states.
    withdrawn: the ids of requests that nothing waits for any more, by block.
    """

    batch: Batch
    pieces: Sequence[tuple[Assembly, Piece]]
    moves: StateMoves | None = None
    withdrawn: dict[QueuedBlock, set[int]] = field(default_factory=dict)

    @property
    def whole(self) -> Sequence[QueuedBlock]:
        """Return the blocks of the requests that run as a whole."""
        return self.batch.blocks[: len(self.batch.blocks) - len(self.pieces)]


class RunningBatches:
    """The batches in flight, and the results so far of requests that run in pieces."""

    def __init__(self, states: StateCache, sessions: Sessions) -> None:
        self._states = states
        self._sessions = sessions
        self._running: dict[Batch, RunningBatch] = {}
        self._assemblies: dict[BlockRequest, Assembly] = {}
        """The requests that have run in part, by their block in the queue."""

    def leave(self, block: QueuedBlock, index: int) -> None:
        """Free the states of a request that has left the queue, and tell its session."""
        assembly = self._assemblies.get((block, index))
        if assembly is not None:
            self._end_assembly(assembly)
        if block.handles is not None and (block.sessions or assembly is None):
            self._sessions.skip(block, index)

    def has_begun(self, block: QueuedBlock, index: int) -> bool:
        """Return whether a request of the queue has run in part."""
        return (block, index) in self._assemblies

    def cancel(self, owner: BlockOwner, id: int) -> bool:
        """Forget a request of which nothing is in the queue. Returns whether it was there. Its states are free when its batch ends."""
        for running in self._running.values():
            for block in running.whole:
                if block.owner is owner and id in block.ids and id not in running.withdrawn.get(block, ()):
                    self._withdraw(running, block, id)
                    if block.sessions:
                        self._sessions.skip(block, block.ids.index(id))
                    return True
        for key, assembly in self._assemblies.items():
            if assembly.whole.owner is owner and assembly.whole.ids == [id]:
                self.leave(*key)
                return True
        return False

    def cancel_owner(self, owner: BlockOwner) -> int:
        """Forget the requests with states of an owner of which nothing is in the queue. Returns their number."""
        in_blocks = [block for running in self._running.values() for block in running.whole if block.handles is not None]
        ids = [id for block in in_blocks if block.owner is owner for id in block.ids]
        ids += [assembly.whole.ids[0] for assembly in self._assemblies.values() if assembly.whole.owner is owner]
        return sum([self.cancel(owner, id) for id in ids])

    def withdraw_chunks(self, session: Session, after: int, queued: Sequence[BlockRequest]) -> list[BlockRequest]:
        """Forget the chunks of a session that arrived behind the request with this place among all arrivals.

        queued: those that were in the queue. Returns the others.
        """
        chunks: list[BlockRequest] = []
        for running in self._running.values():
            for block in running.whole:
                if block.sessions and block.handles is not None:
                    for index in np.flatnonzero((block.handles == session.handle) & (block.orders > after)).tolist():
                        if block.ids[index] not in running.withdrawn.get(block, ()):
                            self._withdraw(running, block, block.ids[index])
                            chunks.append((block, index))
        for key, assembly in list(self._assemblies.items()):
            block, index = key
            of_session = block.sessions and block.handles is not None and block.handles[index] == session.handle
            if of_session and arrival_of(key) > after:
                self._end_assembly(assembly)
                chunks += [] if key in queued else [key]
        return chunks

    def _withdraw(self, running: RunningBatch, block: QueuedBlock, id: int) -> None:
        running.withdrawn.setdefault(block, set()).add(id)
        if block.sessions:
            self._states.add_withdrawn(block.model, 1)

    def _end_withdrawn(self, running: RunningBatch) -> None:
        """Note the end of a batch for its requests that nothing waits for."""
        for block, ids in running.withdrawn.items():
            if block.sessions:
                self._states.add_withdrawn(block.model, -len(ids))

    def _end_assembly(self, assembly: Assembly) -> None:
        """Forget what has run of a request."""
        del self._assemblies[assembly.key]
        assembly.ended = True
        whole = assembly.whole
        for handle in assembly.handles.values():
            (self._states.give_up if whole.sessions else self._states.close)(whole.model, handle)
