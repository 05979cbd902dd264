"""Batching policies: which waiting sequences a free device runs next. Pure: the time is an argument.

One policy is the scheduler of the service. The others are its baselines: they run whole sequences and pad them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from service.engine.batching.batch_builder import SchedulerLimits
from service.engine.batching.model_queue import QueuedSequence
from service.engine.batching.scheduler import Scheduler
from service.engine.execution.cost_model import Cost
from service.ipc.messages import ModelKey

MODEL = ModelKey("simulated", "1")
SLOTS = 256
"""State slots, as in the default settings: sequences that have started and not finished."""
TIMER_MS = 0.1
"""Longest wait of a partial batch: the smallest delay above 0 in the examples of Triton's Model Analyzer. Triton's default is 0, which is
the policy Static."""


class SimulatedSequence(QueuedSequence):
    """One sequence from its arrival to its answer."""

    __slots__ = ("answered", "steps")

    def __init__(self, steps: int, arrived: float = 0.0) -> None:
        super().__init__(steps, math.inf)
        self.steps = steps
        self.arrived = arrived
        self.answered = math.nan


class SimulatedBatch(NamedTuple):
    """A batch on the device. longest, tokens: padding included; steps: padding excluded; done: sequences that end with it."""

    longest: int
    tokens: int
    rows: int
    steps: int
    done: list[SimulatedSequence]


class BatchingPolicy(Protocol):
    """A queue in front of one device."""

    def add(self, sequence: SimulatedSequence, now: float) -> None: ...

    def next_batch(self, now: float) -> SimulatedBatch | None:
        """Return the next batch of a free device, or None if the device has to wait."""

    def wakes(self) -> float:
        """Return the time at which to call `next_batch` again without a new arrival."""

    def backlog_seconds(self) -> float:
        """Return the expected duration of all waiting work."""


class Continuous:
    """The scheduler of the service."""

    def __init__(self, cost: Cost, limits: SchedulerLimits, scheduler: type[Scheduler[SimulatedSequence]] = Scheduler) -> None:
        self._cost = cost
        self.scheduler = scheduler(limits, self._cost_of, self._free_slots)

    def add(self, sequence: SimulatedSequence, now: float) -> None:
        self.scheduler.add(MODEL, [sequence], now=now)

    def next_batch(self, now: float) -> SimulatedBatch | None:
        scheduled = self.scheduler.next_batch()
        if scheduled is None:
            return None
        steps = [part.steps for part in scheduled.parts]
        done = [part.sequence for part in scheduled.parts if part.last]
        return SimulatedBatch(max(steps), sum(steps), len(steps), sum(steps), done)

    def wakes(self) -> float:
        return math.inf

    def backlog_seconds(self) -> float:
        return self.scheduler.backlog_seconds()

    def _cost_of(self, model: ModelKey) -> Cost:
        return self._cost

    def _free_slots(self, model: ModelKey) -> int:
        return SLOTS - self.scheduler.begun


class Static:
    """Runs the sequences that wait when the device is free, each sequence whole and padded to the longest."""

    def __init__(self, cost: Cost, limits: SchedulerLimits) -> None:
        self._cost = cost
        self._max_rows = limits.max_batch_sequences
        self._queue: deque[SimulatedSequence] = deque()
        self._steps = 0

    def add(self, sequence: SimulatedSequence, now: float) -> None:
        self._queue.append(sequence)
        self._steps += sequence.steps

    def next_batch(self, now: float) -> SimulatedBatch | None:
        return self._padded(self._queue) if self._queue else None

    def wakes(self) -> float:
        return math.inf

    def backlog_seconds(self) -> float:
        rows = sum(map(len, self._queues()))
        batches = -(-rows // self._max_rows)
        return self._cost.times(batches).of(self._steps // max(1, rows), 0) + self._cost.per_token * self._steps

    def _queues(self) -> list[deque[SimulatedSequence]]:
        return [self._queue]

    def _padded(self, queue: deque[SimulatedSequence]) -> SimulatedBatch:
        """Remove the first sequences of a queue and return them as a batch."""
        sequences = [queue.popleft() for _ in range(min(self._max_rows, len(queue)))]
        lengths = [sequence.steps for sequence in sequences]
        self._steps -= sum(lengths)
        return SimulatedBatch(max(lengths), max(lengths) * len(lengths), len(lengths), sum(lengths), sequences)


class Timer(Static):
    """Static batching in which a partial batch waits until its oldest sequence has waited for `seconds`."""

    def __init__(self, cost: Cost, limits: SchedulerLimits, seconds: float) -> None:
        super().__init__(cost, limits)
        self._seconds = seconds

    def next_batch(self, now: float) -> SimulatedBatch | None:
        return self._padded(self._queue) if len(self._queue) >= self._max_rows or self.wakes() <= now else None

    def wakes(self) -> float:
        return self._queue[0].arrived + self._seconds if self._queue else math.inf


class Bucketed(Static):
    """Static batching with a queue for each power of two of lengths. The queue with the oldest first sequence runs next."""

    def __init__(self, cost: Cost, limits: SchedulerLimits) -> None:
        super().__init__(cost, limits)
        self._buckets: dict[int, deque[SimulatedSequence]] = {}

    def add(self, sequence: SimulatedSequence, now: float) -> None:
        self._buckets.setdefault((sequence.steps - 1).bit_length(), deque()).append(sequence)
        self._steps += sequence.steps

    def next_batch(self, now: float) -> SimulatedBatch | None:
        waiting = [queue for queue in self._buckets.values() if queue]
        return self._padded(min(waiting, key=lambda queue: queue[0].arrived)) if waiting else None

    def _queues(self) -> list[deque[SimulatedSequence]]:
        return list(self._buckets.values())


NAMES = ("continuous", "static", "timer", "bucketed")


def make(name: str, cost: Cost, limits: SchedulerLimits, timer_seconds: float) -> BatchingPolicy:
    """Return an empty queue with the named policy."""
    if name == "timer":
        return Timer(cost, limits, timer_seconds)
    policies: dict[str, Callable[[Cost, SchedulerLimits], BatchingPolicy]] = {
        "continuous": Continuous,
        "static": Static,
        "bucketed": Bucketed,
    }
    return policies[name](cost, limits)
