"""Ways of batching: what waits, and which turn a free device runs next. Pure: the time is an argument.

One of them is the service's own scheduler. The others are what it is compared with: they run sequences whole, and pad them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from service.engine.batching.scheduler import Limits, Scheduler, Waiting
from service.engine.execution.cost_model import Cost
from service.ipc.messages import ModelKey

MODEL = ModelKey("simulated", "1")
SLOTS = 256
"""Sequences that may be begun and not ended, as the settings have it."""
TIMER_MS = 0.1
"""A batch waits for so long at most to fill up: the least delay above 0 that Triton's Model Analyzer is shown to try. Triton's own default
is 0, which is what Static does."""


class Sequence(Waiting):
    """One sequence from its arrival to its answer."""

    __slots__ = ("answered", "steps")

    def __init__(self, steps: int, arrived: float = 0.0) -> None:
        super().__init__(steps, math.inf)
        self.steps = steps
        self.arrived = arrived
        self.answered = math.nan


class Batch(NamedTuple):
    """longest and tokens as the device computes them, padding included; steps of sequences among them; done: who is answered at its end."""

    longest: int
    tokens: int
    rows: int
    steps: int
    done: list[Sequence]


class Way(Protocol):
    """A queue in front of one device."""

    def add(self, one: Sequence, now: float) -> None: ...

    def next_batch(self, now: float) -> Batch | None:
        """What the device, free now, runs next; None when it is to wait."""

    def wakes(self) -> float:
        """When to ask again, though nothing came."""

    def backlog_seconds(self) -> float:
        """What all that waits is expected to take."""


class Continuous:
    """The service's scheduler."""

    def __init__(self, cost: Cost, limits: Limits, scheduler: type[Scheduler[Sequence]] = Scheduler) -> None:
        self._cost = cost
        self.scheduler = scheduler(limits, self._cost_of, self._room)

    def add(self, one: Sequence, now: float) -> None:
        self.scheduler.add(MODEL, [one], now=now)

    def next_batch(self, now: float) -> Batch | None:
        taken = self.scheduler.next_batch()
        if taken is None:
            return None
        steps = [cut.steps for cut in taken[1]]
        return Batch(max(steps), sum(steps), len(steps), sum(steps), [cut.of for cut in taken[1] if cut.last])

    def wakes(self) -> float:
        return math.inf

    def backlog_seconds(self) -> float:
        return self.scheduler.backlog_seconds()

    def _cost_of(self, model: ModelKey) -> Cost:
        return self._cost

    def _room(self, model: ModelKey) -> int:
        return SLOTS - self.scheduler.begun


class Static:
    """Whatever waits when the device is free, each sequence whole and padded to the longest."""

    def __init__(self, cost: Cost, limits: Limits) -> None:
        self._cost = cost
        self._most = limits.max_batch_sequences
        self._lines: deque[Sequence] = deque()
        self._steps = 0

    def add(self, one: Sequence, now: float) -> None:
        self._lines.append(one)
        self._steps += one.steps

    def next_batch(self, now: float) -> Batch | None:
        return self._padded(self._lines) if self._lines else None

    def wakes(self) -> float:
        return math.inf

    def backlog_seconds(self) -> float:
        rows = sum(map(len, self._queues()))
        batches = -(-rows // self._most)
        return self._cost.times(batches).of(self._steps // max(1, rows), 0) + self._cost.per_token * self._steps

    def _queues(self) -> list[deque[Sequence]]:
        return [self._lines]

    def _padded(self, lines: deque[Sequence]) -> Batch:
        """The first of these lines."""
        batch = [lines.popleft() for _ in range(min(self._most, len(lines)))]
        longest, steps = max([one.steps for one in batch]), sum([one.steps for one in batch])
        self._steps -= steps
        return Batch(longest, longest * len(batch), len(batch), steps, batch)


class Timer(Static):
    """As Static, but a batch that is not full waits until its oldest sequence has waited for so long."""

    def __init__(self, cost: Cost, limits: Limits, seconds: float) -> None:
        super().__init__(cost, limits)
        self._seconds = seconds

    def next_batch(self, now: float) -> Batch | None:
        return self._padded(self._lines) if len(self._lines) >= self._most or self.wakes() <= now else None

    def wakes(self) -> float:
        return self._lines[0].arrived + self._seconds if self._lines else math.inf


class Bucketed(Static):
    """As Static, but a queue for each power of two that lengths are rounded up to, and batches from the one whose first is oldest."""

    def __init__(self, cost: Cost, limits: Limits) -> None:
        super().__init__(cost, limits)
        self._buckets: dict[int, deque[Sequence]] = {}

    def add(self, one: Sequence, now: float) -> None:
        self._buckets.setdefault((one.steps - 1).bit_length(), deque()).append(one)
        self._steps += one.steps

    def next_batch(self, now: float) -> Batch | None:
        waiting = [lines for lines in self._buckets.values() if lines]
        return self._padded(min(waiting, key=lambda lines: lines[0].arrived)) if waiting else None

    def _queues(self) -> list[deque[Sequence]]:
        return list(self._buckets.values())


NAMES = ("continuous", "static", "timer", "bucketed")


def make(name: str, cost: Cost, limits: Limits, timer_seconds: float) -> Way:
    """An empty queue of the way that is named."""
    if name == "timer":
        return Timer(cost, limits, timer_seconds)
    whole: dict[str, Callable[[Cost, Limits], Way]] = {"continuous": Continuous, "static": Static, "bucketed": Bucketed}
    return whole[name](cost, limits)
