"""The queue of one model: blocks of requests, and single sequences. Pure: nothing here knows a clock."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.due import HEAD_START_SECONDS
from service.engine.batching.request_block import SEQUENCES, STEPS, QueuedBlock
from service.engine.batching.tenant_queue import BlockRequest, Rejection, TenantQueue
from service.engine.execution.cost_model import Cost
from service.ipc.messages.inference import NO_TENANT, Share
from service.ipc.messages.models import ModelKey

LEAST_STEPS = 16
"""The fewest steps that a batch takes of a longer sequence. Fewer cost less than the host's work for a batch and each sequence in it."""


@dataclass(slots=True, eq=False)
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

    remaining: int
    deadline: float
    priority: int = 0
    _: KW_ONLY
    divisible: bool = True
    stateful: bool = False
    share: Share = NO_TENANT
    ready: bool = True
    begun: bool = False
    arrived: float = 0.0
    due: float = 0.0
    order: int = 0

    @property
    def head_start(self) -> float:
        return self.priority * HEAD_START_SECONDS


S = TypeVar("S", bound=QueuedSequence)


@dataclass(slots=True, eq=False)
class ModelQueue(Generic[S]):
    """The queued requests of one model.

    sequences: not in blocks, in the order of their due times.
    count, steps: of all sequences, those in blocks included, and their remaining steps. tenants: the same by tenant.
    longest: no sequence that has been queued had more steps.
    used: seconds that the model's batches have taken, on the scheduler's account.
    reach: running mean of the steps that a batch takes of its longest sequence.
    cost: of the model's batches, as of the last batch.
    """

    model: ModelKey
    cost: Cost
    used: float
    sequences: list[S] = field(default_factory=list)
    count: int = 0
    steps: int = 0
    longest: int = 0
    tenants: dict[str, TenantQueue] = field(default_factory=dict)
    reach: float = 0.0

    def forget_rejections(self) -> None:
        for tenant_queue in self.tenants.values():
            tenant_queue.rejection = None

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
            work = self.tenants[tenant] = TenantQueue()
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
            return self.price(request.sequences, request.steps)
        return self.price(1, request.remaining)

    def insert(self, sequence: S) -> None:
        """Add a sequence, which the caller counts."""
        sequences = self.sequences
        # Most sequences arrive in due order, and a comparison is cheaper than a search.
        if not sequences or position(sequences[-1]) <= position(sequence):
            sequences.append(sequence)
        else:
            insort(sequences, sequence, key=position)

    @property
    def blocks(self) -> list[QueuedBlock]:
        """Return the blocks in the order of their arrival."""
        if len(self.tenants) == 1:
            [work] = self.tenants.values()
            return work.blocks()
        blocks = [block for work in self.tenants.values() for block in work.blocks()]
        return sorted(blocks, key=lambda block: block.order)

    def keep_blocks(self, blocks: Sequence[QueuedBlock]) -> None:
        """Replace all blocks. blocks: in the order of their arrival. The caller has counted the difference."""
        for tenant, work in self.tenants.items():
            work.keep([block for block in blocks if block.share.tenant == tenant])

    def head_start(self) -> float:
        """Return the head start of the request that is due first."""
        first = next(self.in_order())
        return first.block.head_start if isinstance(first, BlockRequest) else first.head_start

    def in_order(self, tenant: str | None = None) -> Iterator[BlockRequest | S]:
        """Return the requests of the blocks and the sequences in the order of their due times, as they are now.

        tenant: return its requests only; None for all tenants.
        """
        works = self.tenants.values() if tenant is None else [self.tenants[tenant]]
        sequences = self.sequences[:] if tenant is None else self.sequences_of(tenant)
        parts: list[Iterator[BlockRequest | S]] = [work.requests() for work in works]
        if sequences:
            parts.append(iter(sequences))
        return parts[0] if len(parts) == 1 else heapq.merge(*parts, key=position)

    def sequences_of(self, tenant: str) -> list[S]:
        """Return the sequences of a tenant that are not in blocks."""
        if len(self.tenants) == 1 and tenant in self.tenants:
            return self.sequences[:]
        return [sequence for sequence in self.sequences if sequence.share.tenant == tenant]


class WorkByDue:
    """The queued work of one tenant and model while a request or a block arrives, to count what is due after some time.

    The queue is put in order at the first count, and no more than once for all requests of a block.
    """

    def __init__(self, queue: ModelQueue[Any], tenant: str, block: QueuedBlock | None = None) -> None:
        """block: the arriving block. `accept` counts its requests as queued."""
        self._queue = queue
        self._tenant = tenant
        self._block = block
        # Floating point, because a product of integers is slow.
        self._accepted = np.zeros((block.requests if block is not None else 0, 2))

    def accept(self, requests: int | slice) -> None:
        """Count these requests of the block as queued."""
        assert self._block is not None
        self._accepted[requests] = self._block.sizes[requests, [SEQUENCES, STEPS]]

    def later(self, due: float) -> tuple[int, int]:
        """Return how many sequences are due after this time, and their remaining steps."""
        in_order, later = self._later
        counts, steps = later[in_order.searchsorted(due, side="right")].tolist()
        if self._block is not None:
            accepted_counts, accepted_steps = ((self._block.due > due).astype(float) @ self._accepted).tolist()
            return counts + int(accepted_counts), steps + int(accepted_steps)
        return counts, steps

    @cached_property
    def _later(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the due times of the queued requests in order, and the sequences and steps from each to the last, (requests + 1, 2)."""
        sequences, queued = self._queue.sequences_of(self._tenant), self._queue.tenants.get(self._tenant)
        due, work = (TenantQueue() if queued is None else queued).work()
        if sequences:
            due = np.concatenate([[sequence.due for sequence in sequences], due])
            work = np.concatenate([[(1, sequence.remaining) for sequence in sequences], work])
            order = np.argsort(due)
            due, work = due[order], work[order]
        later = np.zeros((len(due) + 1, 2), np.int64)
        later[:-1] = work[::-1].cumsum(axis=0)[::-1]
        return due, later


def position(request: QueuedSequence | BlockRequest) -> tuple[float, int]:
    """Sort key of the queue: requests that are due at the same time run in the order of their arrival."""
    return request.due, request.order
