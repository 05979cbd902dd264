"""One request's promise of one answer, the rows of which it is made, and the sessions of which they are chunks. Nothing here knows a queue
or an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from service.engine.batching.scheduler import Waiting
from service.engine.batching.state_slots import Slot
from service.engine.execution.in_flight import ChunkResult
from service.engine.session_state import State
from service.errors import ServiceError
from service.ipc.messages import Answer, ModelKey, Request

Reply = Callable[[Answer, list[bytes]], None]
Refuse = Callable[[ServiceError], None]
ARRAYS = ("scores", "picks", "embedding", "sequence")


@dataclass(slots=True, eq=False)
class Held:
    """Where one session's state is: in a slot, on the host, or, while neither, at the beginning."""

    key: ModelKey
    slot: Slot | None = None
    cold: State | None = None


@dataclass(slots=True, eq=False)
class Session:
    """One sequence that comes in chunks. rows: the chunks that have come and are not answered, of which only the first runs; steps: of all
    chunks that were answered; touched: when it was last left without a chunk."""

    id: str
    held: Held
    record: int
    steps: int = 0
    touched: float = 0.0
    rows: deque[Row] = field(default_factory=deque)

    @property
    def key(self) -> ModelKey:
        return self.held.key

    @property
    def ending(self) -> bool:
        """Whether its last chunk has come."""
        return bool(self.rows) and not self.rows[-1].keeps


class Row(Waiting):
    """One sequence of a request on its way through turns. Its chunks end in the order in which they were launched.

    data: the steps that are left as bytes, so many a step; slot: where its state is after the last turn that it was in; source: where that
    turn reads it, until it was launched; session: what it is a chunk of, whose state it goes on from.
    """

    __slots__ = ("data", "ended", "launched", "parts", "session", "slot", "source", "step_bytes", "ticket")

    def __init__(
        self,
        ticket: Ticket,
        data: memoryview,
        steps: int,
        *,
        step_bytes: int,
        cuts: bool,
        session: Session | None = None,
    ) -> None:
        request = ticket.request
        super().__init__(steps, request.deadline, request.priority, cuts=cuts, stateful=session is not None)
        self.ticket = ticket
        self.data = data
        self.step_bytes = step_bytes
        self.session = session
        self.slot: Slot | None = None
        self.source: Slot | None = None
        self.launched = 0
        self.ended = 0
        self.parts: list[ChunkResult] = []

    @property
    def keeps(self) -> bool:
        """Whether somebody goes on from the state after it."""
        return self.session is not None and not self.ticket.request.session_ends

    def next_bytes(self, steps: int) -> memoryview:
        """Its next steps, as many as that; they do not come again."""
        mine, self.data = self.data[: steps * self.step_bytes], self.data[steps * self.step_bytes :]
        return mine

    def take(self, encoded: ChunkResult) -> bool:
        """What one of its chunks gave; true when that was the last one."""
        self.parts.append(encoded)
        self.ended += 1
        return not self.left and self.ended == self.launched


class Ticket:
    """It has ended once it was answered, refused or given up."""

    def __init__(self, request: Request, reply: Reply, refuse: Refuse) -> None:
        self.request = request
        self.key = request.key
        self._reply = reply
        self._refuse = refuse
        self._missing = 0
        self.rows: list[Row] = []
        self.ended = False

    def open(self, rows: list[Row]) -> None:
        """These are to be answered."""
        self.rows, self._missing = rows, len(rows)

    def row_done(self) -> bool:
        """One more of its rows has all that it is to give; true when it was the last one."""
        self._missing -= 1
        return not self._missing

    def answer(self, session_steps: int = 0) -> None:
        """Every row has all that it is to give. session_steps: how far the session is now, of which it was a chunk."""
        shapes, data = {}, []
        whole = all(len(row.parts) == 1 for row in self.rows)
        first = self.rows[0].parts[-1]
        for place, name in enumerate(ARRAYS):
            if first[place] is None:
                continue
            given: list[Any] = [row.parts[0][place] for row in self.rows] if whole else _given(self.rows, place)
            shapes[name] = (sum([len(one) for one in given]), *given[0].shape[1:])
            data += [one.tobytes() for one in given]
        steps = [sum([part.steps for part in row.parts]) for row in self.rows]
        self._end()
        self._reply(Answer(**shapes, steps=steps, session_steps=session_steps), data)

    def refuse(self, error: ServiceError) -> None:
        self._end()
        self._refuse(error)

    def give_up(self) -> None:
        """Its caller has gone; its batch-mates have not."""
        self._end()

    def _end(self) -> None:
        assert not self.ended, "a ticket ends once"
        self.ended = True
        # Rows know their ticket: apart, both go at once, and the collector has nothing to look for.
        self.rows = []


def _given(rows: list[Row], place: int) -> list[Any]:
    """What the chunks of rows gave of one kind: all of it where there is a line for each step, else what the last one says of them all."""
    per_step = ARRAYS[place] == "sequence" or (rows[0].parts[-1].per_step and ARRAYS[place] != "embedding")
    return [part[place] for row in rows for part in (row.parts if per_step else row.parts[-1:])]
