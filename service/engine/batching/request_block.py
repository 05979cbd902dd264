"""Requests that arrived together from one frontend, in columns: while they run as a whole, no request is an object.

A block has stateless requests of one model, tenant and priority that return the same outputs. Its columns are the bytes in which the
frontend sent them. Pure: nothing here knows a device, a socket or a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.due import HEAD_START_SECONDS, allowance, allowances
from service.engine.execution.cost_model import Cost
from service.ipc.blocks import COUNT, COUNT_BYTES, DEADLINE, ID, ID_BYTES, Columns
from service.ipc.messages import NO_TENANT, ModelKey, Returns, Share

PLAIN = Returns()


class Row(NamedTuple):
    """One request of a block.

    first, sequences: index of its first sequence, and their number; steps: of all of them together; shortest, longest: of one.
    """

    first: int
    sequences: int
    steps: int
    shortest: int
    longest: int


class RequestBlock:
    """Whole requests without a state, with the totals that the scheduler needs.

    steps: of all sequences together; shortest, longest: steps of one sequence; deadline: the earliest.
    divisible: whether several batches may share the steps of a sequence.
    owner: any object; the batcher answers and refuses the requests through it.
    timed: whether the answers tell how their batches ran.
    arrived, order: when the block was queued, and how many requests arrived before it.
    """

    def __init__(
        self,
        model: ModelKey,
        columns: Columns,
        *,
        steps: int,
        shortest: int,
        longest: int,
        deadline: float,
        priority: int = 0,
        returns: Returns = PLAIN,
        share: Share = NO_TENANT,
        divisible: bool = True,
        owner: Any = None,
        timed: bool = False,
    ) -> None:
        self.model = model
        self.columns = columns
        self.requests = len(columns.ids) // ID_BYTES
        self.sequences = len(columns.lengths) // COUNT_BYTES
        self.steps = steps
        self.shortest = shortest
        self.longest = longest
        self.deadline = deadline
        self.priority = priority
        self.head_start = priority * HEAD_START_SECONDS
        self.returns = returns
        self.share = share
        self.divisible = divisible
        self.owner = owner
        self.timed = timed
        self.arrived = 0.0
        self.order = 0
        self._cost: Cost | None = None

    def arrive(self, now: float, order: int, cost: Cost | None) -> None:
        """Note the arrival. cost: of the model's batches; without it requests are due in the order of their arrival."""
        self.arrived, self.order, self._cost = now, order, cost

    @cached_property
    def ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.columns.ids, ID).tolist()
        return ids

    @cached_property
    def lengths(self) -> list[int]:
        """Return the steps of each sequence."""
        lengths: list[int] = np.frombuffer(self.columns.lengths, COUNT).tolist()
        return lengths

    @cached_property
    def deadlines(self) -> NDArray[np.float64]:
        return np.frombuffer(self.columns.deadlines, DEADLINE)

    @cached_property
    def rows(self) -> list[Row]:
        """Return the requests."""
        if self.sequences == self.requests:
            return [Row(index, 1, steps, steps, steps) for index, steps in enumerate(self.lengths)]
        rows, first = [], 0
        for count in np.frombuffer(self.columns.counts, COUNT).tolist():
            lengths = self.lengths[first : first + count]
            rows.append(Row(first, count, sum(lengths), min(lengths), max(lengths)))
            first += count
        return rows

    @cached_property
    def due(self) -> NDArray[np.float64]:
        """Return when each request is due."""
        start = self.arrived - self.head_start
        if self._cost is None:
            return np.full(self.requests, start)
        if self.requests == 1:
            return np.array([start + allowance(self._cost, self.longest, self.deadline - self.arrived)])
        return start + allowances(self._cost, self._longest_of_requests(), self.deadlines - self.arrived)

    def _longest_of_requests(self) -> NDArray[Any]:
        lengths = np.frombuffer(self.columns.lengths, COUNT)
        if self.sequences == self.requests:
            return lengths
        counts = np.frombuffer(self.columns.counts, COUNT)
        longest: NDArray[Any] = np.maximum.reduceat(lengths, counts.cumsum() - counts)
        return longest

    @cached_property
    def orders(self) -> Sequence[int]:
        """Return how many requests arrived before each request: requests that are due at the same time run in this order."""
        return range(self.order, self.order + self.requests)

    @cached_property
    def _step_ends(self) -> list[int]:
        """Return how many steps the sequences before each sequence have, and after the last."""
        return list(accumulate(self.lengths, initial=0))

    def select(self, indices: Sequence[int]) -> RequestBlock:
        """Return a block of some of the requests. indices: ascending, at least one."""
        if len(indices) == self.requests:
            return self
        rows, deadlines = [self.rows[index] for index in indices], self.deadlines[indices]
        block = RequestBlock(
            self.model,
            self._columns_of(rows, indices, deadlines),
            steps=sum([row.steps for row in rows]),
            shortest=min([row.shortest for row in rows]),
            longest=max([row.longest for row in rows]),
            deadline=min(deadlines.tolist()),
            priority=self.priority,
            returns=self.returns,
            share=self.share,
            divisible=self.divisible,
            owner=self.owner,
            timed=self.timed,
        )
        block.arrive(self.arrived, self.order, self._cost)
        block.orders = [self.orders[index] for index in indices]
        return block

    def without(self, indices: Collection[int]) -> RequestBlock | None:
        """Return a block of the other requests, None if there are none."""
        if not indices:
            return self
        if len(indices) == self.requests:
            return None
        gone = set(indices)
        return self.select([index for index in range(self.requests) if index not in gone])

    def _columns_of(self, rows: list[Row], indices: Sequence[int], deadlines: NDArray[np.float64]) -> Columns:
        ids, counts = np.frombuffer(self.columns.ids, ID), np.frombuffer(self.columns.counts, COUNT)
        ends, size, lengths = self._step_ends, COUNT_BYTES, memoryview(self.columns.lengths)
        values, step_bytes = memoryview(self.columns.values), len(self.columns.values) // self.steps
        spans = [(row.first, row.first + row.sequences) for row in rows]
        return Columns(
            ids[indices].tobytes(),
            deadlines.tobytes(),
            counts[indices].tobytes(),
            b"".join([lengths[size * first : size * end] for first, end in spans]),
            b"".join([values[step_bytes * ends[first] : step_bytes * ends[end]] for first, end in spans]),
        )
