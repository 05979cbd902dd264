"""The queue of one model: blocks of requests, and single sequences. Pure: nothing here knows a clock."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from service.engine.batching.due import HEAD_START_SECONDS
from service.engine.batching.request_block import RequestBlock, Row
from service.engine.execution.cost_model import Cost

LEAST_STEPS = 16
"""The fewest steps that a batch takes of a longer sequence. Fewer cost less than the host's work for a batch and each sequence in it."""
REQUESTS_AT_ONCE = 128


class QueuedSequence:
    """One sequence, from its arrival until its last step has been scheduled.

    remaining: steps that have not been scheduled.
    divisible: whether several batches may share its steps.
    stateful: whether it continues from a state or leaves one behind.
    ready: whether every chunk before it has run.
    begun: whether some of its steps have been scheduled.
    due: its position in the queue: arrival plus an allowance, minus the head start of its priority.
    order: how many requests arrived before its request.
    """

    __slots__ = ("arrived", "begun", "deadline", "divisible", "due", "head_start", "order", "ready", "remaining", "stateful")

    def __init__(
        self, steps: int, deadline: float, priority: int = 0, *, divisible: bool = True, stateful: bool = False
    ) -> None:
        self.remaining = steps
        self.deadline = deadline
        self.head_start = priority * HEAD_START_SECONDS
        self.divisible = divisible
        self.stateful = stateful
        self.ready = True
        self.begun = False
        self.arrived = 0.0
        self.due = 0.0
        self.order = 0


S = TypeVar("S", bound=QueuedSequence)


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """One request of a queued block."""

    block: RequestBlock
    index: int

    @property
    def row(self) -> Row:
        return self.block.rows[self.index]

    @property
    def due(self) -> float:
        return float(self.block.due[self.index])

    @property
    def order(self) -> int:
        return int(self.block.orders[self.index])


class Rejection(NamedTuple):
    """A request that was rejected because it would have missed its deadline.

    A request with at least as many steps, less time than `needed` and no higher priority would miss its deadline too.
    """

    steps: int
    needed: float
    head_start: float
    message: str
    retry_after: int

    def covers(self, steps: int, time_left: float, head_start: float) -> bool:
        return steps >= self.steps and time_left < self.needed and head_start <= self.head_start


class ModelQueue(Generic[S]):
    """The queued requests of one model.

    blocks: in the order of their arrival. sequences: in the order of their due times.
    count, steps: of all sequences, those in blocks included, and their remaining steps.
    used: seconds that the model's batches have taken, on the scheduler's account.
    reach: running mean of the steps that a batch takes of its longest sequence.
    cost: of the model's batches, as of the last batch.
    rejection: the last rejection since then.
    """

    __slots__ = ("blocks", "cost", "count", "reach", "rejection", "sequences", "serial", "steps", "used")

    def __init__(self, cost: Cost, used: float) -> None:
        self.blocks: list[RequestBlock] = []
        self.sequences: list[S] = []
        self.count = 0
        self.steps = 0
        self.used = used
        self.reach = 0.0
        self.update_cost(cost)

    def update_cost(self, cost: Cost) -> None:
        self.rejection: Rejection | None = None
        self.cost = cost
        self.serial = cost.fixed / LEAST_STEPS + cost.per_step + cost.per_token
        """Upper bound of the seconds per step: no two sequences share a batch, and every batch takes LEAST_STEPS."""

    def insert(self, sequence: S) -> None:
        """Add a sequence, which the caller counts."""
        sequences = self.sequences
        # Most sequences arrive in due order, and a comparison is cheaper than a search.
        if not sequences or position(sequences[-1]) <= position(sequence):
            sequences.append(sequence)
        else:
            insort(sequences, sequence, key=position)

    def head_start(self) -> float:
        """Return the head start of the request that is due first."""
        if not self.sequences and len({block.head_start for block in self.blocks}) == 1:
            return self.blocks[0].head_start
        first = next(self.in_order())
        return first.block.head_start if isinstance(first, BlockRequest) else first.head_start

    def due_later(self, due: float) -> tuple[int, int]:
        """Return how many sequences are due after this time, and their remaining steps."""
        later = self.sequences[bisect_right(self.sequences, due, key=_due) :]
        count, steps = len(later), sum([sequence.remaining for sequence in later])
        for block in self.blocks:
            for index in np.flatnonzero(block.due > due).tolist():
                count += block.rows[index].sequences
                steps += block.rows[index].steps
        return count, steps

    def in_order(self) -> Iterator[BlockRequest | S]:
        """Return the requests of the blocks and the sequences in the order of their due times, as they are now."""
        if not self.blocks:
            return iter(self.sequences[:])
        requests = self._requests_in_order()
        return heapq.merge(requests, self.sequences[:], key=position) if self.sequences else requests

    def _requests_in_order(self) -> Iterator[BlockRequest]:
        blocks = self.blocks
        due, orders = np.concatenate([block.due for block in blocks]), np.concatenate([block.orders for block in blocks])
        ends = list(accumulate([block.requests for block in blocks]))
        in_order = np.lexsort((orders, due))
        numbers = np.searchsorted(ends, in_order, side="right")
        # In parts, because a batch usually takes only the first requests.
        for begin in range(0, len(in_order), REQUESTS_AT_ONCE):
            part = slice(begin, begin + REQUESTS_AT_ONCE)
            for place, number in zip(in_order[part].tolist(), numbers[part].tolist(), strict=True):
                block = blocks[number]
                yield BlockRequest(block, place - ends[number] + block.requests)


def position(request: QueuedSequence | BlockRequest) -> tuple[float, int]:
    """Sort key of the queue: requests that are due at the same time run in the order of their arrival."""
    return request.due, request.order


def _due(sequence: QueuedSequence) -> float:
    return sequence.due
