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

Requests without a state arrive in blocks (`request_block.py`). Blocks that fit into the next batch as a whole cost nothing for each
request. A block that does not fit is cut along its requests. A request that does not run as a whole becomes an object for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Generic, NamedTuple

import numpy as np

from service.engine.batching.admission import Admission
from service.engine.batching.batch_builder import UNLIMITED, BatchBuilder, ScheduledBatch, SchedulerLimits, take_whole
from service.engine.batching.memory_limits import MemoryLimits
from service.engine.batching.model_queue import ModelQueue, S
from service.engine.batching.request_block import BlockOwner, QueuedBlock
from service.engine.execution.cost_model import Cost
from service.ipc.messages.models import ModelKey

NEWEST = 0.05
"""Weight of the newest batch in the running mean of the steps per batch."""


class RemovedRequests(NamedTuple, Generic[S]):
    """What was removed from the queue."""

    blocks: list[QueuedBlock]
    sequences: list[S]


def _unlimited_room(model: ModelKey) -> int:
    return UNLIMITED


def _without_blocks(block: QueuedBlock) -> list[S]:
    raise AssertionError("this scheduler has no blocks")


class Scheduler(Admission[S]):
    """The policy that takes batches from the queues.

    room: returns how many more sequences of a model may keep a state between batches.
    unpack: returns the sequences of a block with one request.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cost: Callable[[ModelKey], Cost],
        room: Callable[[ModelKey], int] = _unlimited_room,
        unpack: Callable[[QueuedBlock], list[S]] = _without_blocks,
    ) -> None:
        super().__init__(limits, cost)
        self.memory = MemoryLimits(limits)
        self._room = room
        self._unpack = unpack

    def drop(self, sequences: list[S]) -> int:
        """Remove these sequences of one request from the queue. Returns how many of them were queued."""
        dropped = {id(sequence) for sequence in sequences}
        return len(self._remove(lambda sequence: id(sequence) in dropped, lambda _: ()).sequences)

    def drop_request(self, owner: BlockOwner, id: int) -> bool:
        """Remove one request of an owner's blocks. Returns false if no queued block has it."""

        def is_it(block: QueuedBlock) -> Collection[int]:
            return [block.ids.index(id)] if block.owner is owner and id in block.ids else ()

        return bool(self._remove(lambda _: False, is_it).blocks)

    def drop_owner(self, owner: BlockOwner) -> list[QueuedBlock]:
        """Remove and return the blocks of an owner."""
        return self._remove(lambda _: False, lambda block: range(block.requests) if block.owner is owner else ()).blocks

    def drop_late(self, now: float) -> RemovedRequests[S]:
        """Remove and return the requests with a past deadline. There is none before `earliest_deadline`."""
        late = self._remove(
            lambda sequence: sequence.deadline <= now,
            lambda block: np.flatnonzero(block.deadlines <= now).tolist() if block.deadline <= now else (),
        )
        queues = self._queues.values()
        deadlines = [sequence.deadline for queue in queues for sequence in queue.sequences]
        deadlines += [block.deadline for queue in queues for block in queue.blocks]
        self.earliest_deadline = min(deadlines, default=math.inf)
        return late

    def next_batch(self) -> ScheduledBatch[S] | None:
        """Choose the model that runs next and the part of its queue that runs. Returns None if no sequence can run now."""
        for model in sorted(self._queues, key=self._claim) if len(self._queues) > 1 else list(self._queues):
            queue = self._queues[model]
            queue.forget_rejections()
            queue.cost = self._cost(model)
            batch = self._take(queue)
            if batch.rows:
                self._shares.start_batch(self._queues.values())
            self._advance(queue, batch)
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

    def _take(self, queue: ModelQueue[S]) -> ScheduledBatch[S]:
        max_seconds = self._limits.batch_seconds if self._shares.contested else math.inf
        limits = self.memory.lowered.get(queue.model, self._limits)
        batch = take_whole(queue, limits, max_seconds)
        if batch is None:
            in_order = self._shares.in_turn(queue) if len(queue.tenants) > 1 else queue.in_order()
            batch = BatchBuilder(queue, limits, max_seconds, self._room, self._unpack).take(in_order)
        return batch

    def _advance(self, queue: ModelQueue[S], batch: ScheduledBatch[S]) -> None:
        """Remove everything without steps left from the queue, and update the counts. Adds the blocks of whole requests to the batch."""
        if batch.takes_all:
            self.waiting -= batch.rows
            if len(queue.tenants) == 1:
                self._shares.charge(batch.blocks[0].share.tenant, queue.price(batch.rows, batch.tokens))
            else:
                for block in batch.blocks:
                    self._shares.charge(block.share.tenant, queue.price(block.sequences, block.steps))
            del self._queues[queue.model]
            return
        for tenant_queue in dict.fromkeys([*batch.whole, *batch.divided]):
            batch.blocks += tenant_queue.take(batch.whole.get(tenant_queue, ()), batch.divided.get(tenant_queue, ()))
        tenants = len(queue.tenants)
        for block in batch.blocks:
            self.waiting -= block.sequences
            self._shares.charge(block.share.tenant, queue.price(block.sequences, block.steps))
            queue.count_work(block.share.tenant, -block.sequences, -block.steps)
        for part in batch.parts:
            sequence = part.sequence
            sequence.remaining -= part.steps
            sequence.begun = True
            begun = (not part.last) - (not part.first)
            self.waiting -= part.first
            self.begun += begun
            self._shares.charge(sequence.share.tenant, queue.price(1, part.steps))
            queue.count_work(sequence.share.tenant, -int(part.last), -part.steps, begun)
        if any(part.last for part in batch.parts):
            # The batch of a single tenant usually is a prefix of the queue: the sequences behind it need no check.
            end = queue.sequences.index(batch.parts[-1].sequence) + 1 if tenants == 1 else None
            queue.sequences[:end] = [sequence for sequence in queue.sequences[:end] if sequence.remaining]
        if not queue.count:
            del self._queues[queue.model]

    def _remove(self, matches: Callable[[S], bool], matching: Callable[[QueuedBlock], Collection[int]]) -> RemovedRequests[S]:
        """Remove and return the matching sequences of all queues, and the matching requests of blocks. matching: returns their indices."""
        removed: RemovedRequests[S] = RemovedRequests([], [])
        for model, queue in list(self._queues.items()):
            blocks = [(block, indices) for block in queue.blocks if (indices := sorted(matching(block)))]
            sequences = [sequence for sequence in queue.sequences if matches(sequence)]
            if not blocks and not sequences:
                continue
            if blocks:
                gone = dict(blocks)
                left = [block.without(gone.get(block, ())) for block in queue.blocks]
                queue.keep_blocks([block for block in left if block is not None])
            queue.sequences = [sequence for sequence in queue.sequences if not matches(sequence)]
            chosen = [block.select(indices) for block, indices in blocks]
            begun, in_blocks = sum([sequence.begun for sequence in sequences]), sum([block.sequences for block in chosen])
            for block in chosen:
                queue.count_work(block.share.tenant, -block.sequences, -block.steps)
            for sequence in sequences:
                queue.count_work(sequence.share.tenant, -1, -sequence.remaining, -int(sequence.begun))
            queue.forget_rejections()
            self.begun -= begun
            self.waiting -= len(sequences) + in_blocks - begun
            removed.blocks.extend(chosen)
            removed.sequences.extend(sequences)
            if not queue.count:
                del self._queues[model]
        return removed
