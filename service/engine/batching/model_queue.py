"""The queue of one model: blocks of requests, and single sequences. Pure: nothing here knows a clock."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from service.engine.batching.due import HEAD_START_SECONDS
from service.engine.batching.request_block import RequestBlock, Row
from service.engine.execution.cost_model import Cost
from service.errors import Overloaded
from service.ipc.messages import NO_TENANT, Share

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

    __slots__ = (
        "arrived",
        "begun",
        "deadline",
        "divisible",
        "due",
        "head_start",
        "order",
        "ready",
        "remaining",
        "share",
        "stateful",
    )

    def __init__(
        self,
        steps: int,
        deadline: float,
        priority: int = 0,
        *,
        divisible: bool = True,
        stateful: bool = False,
        share: Share = NO_TENANT,
    ) -> None:
        self.remaining = steps
        self.deadline = deadline
        self.head_start = priority * HEAD_START_SECONDS
        self.divisible = divisible
        self.stateful = stateful
        self.share = share
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

    @property
    def share(self) -> Share:
        return self.block.share


class Rejection(NamedTuple):
    """A request that was rejected because it would have missed its deadline.

    A request with at least as many steps, less time than `needed` and no higher priority would miss its deadline too.
    """

    steps: int
    needed: float
    head_start: float
    message: str
    retry_after: int

    def error(self) -> Overloaded:
        return Overloaded(self.message, retry_after=self.retry_after)

    def covers(self, steps: int, time_left: float, head_start: float) -> bool:
        return steps >= self.steps and time_left < self.needed and head_start <= self.head_start


class QueuedWork:
    """The work of one tenant in a queue.

    count, steps: of its sequences; begun: how many sequences have begun. rejection: the last rejection since the last batch.
    """

    __slots__ = ("begun", "count", "rejection", "steps")

    def __init__(self) -> None:
        self.count = 0
        self.begun = 0
        self.steps = 0
        self.rejection: Rejection | None = None


class ModelQueue(Generic[S]):
    """The queued requests of one model.

    blocks: in the order of their arrival. sequences: in the order of their due times.
    count, steps: of all sequences, those in blocks included, and their remaining steps. tenants: the same by tenant.
    used: seconds that the model's batches have taken, on the scheduler's account.
    reach: running mean of the steps that a batch takes of its longest sequence.
    cost: of the model's batches, as of the last batch.
    """

    __slots__ = ("blocks", "cost", "count", "reach", "sequences", "serial", "steps", "tenants", "used")

    def __init__(self, cost: Cost, used: float) -> None:
        self.blocks: list[RequestBlock] = []
        self.sequences: list[S] = []
        self.count = 0
        self.steps = 0
        self.tenants: dict[str, QueuedWork] = {}
        self.used = used
        self.reach = 0.0
        self.update_cost(cost)

    def update_cost(self, cost: Cost) -> None:
        self.forget_rejections()
        self.cost = cost
        self.serial = cost.fixed / LEAST_STEPS + cost.per_step + cost.per_token
        """Upper bound of the seconds per step: no two sequences share a batch, and every batch takes LEAST_STEPS."""

    def forget_rejections(self) -> None:
        for work in self.tenants.values():
            work.rejection = None

    def rejection_of(self, tenant: str) -> Rejection | None:
        work = self.tenants.get(tenant)
        return None if work is None else work.rejection

    def reject(self, tenant: str, rejection: Rejection) -> None:
        """Keep a rejection while its tenant has work here: most of the following requests can then be rejected at little cost."""
        if tenant in self.tenants:
            self.tenants[tenant].rejection = rejection

    def count_work(self, tenant: str, count: int, steps: int, begun: int = 0) -> None:
        """Count added sequences of a tenant; negative for removed sequences. begun: change in the number that have begun."""
        self.count += count
        self.steps += steps
        work = self.tenants.get(tenant)
        if work is None:
            work = self.tenants[tenant] = QueuedWork()
        work.count += count
        work.steps += steps
        work.begun += begun
        if not work.count:
            del self.tenants[tenant]

    def price(self, sequences: int, steps: int) -> float:
        """Return what sequences with these steps in all would cost, each alone in its batch."""
        return sequences * self.cost.fixed + steps * (self.cost.per_step + self.cost.per_token)

    def price_of(self, request: BlockRequest | S) -> float:
        if isinstance(request, BlockRequest):
            return self.price(request.row.sequences, request.row.steps)
        return self.price(1, request.remaining)

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

    def in_order(self, tenant: str | None = None) -> Iterator[BlockRequest | S]:
        """Return the requests of the blocks and the sequences in the order of their due times, as they are now.

        tenant: return its requests only; None for all tenants.
        """
        blocks, sequences = (self.blocks, self.sequences[:]) if tenant is None else self.of_tenant(tenant)
        if not blocks:
            return iter(sequences)
        requests = _requests_in_order(blocks)
        return heapq.merge(requests, sequences, key=position) if sequences else requests

    def of_tenant(self, tenant: str) -> tuple[list[RequestBlock], list[S]]:
        """Return the blocks and the sequences of a tenant."""
        if len(self.tenants) == 1 and tenant in self.tenants:
            return self.blocks, self.sequences
        return (
            [block for block in self.blocks if block.share.tenant == tenant],
            [sequence for sequence in self.sequences if sequence.share.tenant == tenant],
        )


class WorkByDue:
    """The queued work of one tenant and model while a request or a block arrives, to count what is due after some time.

    The queue is sorted at the first count, and no more than once for all requests of a block.
    """

    def __init__(self, queue: ModelQueue[Any], tenant: str) -> None:
        self._queue = queue
        self._tenant = tenant
        self._accepted: list[tuple[float, Row]] = []

    def accept(self, due: float, row: Row) -> None:
        """Add a request of the block, which is not in the queue yet."""
        self._accepted.append((due, row))

    def later(self, due: float) -> tuple[int, int]:
        """Return how many sequences are due after this time, and their remaining steps."""
        sooner, counts, steps = self._latest_first
        requests = bisect_left(sooner, -due)
        accepted = [row for other_due, row in self._accepted if other_due > due]
        return counts[requests] + sum([row.sequences for row in accepted]), steps[requests] + sum(
            [row.steps for row in accepted]
        )

    @cached_property
    def _latest_first(self) -> tuple[list[float], list[int], list[int]]:
        """Return minus the due time of each queued request, and the sequences and steps of all requests before each."""
        blocks, sequences = self._queue.of_tenant(self._tenant)
        due = np.concatenate([np.array([sequence.due for sequence in sequences]), *[block.due for block in blocks]])
        rows = [row for block in blocks for row in block.rows]
        counts = np.array([1] * len(sequences) + [row.sequences for row in rows], np.int64)
        steps = np.array([sequence.remaining for sequence in sequences] + [row.steps for row in rows], np.int64)
        order = np.argsort(-due)
        return (-due[order]).tolist(), [0, *counts[order].cumsum().tolist()], [0, *steps[order].cumsum().tolist()]


def position(request: QueuedSequence | BlockRequest) -> tuple[float, int]:
    """Sort key of the queue: requests that are due at the same time run in the order of their arrival."""
    return request.due, request.order


def _requests_in_order(blocks: list[RequestBlock]) -> Iterator[BlockRequest]:
    """Return the requests of blocks in the order of their due times."""
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
