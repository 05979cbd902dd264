"""Where the states of sequences and sessions are: in a state slot on the device, or on the host while others need the slots.

A batch reads a state from one slot and writes it to another, so a batch that fails has changed nothing. The state of a session is replaced
only when a chunk of the session is answered. This module knows no queue.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from service.engine.batch import Chunk
from service.engine.batching.batch_builder import ScheduledSteps
from service.engine.batching.session_state import State
from service.engine.batching.state_slots import DISCARD_SLOT, ZERO_SLOT, SlotAllocator, StateSlot
from service.engine.batching.ticket import RequestSequence, StateLocation
from service.engine.execution.device_engine import DeviceEngine
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics


@dataclass(slots=True)
class _ModelSlots:
    """The slots of one model.

    resting: states in a slot that no batch reads, oldest first: the oldest moves to the host first.
    releasing: slots that only the batch about to be launched reads; they are free as soon as it is launched.
    """

    allocator: SlotAllocator
    resting: OrderedDict[StateLocation, None] = field(default_factory=OrderedDict)
    releasing: int = 0

    @property
    def free(self) -> int:
        """How many more states fit while every other state stays in its slot."""
        return max(0, self.allocator.count - self.allocator.used + self.releasing)


class StateCache:
    """The state slots of all models of one engine."""

    def __init__(self, engine: DeviceEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._models: dict[ModelKey, _ModelSlots] = {}

    def room(self, model: ModelKey) -> int:
        """Return how many more sequences may keep a state. Each may need two slots for a while: the slot of its session and a new slot."""
        slots = self._slots_of(model)
        free, resting = slots.free, len(slots.resting)
        return free + max(0, resting - free + 1) // 2

    def chunk(self, model: ModelKey, scheduled: ScheduledSteps[RequestSequence]) -> Chunk:
        """Return the scheduled steps of a sequence as a chunk, with the slots that it reads and writes."""
        sequence, slots = scheduled.sequence, self._slots_of(model)
        session = sequence.session
        sequence.launched += 1  # before anything that may raise: `release` then restores the state of the session
        keeps_state = sequence.keeps_state or not scheduled.last
        if scheduled.first and session is not None:
            slots.resting.pop(session.location, None)
        if scheduled.first and keeps_state:
            self._make_room(slots, sequence)
        source = self._source(slots, sequence, scheduled.first)
        # The session keeps its own slot until the chunk is answered.
        of_session = scheduled.first and session is not None and source is session.location.slot
        sequence.read_slot = None if of_session else source
        slots.releasing += sequence.read_slot is not None
        sequence.slot = slots.allocator.allocate() if keeps_state else None
        return Chunk(
            sequence.take_bytes(scheduled.steps),
            scheduled.steps,
            sequence.ticket.request.returns,
            sequence,
            ZERO_SLOT if source is None else source.number,
            DISCARD_SLOT if sequence.slot is None else sequence.slot.number,
            timed=sequence.ticket.request.timed,
        )

    def launched(self, sequence: RequestSequence) -> None:
        """Free the slot that a launched batch reads: later batches write only after it has read."""
        if sequence.read_slot is not None:
            slots = self._slots_of(sequence.ticket.key)
            slots.allocator.free(sequence.read_slot)
            slots.releasing -= 1
            sequence.read_slot = None

    def release(self, sequence: RequestSequence) -> None:
        """Free the slots of a sequence that does not run any more and that nothing continues."""
        self.launched(sequence)
        if sequence.slot is not None:
            self._slots_of(sequence.ticket.key).allocator.free(sequence.slot)
            sequence.slot = None
        if sequence.session is not None and sequence.launched:
            self._rest(sequence.session.location)

    def commit(self, sequence: RequestSequence) -> None:
        """Make the state of an answered chunk the state of its session."""
        assert sequence.session is not None
        location = sequence.session.location
        self.discard(location)
        location.slot, sequence.slot = sequence.slot, None
        self._rest(location)

    def discard(self, location: StateLocation) -> None:
        """Free a state that nothing continues from."""
        slots = self._slots_of(location.key)
        slots.resting.pop(location, None)
        if location.slot is not None:
            slots.allocator.free(location.slot)
        location.slot = location.on_host = None

    def read(self, location: StateLocation) -> State | None:
        """Return a copy of a state on the host, None at the beginning of a session."""
        if location.slot is not None:
            return self._engine.save(location.key, location.slot.number)
        return location.on_host

    def count(self) -> None:
        """Update the gauges."""
        for key, slots in self._models.items():
            self._metrics.state_slots_used.set(slots.allocator.used, *key.labels)

    def close(self, model: ModelKey) -> None:
        """Forget the slots of a model that has neither sequences nor sessions."""
        self._models.pop(model, None)

    def _slots_of(self, model: ModelKey) -> _ModelSlots:
        if model not in self._models:
            count, spare = self._engine.slots(model)
            self._models[model] = _ModelSlots(SlotAllocator(count, spare))
            self._metrics.state_slots.set(count, *model.labels)
        return self._models[model]

    def _source(self, slots: _ModelSlots, sequence: RequestSequence, first: bool) -> StateSlot | None:
        """Return the slot from which a sequence continues, None at its beginning."""
        if not first:
            return sequence.slot
        if sequence.restarts:
            return None
        if sequence.session is None:
            state = sequence.initial_state
            return None if state is None else self._restored(slots, sequence.ticket.key, state)
        location = sequence.session.location
        if location.on_host is None:
            return location.slot
        slot = self._restored(slots, location.key, location.on_host)
        self._metrics.session_moves.add("slot")
        return slot

    def _restored(self, slots: _ModelSlots, model: ModelKey, state: State) -> StateSlot:
        """Return a new slot with this state."""
        slot = slots.allocator.allocate()
        try:
            self._engine.restore(model, slot.number, state)
        except Exception:
            slots.allocator.free(slot)
            raise
        return slot

    def _make_room(self, slots: _ModelSlots, sequence: RequestSequence) -> None:
        """If no slot is free, move a session's state to the host: the longest resting state, or the state of the sequence's session."""
        if slots.free:
            return
        if slots.resting:
            location, _ = slots.resting.popitem(last=False)
        else:
            assert sequence.session is not None, "the scheduler begins no more sequences than there is room for"
            location = sequence.session.location
        assert location.slot is not None
        location.on_host = self._engine.save(location.key, location.slot.number)
        slots.allocator.free(location.slot)
        location.slot = None
        self._metrics.session_moves.add("host")

    def _rest(self, location: StateLocation) -> None:
        if location.slot is not None:
            slots = self._slots_of(location.key)
            slots.resting[location] = None
            slots.resting.move_to_end(location)
