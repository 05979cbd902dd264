"""Decides which sequences run in the next batch, and how many steps of each.

The scheduler is pure: the time is an argument, and nothing here knows about a device, a socket or a client.

- **A batch never waits for more requests.** It starts when the device is free and takes what is queued at that moment. Batches form
  because the device is busy, not because a timer expires.
- **A batch takes up to K steps of each sequence.** K is the number of steps that fit into the time budget of a batch, but no more than the
  shortest sequence needs, so that a short sequence finishes early. K does not become so small that launches would dominate. A sequence with
  steps left continues in the next batch.
- **The sequence that is due first runs first.** The longer a sequence takes alone, the later it is due, so a long sequence never blocks a
  short one. Sequences of equal length run in the order of their arrival, so later requests never delay an accepted request. A priority
  level is a fixed head start in seconds: a higher level runs earlier, and no level starves.
- **Models share the device by time.** The model with the fewest seconds of device time runs next.
- **Tenants share it by weight** (`fair_shares.py`). The requests of a tenant over its share wait behind the requests of other tenants,
  whatever their priority. While several tenants send requests, a batch ends within the time budget, so no tenant waits long for the batch
  of another tenant.
- **A request that would miss its deadline is rejected when it arrives** (`admission.py`).

All requests arrive in blocks (`request_block.py`). Blocks that fit into the next batch as a whole cost nothing for each request.
Otherwise the queue has a row for each sequence (`tenant_queue.py`), and a batch takes the first rows that may run (`selection.py`). What it
takes of a request that does not run as a whole are pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from service.engine.batching.admission import Admission
from service.engine.batching.memory_limits import MemoryLimits
from service.engine.batching.model_queue import ModelQueue
from service.engine.batching.request_block import BlockOwner, QueuedBlock
from service.engine.batching.selection import LONGEST_OF, SchedulerLimits, may_run, runs_whole, select
from service.engine.batching.tenant_queue import DONE, HANDLE, LEFT, ORDER, REQUEST, Piece, TenantQueue
from service.engine.execution.cost_model import Cost
from service.ipc.messages.models import ModelKey

NEWEST = 0.05
"""Weight of the newest batch in the running mean of the steps per batch."""

MOST_CONSIDERED = 4096
"""A batch is chosen from this many of the sequences that may run, in their order, once chunks wait behind each other."""


class States(Protocol):
    """What the scheduler needs to know of the states of sequences."""

    def room(self, model: ModelKey) -> int:
        """Return how many more sequences may hold a state while they run."""

    def any_behind(self, model: ModelKey) -> bool:
        """Return whether a chunk waits for an earlier chunk of its session."""

    def busy(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which state handles are in use. NO_HANDLE is not."""


