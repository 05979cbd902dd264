"""Replicas on a virtual clock: sequences come, a front places each, and a replica whose device is free runs the next turn.

A turn takes exactly what it is predicted to take, is chosen when the device is free, and its answers are there when it ends. Nothing is
reckoned for what lies before and after an engine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.simulation.ways import Batch, Sequence, Way
from service.engine.execution.cost_model import Cost


class Frontend:
    """Places each sequence at the replica with the smallest predicted wait, of equals at the one that was chosen longest ago.

    Its estimate is that of service.frontend.dispatch.connection.PredictedWait: the backlog that a replica last reported,
    less the time since, and what it was sent after that.
    """

    def __init__(self, replicas: int) -> None:
        self._until: NDArray[np.float64] = np.zeros(replicas)
        self._sent: NDArray[np.float64] = np.zeros(replicas)
        self._chosen: NDArray[np.int64] = np.zeros(replicas, dtype=np.int64)
        self._count = 0

    def place(self, seconds: float, now: float) -> int:
        """For a sequence that takes so long alone."""
        if len(self._until) == 1:
            return 0
        wait = np.maximum(self._until - now, 0.0)
        wait += self._sent
        equal = (wait == wait.min()).nonzero()[0]
        place = int(equal[self._chosen[equal].argmin()])
        self._count += 1
        self._chosen[place] = self._count
        self._sent[place] += seconds
        return place

    def report(self, place: int, backlog_seconds: float, now: float) -> None:
        """It counts all that was sent until now: the way between them takes no time."""
        self._until[place] = now + backlog_seconds
        self._sent[place] = 0.0


@dataclass(slots=True)
class Replica:
    """One device and its queue. until: when its turn ends, 0 while it has none; wakes: when it asks for one, if nothing comes before."""

    way: Way
    batch: Batch | None = None
    until: float = 0.0
    wakes: float = math.inf


@dataclass(slots=True)
class Totals:
    """While sequences came: seconds in which devices worked, turns that began, rows in them, and steps that were still to run when half of
    the sequences and when all of them had come."""

    replicas: int
    span: float
    worked: float = 0.0
    batches: int = 0
    rows: int = 0
    left_at_half: int = 0
    left_at_end: int = 0


class Clock:
    """One run: every sequence comes when it says, and is answered once."""

    def __init__(self, ways: Many[Way], cost: Cost, sequences: Many[Sequence]) -> None:
        """sequences: in the order in which they come."""
        self._replicas = [Replica(way) for way in ways]
        self._frontend = Frontend(len(ways))
        self._cost = cost
        self._sequences = sequences
        self._events: list[tuple[float, int]] = []
        """When a replica's turn ends, or its way wants to be asked."""
        self._left = 0
        self.totals = Totals(len(ways), span=sequences[-1].arrived)

    def begin_with(self, place: int, one: Sequence) -> None:
        """It is there when the first sequence comes to this replica, and waits for that: alone it would go on by a whole budget, which it
        does not where there is always somebody else."""
        self._replicas[place].way.add(one, 0.0)
        self._left += one.left

    def run(self) -> Totals:
        """Until the last is answered."""
        half, last = len(self._sequences) // 2, len(self._sequences) - 1
        touched: set[int] = set()
        for number, one in enumerate(self._sequences):
            self._pass_until(one.arrived)
            touched.add(self._arrive(one))
            if number == half:
                self.totals.left_at_half = self._left
            # What comes in one instant is read at once.
            if number == last or self._sequences[number + 1].arrived > one.arrived:
                for place in touched:
                    self._begin(place, self._replicas[place], one.arrived)
                touched.clear()
        self.totals.left_at_end = self._left
        self._pass_until(math.inf)
        return self.totals

    def _arrive(self, one: Sequence) -> int:
        place = self._frontend.place(self._cost.of(one.steps, one.steps), one.arrived)
        self._replicas[place].way.add(one, one.arrived)
        self._left += one.steps
        return place

    def _pass_until(self, moment: float) -> None:
        """All that happens before this moment."""
        while self._events and self._events[0][0] < moment:
            now, place = heapq.heappop(self._events)
            replica = self._replicas[place]
            if replica.batch is not None and replica.until == now:
                self._end(place, replica, now)
            elif replica.batch is None:
                self._begin(place, replica, now)

    def _begin(self, place: int, replica: Replica, now: float) -> None:
        """The next turn, if the device is free and there is one."""
        if replica.batch is not None:
            return
        replica.batch = batch = replica.way.next_batch(now)
        if batch is None:
            if (wakes := replica.way.wakes()) < math.inf and wakes != replica.wakes:
                replica.wakes = wakes
                heapq.heappush(self._events, (wakes, place))
            return
        seconds = self._cost.of(batch.longest, batch.tokens)
        replica.until = now + seconds
        heapq.heappush(self._events, (replica.until, place))
        totals = self.totals
        if now < totals.span:
            totals.worked += min(seconds, totals.span - now)
            totals.batches += 1
            totals.rows += batch.rows

    def _end(self, place: int, replica: Replica, now: float) -> None:
        batch, replica.batch = replica.batch, None
        assert batch is not None
        self._left -= batch.steps
        for one in batch.done:
            assert math.isnan(one.answered), "a sequence is answered once"
            one.answered = now
        self._begin(place, replica, now)
        if batch.done and len(self._replicas) > 1:
            running = replica.until - now if replica.batch is not None else 0.0
            self._frontend.report(place, running + replica.way.backlog_seconds(), now)
