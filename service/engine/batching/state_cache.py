"""Where the state of every row and session is: in a slot of its model, or on the host when slots are wanted by others.

A turn reads a row's state from one place and writes it to another, so that a turn which fails has changed nothing; what a session has is
replaced only when a chunk of it was answered. Nothing here knows a queue.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from service.engine.batch import Chunk
from service.engine.batching.scheduler import Cut
from service.engine.batching.state_slots import Slot, Slots
from service.engine.batching.ticket import Held, Row
from service.engine.session_state import State
from service.ipc.messages import SCRAP, ZEROS, ModelKey
from service.metrics import Metrics


class Keeps(Protocol):
    """What is asked of an engine. Its slots are `count` of a model, and `spare` ones for a turn."""

    def slots(self, key: ModelKey) -> tuple[int, int]: ...

    def save(self, key: ModelKey, place: int) -> State: ...

    def restore(self, key: ModelKey, place: int, state: State) -> None: ...


@dataclass(slots=True)
class _OfModel:
    slots: Slots
    resting: OrderedDict[Held, None] = field(default_factory=OrderedDict)
    """In a slot, and not read by a turn: the one that has rested longest goes to the host first."""
    passing: int = 0
    """Slots that turns read which are about to be launched: they are free as soon as that has happened."""

    @property
    def free(self) -> int:
        """How many more states may be kept from turn to turn while the others stay where they are."""
        return max(0, self.slots.count - self.slots.used + self.passing)


class States:
    """All slots of all models of one engine."""

    def __init__(self, engine: Keeps, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._models: dict[ModelKey, _OfModel] = {}

    def room(self, model: ModelKey) -> int:
        """How many more rows may begin to be kept. Each may have two places for a while, its session's and its own."""
        mine = self._of(model)
        free, resting = mine.free, len(mine.resting)
        return free + max(0, resting - free + 1) // 2

    def chunk(self, model: ModelKey, cut: Cut[Row]) -> Chunk:
        """The next steps of a row, from where its state is to where it will be."""
        row, mine = cut.of, self._of(model)
        keeps = row.keeps or not cut.last
        if cut.first and row.session is not None:
            mine.resting.pop(row.session.held, None)
        if cut.first and keeps:
            self._make_room(mine, row)
        source = self._source(mine, row, cut.first)
        row.source = None if cut.first and row.session is not None and source is row.session.held.slot else source
        mine.passing += row.source is not None
        row.slot = mine.slots.take() if keeps else None
        places = (ZEROS if source is None else source.place, SCRAP if row.slot is None else row.slot.place)
        row.launched += 1
        return Chunk(row.next_bytes(cut.steps), cut.steps, row.ticket.request.returns, row, *places)

    def launched(self, row: Row) -> None:
        """Its turn was launched: what that reads is read before any later turn writes."""
        if row.source is not None:
            mine = self._of(row.ticket.key)
            mine.slots.give_back(row.source)
            mine.passing -= 1
            row.source = None

    def release(self, row: Row) -> None:
        """The row runs no more, and nobody goes on from it."""
        self.launched(row)
        if row.slot is not None:
            self._of(row.ticket.key).slots.give_back(row.slot)
            row.slot = None
        if row.session is not None and row.launched:
            self._rest(row.session.held)

    def keep(self, row: Row) -> None:
        """The row was answered: its session goes on from it."""
        assert row.session is not None
        held = row.session.held
        self.forget(held)
        held.slot, row.slot = row.slot, None
        self._rest(held)

    def forget(self, held: Held) -> None:
        """Nobody goes on from it."""
        mine = self._of(held.key)
        mine.resting.pop(held, None)
        if held.slot is not None:
            mine.slots.give_back(held.slot)
        held.slot = held.cold = None

    def read(self, held: Held) -> State | None:
        """A copy on the host; None at the beginning."""
        if held.slot is not None:
            return self._engine.save(held.key, held.slot.place)
        return held.cold

    def count(self) -> None:
        """Bring the gauges up to date."""
        for key, mine in self._models.items():
            self._metrics.state_slots_used.set(mine.slots.used, *key.labels)

    def close(self, model: ModelKey) -> None:
        """No row of it runs, and it has no session."""
        self._models.pop(model, None)

    def _of(self, model: ModelKey) -> _OfModel:
        if model not in self._models:
            count, spare = self._engine.slots(model)
            self._models[model] = _OfModel(Slots(count, spare))
            self._metrics.state_slots.set(count, *model.labels)
        return self._models[model]

    def _source(self, mine: _OfModel, row: Row, first: bool) -> Slot | None:
        """The slot from which a row goes on; None at the beginning."""
        if not first or row.session is None:
            return row.slot
        held = row.session.held
        if held.cold is None:
            return held.slot
        slot = mine.slots.take()
        self._engine.restore(held.key, slot.place, held.cold)
        self._metrics.session_moves.add("slot")
        return slot

    def _make_room(self, mine: _OfModel, row: Row) -> None:
        """The session that has rested longest goes to the host when no slot is free, or else the row's own."""
        if mine.free:
            return
        if mine.resting:
            held, _ = mine.resting.popitem(last=False)
        else:
            assert row.session is not None, "the scheduler asks for no more rows than there is room for"
            held = row.session.held
        assert held.slot is not None
        held.cold = self._engine.save(held.key, held.slot.place)
        mine.slots.give_back(held.slot)
        held.slot = None
        self._metrics.session_moves.add("host")

    def _rest(self, held: Held) -> None:
        if held.slot is not None:
            mine = self._of(held.key)
            mine.resting[held] = None
            mine.resting.move_to_end(held)