class ScheduledBatch(Struct, eq=False):
    """What runs in a batch: requests as a whole, in blocks, and pieces of others. rows, tokens, longest: of all of them."""

    model: ModelKey
    rows: int = 0
    tokens: int = 0
    longest: int = 0
    blocks: list[QueuedBlock] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class Scheduler(Admission):
    """The policy that takes batches from the queues."""

    def __init__(self, limits: SchedulerLimits, cost: Callable[[ModelKey], Cost], states: States) -> None:
        super().__init__(limits, cost)
        self.memory = MemoryLimits(limits)
        self._states = states

    def drop_request(self, owner: BlockOwner, id: int) -> tuple[QueuedBlock, int] | None:
        """Remove one request of an owner's blocks. Returns its block and its place there, None if no queued block has it."""
        for queue, work in self._works():
            for number, block in work.blocks().items():
                if block.owner is owner and id in block.ids:
                    request = block.ids.index(id)
                    of_request = work.of_blocks([number]) & (work.table()[:, REQUEST] == request)
                    if self._drop(queue, work, of_request):
                        return block, request
        return None

    def drop_chunks(self, model: ModelKey, handle: int, after: int = -1) -> list[tuple[QueuedBlock, list[int]]]:
        """Remove the chunks of a session, or those that arrived behind the request with the place `after` among all arrivals."""
        return self._drop_each(lambda work: (work.table()[:, HANDLE] == handle) & (work.table()[:, ORDER] > after), model)

    def drop_owner(self, owner: BlockOwner) -> list[tuple[QueuedBlock, list[int]]]:
        """Remove the blocks of an owner."""
        return self._drop_each(
            lambda work: work.of_blocks([number for number, block in work.blocks().items() if block.owner is owner])
        )

    def drop_late(self, now: float) -> list[tuple[QueuedBlock, list[int]]]:
        """Remove the requests with a past deadline. There is none before `earliest_deadline`."""
        dropped = self._drop_each(lambda work: work.deadlines() <= now)
        self.earliest_deadline = min([float(work.deadlines().min()) for _, work in self._works()], default=math.inf)
        return dropped

    def next_batch(self) -> ScheduledBatch | None:
        """Choose the model that runs next and the part of its queue that runs. Returns None if no sequence can run now."""
        for model in sorted(self._queues, key=self._claim) if len(self._queues) > 1 else list(self._queues):
            queue = self._queues[model]
            queue.rejections.clear()
            queue.cost = self._cost(model)
            batch = self._take(queue)
            if batch.rows:
                self._used = queue.used
                queue.used += queue.cost.of(batch.longest, batch.tokens)
                queue.reach += NEWEST * (batch.longest - queue.reach) if queue.reach else batch.longest
                return batch
        return None

    def _claim(self, model: ModelKey) -> tuple[float, float]:
        """Sort key of the models: the smallest runs next. A priority level is worth as much as within a queue."""
        queue = self._queues[model]
        return self._shares.least_paid(queue.tenants), queue.used - queue.head_start()

    def _take(self, queue: ModelQueue) -> ScheduledBatch:
        max_seconds = self._limits.batch_seconds if self._shares.contested else math.inf
        limits, room = self.memory.lowered.get(queue.model, self._limits), self._states.room(queue.model)
        any_behind = self._states.any_behind(queue.model)
        blocks, rows = self._whole_blocks(queue, limits.max_batch_sequences), min(queue.count, limits.max_batch_sequences)
        if blocks and rows <= room and not any_behind:
            total = queue.steps if rows == queue.count else sum([block.steps for block in blocks])
            if runs_whole(blocks, rows, total, limits, queue.cost, max_seconds, divisible=queue.divisible):
                return self._take_blocks(queue, blocks, rows, total)
        if len(queue.tenants) == 1:
            [work] = queue.tenants.values()
            table, order = work.table(), None
        else:
            table = np.concatenate([work.table() for work in queue.tenants.values()])
            order = self._shares.in_turn(queue)
        if any_behind:
            runs = may_run(table, self._states.busy(table[:, HANDLE]))
            order = np.flatnonzero(runs) if order is None else order[runs[order]]
            order = order[:MOST_CONSIDERED]
        in_order = table if order is None else table[order]
        places, steps = select(in_order, limits, queue.cost, max_seconds, room, divisible=queue.divisible)
        return self._take_places(queue, places if order is None else order[places], steps)

    def _whole_blocks(self, queue: ModelQueue, most: int) -> list[QueuedBlock] | None:
        """Return the blocks that a batch of up to `most` sequences may take as they are: all, or the first that fill it."""
        if queue.count <= most:
            return queue.whole_blocks()
        if len(queue.tenants) > 1:
            return None
        [work] = queue.tenants.values()
        return work.first_blocks(most)

    def _take_blocks(self, queue: ModelQueue, blocks: list[QueuedBlock], rows: int, steps: int) -> ScheduledBatch:
        """Take the whole queue, or the first blocks of its only tenant. rows, steps: of them."""
        self._shares.start_batch(self._queues.values())
        self.waiting -= rows
        if rows == queue.count:
            for tenant, work in queue.tenants.items():
                self._shares.charge(tenant, queue.price(work.count, work.steps))
            del self._queues[queue.model]
        else:
            [(tenant, work)] = queue.tenants.items()
            work.take_blocks(blocks)
            self._shares.charge(tenant, queue.price(rows, steps))
            queue.count_work(tenant, -rows, -steps)
        return ScheduledBatch(queue.model, rows, steps, max(map(LONGEST_OF, blocks)), blocks)

    def _take_places(self, queue: ModelQueue, places: NDArray[np.int64], steps: NDArray[np.int64]) -> ScheduledBatch:
        """Take sequences of a queue. places: in the joined tables of its tenants; steps: of each of them."""
        batch = ScheduledBatch(queue.model, len(places), int(steps.sum()), int(steps.max(initial=0)))
        if not batch.rows:
            return batch
        self._shares.start_batch(self._queues.values())
        works, first = list(queue.tenants.items()), 0
        for tenant, work in works:
            end = first + work.count
            if len(works) > 1:
                own = (places >= first) & (places < end)
                in_order = places[own].argsort()
                self._take_of(queue, tenant, batch, places[own][in_order] - first, steps[own][in_order])
            else:
                self._take_of(queue, tenant, batch, places, steps)
            first = end
        if not queue.count:
            del self._queues[queue.model]
        return batch

    def _take_of(
        self, queue: ModelQueue, tenant: str, batch: ScheduledBatch, places: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> None:
        """Move sequences of a tenant from its queue to the batch. places: ascending, in the table of the tenant."""
        if not len(places):
            return
        blocks, pieces = queue.tenants[tenant].take(places, steps)
        batch.blocks += blocks
        batch.pieces += pieces
        ended = sum([block.sequences for block in blocks])
        begun, waited = 0, ended
        for piece in pieces:
            begins, ends = int(np.count_nonzero(piece.done == 0)), int(np.count_nonzero(piece.last))
            ended += ends
            waited += begins
            begun += int(np.count_nonzero((piece.done == 0) & ~piece.last)) - int(
                np.count_nonzero((piece.done > 0) & piece.last)
            )
        total = int(steps.sum())
        self._shares.charge(tenant, queue.price(len(places), total))
        queue.count_work(tenant, -ended, -total, begun)
        self.begun += begun
        self.waiting -= waited

    def _works(self, model: ModelKey | None = None) -> Iterator[tuple[ModelQueue, TenantQueue]]:
        """Yield the work of every tenant, of one model or of all. The caller may remove what it gets."""
        for key, queue in list(self._queues.items()):
            if model is None or key == model:
                yield from [(queue, work) for work in list(queue.tenants.values())]

    def _drop_each(
        self, matches: Callable[[TenantQueue], NDArray[np.bool_]], model: ModelKey | None = None
    ) -> list[tuple[QueuedBlock, list[int]]]:
        """Remove the sequences that match from the work of every tenant."""
        return [dropped for queue, work in self._works(model) for dropped in self._drop(queue, work, matches(work))]

    def _drop(self, queue: ModelQueue, work: TenantQueue, matches: NDArray[np.bool_]) -> list[tuple[QueuedBlock, list[int]]]:
        """Remove the matching sequences of a tenant. Returns their blocks, with their requests."""
        if not matches.any():
            return []
        rows = work.table()[matches]
        begun, steps = int((rows[:, DONE] > 0).sum()), int(rows[:, LEFT].sum())
        dropped = work.drop(matches)
        self.begun -= begun
        self.waiting -= len(rows) - begun
        queue.count_work(dropped[0][0].share.tenant, -len(rows), -steps, -begun)
        queue.rejections.clear()
        if not queue.count:
            del self._queues[queue.model]
        return dropped
