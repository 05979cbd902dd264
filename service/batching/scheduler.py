"""Who runs in the next turn. Pure: the time is an argument, and nothing here knows a device, a socket or a caller.

A batch forms because the engine is busy, never because a timer runs: whatever waits when a turn ends may be in the next one.
Each level of priority is worth a fixed head start in time, so that higher levels go first and no level starves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from service.engine.turn import Chunk, Turn
from service.errors import Overloaded
from service.sequence import ModelKey

HEAD_START_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """One chunk in the queue. `due` orders it: arrival less its priority's head start; `arrived` is when it came."""

    due: float
    arrived: float
    deadline: float
    chunk: Chunk


class Scheduler:
    """A bounded queue per model and the rule by which turns are taken from it."""

    def __init__(self, *, max_waiting: int, max_turn_rows: int, max_turn_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_turn_rows = max_turn_rows
        self._max_turn_tokens = max_turn_tokens
        self._queues: dict[ModelKey, list[Waiting]] = {}
        self._steps: dict[ModelKey, int] = {}
        """Of all sequences in a queue."""
        self.waiting = 0

    def add(self, model: ModelKey, chunks: list[Chunk], *, now: float, deadline: float, priority: int) -> None:
        """Queue all chunks of one request, or none: raises Overloaded when they do not fit."""
        if self.waiting + len(chunks) > self._max_waiting:
            raise Overloaded(
                f"{self.waiting} sequences wait, this request has {len(chunks)} and "
                f"SEQSERVE_MAX_WAITING is {self._max_waiting}: retry later, or raise SEQSERVE_MAX_WAITING",
                retry_after=1,
            )
        for chunk in chunks:
            queue = self._queues.setdefault(model, [])
            insort(queue, Waiting(now - priority * HEAD_START_SECONDS, now, deadline, chunk), key=_due)
        self._steps[model] = self._steps.get(model, 0) + sum(chunk.steps for chunk in chunks)
        self.waiting += len(chunks)

    def drop(self, owner: object) -> int:
        """Take every waiting chunk of one owner out of the queue; returns how many there were."""
        return len(self._take(lambda one: one.chunk.owner is owner))

    def drop_late(self, now: float) -> list[Chunk]:
        """Take out and return what has passed its deadline, so that nothing is computed for it."""
        return [one.chunk for one in self._take(lambda one: one.deadline <= now)]

    def waiting_by_model(self) -> list[tuple[ModelKey, int, int]]:
        """How many sequences of each model wait, and how many steps they have together."""
        return [(model, len(queue), self._steps[model]) for model, queue in self._queues.items()]

    def next_turn(self) -> tuple[Turn, list[float]] | None:
        """The longest-due chunks of the model that is due first, and when each of them came; None when nothing waits."""
        if not self._queues:
            return None
        model = min(self._queues, key=lambda key: self._queues[key][0].due)
        queue = self._queues[model]
        taken = queue[: self._fitting(queue)]
        self._keep(model, queue[len(taken) :], taken)
        return Turn(model, [one.chunk for one in taken]), [one.arrived for one in taken]

    def _fitting(self, queue: list[Waiting]) -> int:
        """How many from the front fit into one turn; at least one, however long."""
        tokens = 0
        for count, one in enumerate(queue[: self._max_turn_rows]):
            tokens += one.chunk.steps
            if count and tokens > self._max_turn_tokens:
                return count
        return min(len(queue), self._max_turn_rows)

    def _take(self, unwanted: Callable[[Waiting], bool]) -> list[Waiting]:
        """Out of all queues."""
        gone: list[Waiting] = []
        for model, queue in list(self._queues.items()):
            found = [one for one in queue if unwanted(one)]
            if found:
                self._keep(model, [one for one in queue if not unwanted(one)], found)
                gone += found
        return gone

    def _keep(self, model: ModelKey, rest: list[Waiting], gone: list[Waiting]) -> None:
        """Both are the queue as it was."""
        self.waiting -= len(gone)
        if rest:
            self._queues[model] = rest
            self._steps[model] -= sum(one.chunk.steps for one in gone)
        else:
            del self._queues[model], self._steps[model]


def _due(waiting: Waiting) -> float:
    return waiting.due
