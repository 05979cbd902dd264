"""The queue of one model. Pure: nothing here knows a clock."""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from service.engine.batching.request_block import SEQUENCES, STEPS, QueuedBlock
from service.engine.batching.tenant_queue import LEFT, NUMBER, Rejection, TenantQueue
from service.engine.execution.cost_model import Cost
from service.ipc.messages.models import ModelKey


class ModelQueue(Struct, eq=False):
    """The queued requests of one model.

    count, steps: of all sequences, and of their steps that are left. tenants: the same by tenant.
    rejections: the last rejection of each tenant since the last batch. It rejects similar requests at little cost.
    longest: no sequence that has been queued had more steps.
    divisible: whether several batches may share the steps of a sequence.
    used: seconds that the model's batches have taken, on the scheduler's account.
    reach: running mean of the steps that a batch takes of its longest sequence.
    cost: of the model's batches, as of the last batch.
    """

    model: ModelKey
    cost: Cost
    used: float
    count: int = 0
    steps: int = 0
    longest: int = 0
    divisible: bool = True
    tenants: dict[str, TenantQueue] = field(default_factory=dict)
    rejections: dict[str, Rejection] = field(default_factory=dict)
    reach: float = 0.0

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

    def whole_blocks(self) -> list[QueuedBlock] | None:
        """Return all blocks in the order of their arrival, None if a batch has taken a part of one."""
        blocks: list[QueuedBlock] = []
        for work in self.tenants.values():
            of_tenant = work.whole_blocks()
            if of_tenant is None:
                return None
            blocks += of_tenant
        if len(self.tenants) > 1:
            blocks.sort(key=lambda block: block.order)
        return blocks

    def head_start(self) -> float:
        """Return the head start of the request that is due first."""
        first = min(self.tenants.values(), key=lambda work: float(work.due()[0]))
        return first.blocks()[int(first.table()[0, NUMBER])].head_start


class WorkByDue:
    """The queued work of one tenant and model while a block arrives, to count what is due after some time."""

    def __init__(self, queue: ModelQueue, block: QueuedBlock) -> None:
        """block: the arriving block. `accept` counts its requests as queued."""
        self._queued = queue.tenants.get(block.share.tenant)
        self._block = block
        # Floating point, because a product of integers is slow.
        self._accepted = np.zeros((block.requests, 2))

    def accept(self, requests: int | slice) -> None:
        """Count these requests of the block as queued."""
        self._accepted[requests] = self._block.sizes[requests, [SEQUENCES, STEPS]]

    def later(self, due: float) -> tuple[int, int]:
        """Return how many sequences are due after this time, and their remaining steps."""
        counts, steps = ((self._block.due > due).astype(float) @ self._accepted).astype(int).tolist()
        if self._queued is not None:
            left = self._queued.table()[self._queued.due().searchsorted(due, side="right") :, LEFT]
            counts, steps = counts + len(left), steps + int(left.sum())
        return counts, steps
