"""The states of sequences and sessions: arrays over state handles, and the state slots that the handles hold.

A session has a handle as long as it is open, and a long sequence from its first steps to its last. A state is in a slot on the device, or
on the host while others need the slots. A batch reads a state from one slot and writes it to another, so a batch that fails has changed
nothing. A session gets a new state only when its whole chunk is answered. This module knows no queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.session_state import State
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT, FreeSlots, Numbers
from service.engine.batching.tenant_queue import NO_HANDLE
from service.engine.execution.device_engine import DeviceEngine
from service.ipc.blocks import COUNT
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics

FIRST_HANDLES = 64


class StateMoves(NamedTuple):
    """How the states of a batch move.

    handles: (rows,) the state handle of each row, or NO_HANDLE. reads, writes: (rows,) the slots that the rows read and write; a row
    without a handle reads ZERO_SLOT and writes DISCARD_SLOT. steps: (rows,) of the sessions after their chunks.
    rows: the rows with a handle that are no pieces.
    """

    handles: Numbers
    reads: Numbers
    writes: Numbers
    steps: Numbers
    rows: Numbers | slice


@dataclass(slots=True)
class _ModelSlots:
    """The slots of one model. count: how many the handles hold at most between batches.

    holders: (slots,) the handle that holds each slot, or NO_HANDLE.
    busy: how many slots belong to handles that are in use, by batches in flight or by sequences that have begun.
    writing: how many slots the batches in flight write.
    behind: how many chunks wait for an earlier chunk of their session.
    on_host: the states that are not in a slot.
    """

    count: int
    free: FreeSlots
    holders: Numbers
    busy: int = 0
    writing: int = 0
    behind: int = 0
    on_host: dict[int, State] = field(default_factory=dict)


class StateCache:
    """The state handles of one engine, and the state slots of its models.

    slots: the slot with the state from which the next batch of a handle continues, ZERO_SLOT at its beginning.
    steps: of the chunks of a session that were answered. last_use: when the last of them was, infinite while it cannot expire.
    pending: how many chunks of a session have no answer yet; next_steps: its steps after all of these.
    """

    def __init__(self, engine: DeviceEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._models: dict[ModelKey, _ModelSlots] = {}
        self._free_handles: list[int] = []
        self.slots = self.steps = np.empty(0, np.int64)
        self.last_use: NDArray[np.float64] = np.empty(0)
        self._busy: NDArray[np.bool_] = np.empty(0, bool)
        self.pending: list[int] = []
        self.next_steps: list[int] = []
        self._closing: set[int] = set()
        """The handles that are free once the batches in flight do not use them any more."""
        self._begun: dict[int, int] = {}
        """The handles whose chunk has run in part, and the slot to which each returns if the chunk fails."""

    # Handles.

    def open(self) -> int:
        """Return a new handle."""
        if not self._free_handles:
            self._grow()
        handle = self._free_handles.pop()
        self.slots[handle], self.steps[handle] = ZERO_SLOT, 0
        self.pending[handle] = self.next_steps[handle] = 0
        return handle

    def close(self, model: ModelKey, handle: int) -> None:
        """Free a handle and its state, which nothing continues. A batch in flight may still use it."""
        slots = self._slots_of(model)
        self.give_up(model, handle)
        slots.on_host.pop(handle, None)
        self._release(slots, self.slots[[handle]])
        self.slots[handle], self.last_use[handle] = ZERO_SLOT, np.inf
        if self._busy[handle]:
            self._closing.add(handle)
        else:
            self._free_handles.append(handle)

    def add_pending(self, model: ModelKey, handles: Sequence[int], lengths: Sequence[int]) -> None:
        """Count chunks that arrive. lengths: their steps."""
        pending, next_steps, behind = self.pending, self.next_steps, 0
        for handle, steps in zip(handles, lengths, strict=True):
            behind += pending[handle] > 0
            pending[handle] += 1
            next_steps[handle] += steps
        if behind:
            self._slots_of(model).behind += behind

    def end_pending(self, model: ModelKey, handles: Sequence[int]) -> None:
        """Count chunks that were answered or refused."""
        pending, behind = self.pending, 0
        for handle in handles:
            pending[handle] -= 1
            behind += pending[handle] > 0
        if behind:
            self._slots_of(model).behind -= behind

    def add_withdrawn(self, model: ModelKey, chunks: int) -> None:
        """Count chunks in flight that nothing waits for, negative at the end of their batch, for which their sessions wait."""
        self._slots_of(model).behind += chunks

    # For the scheduler.

    def room(self, model: ModelKey) -> int:
        """Return how many more sequences may hold a state while they run: the states of all others may move to the host."""
        slots = self._slots_of(model)
        return slots.count - slots.busy

    def any_behind(self, model: ModelKey) -> bool:
        """Return whether a chunk waits for an earlier chunk of its session."""
        return self._slots_of(model).behind > 0

    def busy(self, handles: Numbers) -> NDArray[np.bool_]:
        """Return which handles are in use. NO_HANDLE is not."""
        busy: NDArray[np.bool_] = self._busy[handles]  # the last handle is never given away, and never busy
        return busy

    # Batches.

    def prepare(self, model: ModelKey, blocks: Sequence[QueuedBlock], pieces: int) -> StateMoves | None:
        """Return how the states of a batch move, None for a batch without states. pieces: how many of the last rows are."""
        if all(block.handles is None for block in blocks):
            return None
        slots, lengths = self._slots_of(model), np.frombuffer(b"".join([block.columns.lengths for block in blocks]), COUNT)
        of_rows = _handles_of(blocks)
        rows = np.flatnonzero(of_rows != NO_HANDLE)
        every = len(rows) == len(of_rows)
        handles = of_rows if every else of_rows[rows]
        self._use(model, slots, handles)
        slots.writing += len(handles)
        reads, writes = self.slots[handles], slots.free.take(len(handles))
        slots.holders[writes] = handles
        if not every:
            of_states, (reads, writes) = (
                (reads, writes),
                (np.full(len(of_rows), ZERO_SLOT), np.full(len(of_rows), DISCARD_SLOT)),
            )
            reads[rows], writes[rows] = of_states
        whole = len(of_rows) - pieces
        kept: Numbers | slice = slice(whole) if every else rows[: rows.searchsorted(whole)]
        moves = StateMoves(of_rows, reads, writes, self.steps[of_rows] + lengths, kept)
        first = 0
        for block in blocks:
            if block.options.starts and block.handles is not None:
                begins = [first + row for row, handle in enumerate(block.handles.tolist()) if handle not in self._begun]
                moves.steps[begins] = lengths[begins]
                moves.reads[begins] = ZERO_SLOT
            first += block.sequences
        return moves

    def _use(self, model: ModelKey, slots: _ModelSlots, handles: Numbers) -> None:
        """Note that a batch uses handles, and see to it that their states are in slots and others leave room for them."""
        were_busy = self._busy[handles]
        self._busy[handles] = True
        try:
            self._make_room(model, slots, handles)
            for handle in slots.on_host.keys() & set(handles.tolist()) if slots.on_host else ():
                self._fetch(model, slots, handle)
        except Exception:
            self._busy[handles] = were_busy
            raise
        slots.busy += len(handles) - int(np.count_nonzero(were_busy))

    def commit(self, model: ModelKey, moves: StateMoves, rows: Numbers | slice, now: float) -> None:
        """Keep the states that a batch has written in these rows, for answered requests."""
        handles = moves.handles[rows]
        self._end_writing(model, handles, self.slots[handles])
        self.slots[handles], self.steps[handles] = moves.writes[rows], moves.steps[rows]
        self.last_use[handles] = now

    def abandon(self, model: ModelKey, moves: StateMoves, rows: Numbers) -> None:
        """Drop the states that a batch has written in these rows: the handles are as before it."""
        handles = moves.handles[rows]
        begun = np.array([handle in self._begun for handle in handles.tolist()], bool)
        self._end_writing(model, handles[~begun], moves.writes[rows])
        self._slots_of(model).writing -= int(np.count_nonzero(begun))

    def _end_writing(self, model: ModelKey, handles: Numbers, freed: Numbers) -> None:
        slots = self._slots_of(model)
        slots.writing -= len(handles)
        slots.busy -= len(handles)
        self._busy[handles] = False
        self._release(slots, freed)
        for handle in self._closing.intersection(handles.tolist()) if self._closing else ():
            self._closing.discard(handle)
            self._free_handles.append(handle)

    # Sequences that run in several batches.

    def advance(self, model: ModelKey, moves: StateMoves, pieces: int) -> None:
        """Continue the sequences of the pieces of a launched batch from what it writes. Later batches write only after it has read."""
        slots, first = self._slots_of(model), len(moves.handles) - pieces
        for handle, write in zip(moves.handles[first:].tolist(), moves.writes[first:].tolist(), strict=True):
            if handle != NO_HANDLE:
                slots.writing -= 1
                if handle in self._begun:
                    self._release(slots, self.slots[[handle]])
                else:
                    self._begun[handle] = int(self.slots[handle])
                    slots.busy += self._begun[handle] != ZERO_SLOT
                self.slots[handle] = write

    def finish(self, model: ModelKey, handle: int, steps: int, now: float) -> None:
        """Keep the state of a chunk whose last piece was answered. steps: of its session now."""
        self._end_begun(model, handle, self._begun[handle])
        self.steps[handle], self.last_use[handle] = steps, now

    def give_up(self, model: ModelKey, handle: int) -> None:
        """Return a handle to the state before a chunk that has run in part, if there is one."""
        if handle in self._begun:
            ahead, self.slots[handle] = int(self.slots[handle]), self._begun[handle]
            self._end_begun(model, handle, ahead)

    def _end_begun(self, model: ModelKey, handle: int, freed: int) -> None:
        slots = self._slots_of(model)
        slots.busy -= 1 + (self._begun.pop(handle) != ZERO_SLOT)
        self._busy[handle] = False
        self._release(slots, np.array([freed]))

    # States.

    def read(self, model: ModelKey, handle: int) -> State | None:
        """Return a copy of the state of a session on the host, None at its beginning."""
        slot = self._begun.get(handle, int(self.slots[handle]))
        return self._engine.save(model, slot) if slot != ZERO_SLOT else self._slots_of(model).on_host.get(handle)

    def keep_on_host(self, model: ModelKey, handle: int, state: State) -> None:
        """Give a new handle a state. It moves to a slot with the next batch."""
        self._slots_of(model).on_host[handle] = state

    def count(self) -> None:
        for key, slots in self._models.items():
            self._metrics.state_slots_used.set(slots.free.used, *key.labels)

    def forget(self, model: ModelKey) -> None:
        """Forget the slots of a model that has neither sequences nor sessions."""
        self._models.pop(model, None)

    def _slots_of(self, model: ModelKey) -> _ModelSlots:
        slots = self._models.get(model)
        if slots is None:
            count, spare = self._engine.slots(model)
            free = FreeSlots(count + spare)
            holders = np.full(int(free.free().max()) + 1, NO_HANDLE)
            slots = self._models[model] = _ModelSlots(count, free, holders)
            self._metrics.state_slots.set(count, *model.labels)
        return slots

    def _release(self, slots: _ModelSlots, numbers: Numbers) -> None:
        """Free these slots, but for ZERO_SLOT."""
        held = numbers[numbers != ZERO_SLOT]
        if len(held):
            slots.holders[held] = NO_HANDLE
            slots.free.put_back(held)

    def _make_room(self, model: ModelKey, slots: _ModelSlots, handles: Numbers) -> None:
        """Move the states that were not used for longest to the host, until the handles of a batch have room beside the others."""
        new = int(np.count_nonzero(self.slots[handles] == ZERO_SLOT))
        excess = slots.free.used - slots.writing + new - slots.count
        if excess > 0:
            holders = np.unique(slots.holders[slots.holders != NO_HANDLE])
            resting = holders[~self._busy[holders]]
            for handle in resting[self.last_use[resting].argsort()][:excess].tolist():
                slots.on_host[handle] = self._engine.save(model, int(self.slots[handle]))
                self._release(slots, self.slots[[handle]])
                self.slots[handle] = ZERO_SLOT
                self._metrics.session_moves.add("host")

    def _fetch(self, model: ModelKey, slots: _ModelSlots, handle: int) -> None:
        """Move a state from the host to a slot."""
        slot = slots.free.take(1)
        try:
            self._engine.restore(model, int(slot[0]), slots.on_host[handle])
        except Exception:
            slots.free.put_back(slot)
            raise
        del slots.on_host[handle]
        slots.holders[slot] = handle
        self.slots[handle] = slot[0]
        self._metrics.session_moves.add("slot")

    def _grow(self) -> None:
        """Double the arrays. The place behind the last handle stands for NO_HANDLE, which is never busy."""
        before = max(0, len(self.slots) - 1)
        count = max(FIRST_HANDLES, 2 * before)
        for name, value in (("slots", ZERO_SLOT), ("steps", 0), ("last_use", np.inf), ("_busy", False)):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array[:before], np.full(count + 1 - before, value, array.dtype)]))
        self.pending += [0] * (count - before)
        self.next_steps += [0] * (count - before)
        self._free_handles += range(count - 1, before - 1, -1)


def close_handles(states: StateCache, block: QueuedBlock, index: int) -> None:
    """Free the state handles of a request that is no chunk of a session."""
    assert block.handles is not None
    for sequence in range(block.first_sequences[index], block.first_sequences[index + 1]):
        states.close(block.model, int(block.handles[sequence]))


def _handles_of(blocks: Sequence[QueuedBlock]) -> Numbers:
    """Return the state handle of each row, or NO_HANDLE."""
    of_blocks = [np.full(block.sequences, NO_HANDLE) if block.handles is None else block.handles for block in blocks]
    return of_blocks[0] if len(of_blocks) == 1 else np.concatenate(of_blocks)
