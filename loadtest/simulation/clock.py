"""Replicas on a virtual clock: a frontend places each arriving sequence, and a replica with a free device runs the next batch.

A batch takes exactly its predicted time, is chosen when the device is free, and is answered when it ends. Time outside of the engine is not
simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.simulation.policies import BatchingPolicy, SimulatedBatch, SimulatedSequence
from service.engine.execution.cost_model import Cost


class SimulatedFrontend:
    """Places each sequence at the replica with the smallest predicted wait; among equals, at the replica that was chosen longest ago.

    The prediction is that of service.frontend.dispatch.connection.PredictedWait: the last reported backlog of a replica, less the
    time since then, plus the work that was sent after it.
    """

    def __init__(self, replicas: int) -> None:
        self._until: NDArray[np.float64] = np.zeros(replicas)
        self._sent: NDArray[np.float64] = np.zeros(replicas)
        self._chosen: NDArray[np.int64] = np.zeros(replicas, dtype=np.int64)
        self._count = 0

    def choose(self, seconds: float, now: float) -> int:
        """Return the index of the replica for a sequence that takes `seconds` alone."""
        if len(self._until) == 1:
            return 0
        wait = np.maximum(self._until - now, 0.0)
        wait += self._sent
        equal = (wait == wait.min()).nonzero()[0]
        index = int(equal[self._chosen[equal].argmin()])
        self._count += 1
        self._chosen[index] = self._count
        self._sent[index] += seconds
        return index

    def report(self, index: int, backlog_seconds: float, now: float) -> None:
        """Set the backlog of a replica, which includes everything sent until now."""
        self._until[index] = now + backlog_seconds
        self._sent[index] = 0.0


@dataclass(slots=True)
class Replica:
    """One device and its queue. until: end of its batch; wakes: the next scheduled call of `next_batch`."""

    policy: BatchingPolicy
    batch: SimulatedBatch | None = None
    until: float = 0.0
    wakes: float = math.inf


@dataclass(slots=True)
class Totals:
    """Totals from the first to the last arrival. span: seconds; busy: seconds in which devices worked; batches and their rows.

    left_at_half, left_at_end: steps that have not run when half of the sequences have arrived, and when all have.
    """

    replicas: int
    span: float
    busy: float = 0.0
    batches: int = 0
    rows: int = 0
    left_at_half: int = 0
    left_at_end: int = 0


class Clock:
    """One run, in which every sequence arrives at its time and is answered once."""

    def __init__(self, policies: Sequence[BatchingPolicy], cost: Cost, sequences: Sequence[SimulatedSequence]) -> None:
        """sequences: in the order of their arrival."""
        self._replicas = [Replica(policy) for policy in policies]
        self._frontend = SimulatedFrontend(len(policies))
        self._cost = cost
        self._sequences = sequences
        self._events: list[tuple[float, int]] = []
        """Times at which a replica's batch ends or its policy wakes, with the index of the replica."""
        self._left = 0
        self.totals = Totals(len(policies), span=sequences[-1].arrived)

    def begin_with(self, index: int, sequence: SimulatedSequence) -> None:
        """Add a sequence that a replica has already started. It waits for the first arrival there: alone, it would take whole budgets,
        which is rare under constant load."""
        self._replicas[index].policy.add(sequence, 0.0)
        self._left += sequence.remaining

    def run(self) -> Totals:
        """Run until every sequence is answered."""
        half, last = len(self._sequences) // 2, len(self._sequences) - 1
        touched: set[int] = set()
        for number, sequence in enumerate(self._sequences):
            self._advance(sequence.arrived)
            touched.add(self._arrive(sequence))
            if number == half:
                self.totals.left_at_half = self._left
            # Simultaneous arrivals are read together.
            if number == last or self._sequences[number + 1].arrived > sequence.arrived:
                for index in touched:
                    self._begin(index, sequence.arrived)
                touched.clear()
        self.totals.left_at_end = self._left
        self._advance(math.inf)
        return self.totals

    def _arrive(self, sequence: SimulatedSequence) -> int:
        index = self._frontend.choose(self._cost.of(sequence.steps, sequence.steps), sequence.arrived)
        self._replicas[index].policy.add(sequence, sequence.arrived)
        self._left += sequence.steps
        return index

    def _advance(self, moment: float) -> None:
        """Process all events before this moment."""
        while self._events and self._events[0][0] < moment:
            now, index = heapq.heappop(self._events)
            replica = self._replicas[index]
            if replica.batch is None:
                self._begin(index, now)
            elif replica.until == now:
                self._end(index, replica.batch, now)

    def _begin(self, index: int, now: float) -> None:
        """Start the next batch of a replica if its device is free and its policy has one."""
        replica = self._replicas[index]
        if replica.batch is not None:
            return
        replica.batch = batch = replica.policy.next_batch(now)
        if batch is None:
            if (wakes := replica.policy.wakes()) < math.inf and wakes != replica.wakes:
                replica.wakes = wakes
                heapq.heappush(self._events, (wakes, index))
            return
        seconds = self._cost.of(batch.longest, batch.tokens)
        replica.until = now + seconds
        heapq.heappush(self._events, (replica.until, index))
        totals = self.totals
        if now < totals.span:
            totals.busy += min(seconds, totals.span - now)
            totals.batches += 1
            totals.rows += batch.rows

    def _end(self, index: int, batch: SimulatedBatch, now: float) -> None:
        replica = self._replicas[index]
        replica.batch = None
        self._left -= batch.steps
        for sequence in batch.done:
            assert math.isnan(sequence.answered), "a sequence is answered once"
            sequence.answered = now
        self._begin(index, now)
        if batch.done and len(self._replicas) > 1:
            running = replica.until - now if replica.batch is not None else 0.0
            self._frontend.report(index, running + replica.policy.backlog_seconds(), now)
