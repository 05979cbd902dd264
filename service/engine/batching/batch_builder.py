"""Takes the next batch of one model from its queue. Pure: nothing here knows a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Generic, NamedTuple

from service.engine.batching.model_queue import LEAST_STEPS, ModelQueue, S
from service.engine.batching.request_block import LONGEST, SEQUENCES, STEPS, QueuedBlock
from service.engine.batching.tenant_queue import BlockRequest, TenantQueue
from service.engine.execution.cost_model import Cost
from service.ipc.messages.models import ModelKey

PACE = 0.8
"""K keeps this share of the throughput that a batch of the whole time budget reaches, even if the shortest sequence is very short."""
BUDGET_OF_FIXED = 2.0
"""The time budget of a batch is at least this multiple of its fixed time: a host that is slow would otherwise cut all sequences, which
takes it even longer."""
STRETCHED = 2.0
"""A batch may take this multiple of the time that its longest sequence takes alone, even where its time is limited."""
UNLIMITED = 1 << 30
"""More steps than any sequence has."""
SHORTEST_OF, LONGEST_OF = attrgetter("shortest"), attrgetter("longest")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the queue and of a batch."""

    max_waiting: int
    max_batch_sequences: int
    max_batch_tokens: int
    batch_seconds: float


class ScheduledSteps(NamedTuple, Generic[S]):
    """The steps of one sequence that run in a batch. first, last: whether the sequence begins or ends with them."""

    sequence: S
    steps: int
    first: bool
    last: bool


@dataclass(slots=True)
class ScheduledBatch(Generic[S]):
    """What runs in a batch: whole blocks, and steps of sequences.

    rows, tokens, longest: of all of them. takes_all: whether the batch takes everything that its model has queued. Otherwise,
    whole: places of the whole requests in their queues, which become blocks; divided: places of the requests that became sequences.
    """

    model: ModelKey
    rows: int = 0
    tokens: int = 0
    longest: int = 0
    blocks: list[QueuedBlock] = field(default_factory=list)
    parts: list[ScheduledSteps[S]] = field(default_factory=list)
    takes_all: bool = False
    whole: dict[TenantQueue, list[int]] = field(default_factory=dict)
    divided: dict[TenantQueue, list[int]] = field(default_factory=dict)


def take_whole(queue: ModelQueue[S], limits: SchedulerLimits, max_seconds: float) -> ScheduledBatch[S] | None:
    """Return what BatchBuilder would take, at less cost, if a queue has only blocks and all that a batch takes of it runs whole.

    The whole queue may fit into the batch, or the first requests of its only tenant fill the batch exactly. Otherwise returns None.
    """
    if queue.sequences:
        return None
    cost, max_rows = queue.cost, limits.max_batch_sequences
    if queue.count <= max_rows and queue.steps <= limits.max_batch_tokens:
        blocks = queue.blocks
        divisible, shortest, longest = blocks[0].divisible, min(map(SHORTEST_OF, blocks)), max(map(LONGEST_OF, blocks))
        batch: ScheduledBatch[S] = ScheduledBatch(queue.model, queue.count, queue.steps, longest, blocks, takes_all=True)
        if max_seconds < math.inf and cost.of(longest, queue.steps) > max(max_seconds, STRETCHED * cost.of(longest, longest)):
            return None
    else:
        if len(queue.tenants) > 1 or max_seconds < math.inf:
            return None
        [tenant_queue] = queue.tenants.values()
        first = tenant_queue.first(max_rows)
        ends = first[:, SEQUENCES].cumsum()
        requests = int(ends.searchsorted(max_rows)) + 1
        if requests > len(first) or ends[requests - 1] != max_rows:
            return None
        divisible, shortest, longest = tenant_queue.divisible, 1, int(first[:requests, LONGEST].max())
        batch = ScheduledBatch(queue.model, max_rows, int(first[:requests, STEPS].sum()), longest)
        batch.whole = {tenant_queue: list(range(requests))}
        if batch.tokens > limits.max_batch_tokens:
            return None
    if longest <= LEAST_STEPS or longest <= step_limit(limits, shortest, batch.rows, UNLIMITED, cost):
        return batch
    return batch if not divisible and cost.of(longest, batch.tokens) <= budget_seconds(limits, cost) else None


@dataclass(slots=True)
class BatchBuilder(Generic[S]):
    """Takes requests in order until the batch is full. The first sequence is always taken.

    max_seconds: limit of the predicted time of a batch, unless single sequences take about as long.
    room: returns how many more sequences of the model may keep a state between batches.
    unpack: returns the sequences of a block with one request.
    """

    queue: ModelQueue[S]
    limits: SchedulerLimits
    max_seconds: float
    room: Callable[[ModelKey], int]
    unpack: Callable[[QueuedBlock], list[S]]
    batch: ScheduledBatch[S] = field(init=False)
    free_room: int | None = None
    limit: int = UNLIMITED
    usual: int = UNLIMITED

    def take(self, in_order: Iterator[BlockRequest | S]) -> ScheduledBatch[S]:
        """Return what the batch takes. Nothing if no sequence can run now. in_order: the requests of the queue."""
        self.batch = ScheduledBatch(self.queue.model)
        waiting = (request for request in in_order if isinstance(request, BlockRequest) or request.ready)
        limits = self.limits
        first, lengths = _first_of(waiting, limits.max_batch_sequences)
        if first:
            share = fair_share(lengths, limits.max_batch_tokens)
            self.limit = step_limit(limits, min(lengths), len(lengths), share, self.queue.cost)
            self.usual = max(self.limit, _rounded(lengths[0]))
            for request in chain(first, waiting):
                if self.batch.rows == limits.max_batch_sequences:
                    break
                if not (self._take_request(request) if isinstance(request, BlockRequest) else self._take_steps(request)):
                    break
        return self.batch

    def _take_request(self, request: BlockRequest) -> bool:
        """Take a request of a block, or leave it where it is. Returns whether the batch may take more."""
        rows, steps, longest = request.sequences, request.steps, request.longest
        if longest > self.limit and request.block.divisible:
            return self._divide(request)
        if not self._fits(rows, steps, longest):
            first_fits = rows > 1 and self._fits(1, *2 * request.block.lengths_of(request.row)[:1])
            return first_fits and self._divide(request)
        if longest > self.usual and self._exceeds_budget(longest, steps):
            if rows > 1:
                return self._divide(request)
            if self.batch.rows:
                return True
        self._add(rows, steps, longest)
        self.batch.whole.setdefault(request.queue, []).append(request.place)
        return True

    def _divide(self, request: BlockRequest) -> bool:
        """Turn a request into its sequences, which join the queue, and take steps of them."""
        self.batch.divided.setdefault(request.queue, []).append(request.place)
        block = request.block.select([request.row])
        sequences = self.unpack(block)
        for sequence in sequences:
            sequence.arrived, sequence.due, sequence.order = block.arrived, request.due, request.order
            self.queue.insert(sequence)
        return all(self._take_steps(sequence) for sequence in sequences)

    def _take_steps(self, sequence: S) -> bool:
        """Take steps of a sequence, or leave it where it is. Returns whether the batch may take more."""
        steps = min(sequence.remaining, self.limit) if sequence.divisible else sequence.remaining
        if not sequence.begun and (sequence.stateful or steps < sequence.remaining):
            # It occupies one more state slot.
            if self.free_room is None:
                self.free_room = self.room(self.queue.model)
            if self.free_room == 0:
                return True
            self.free_room -= 1
        if not self._fits(1, steps, steps):
            return False
        if self.batch.rows and steps > self.usual and self._exceeds_budget(steps, steps):
            return True
        self._add(1, steps, steps)
        self.batch.parts.append(ScheduledSteps(sequence, steps, not sequence.begun, steps == sequence.remaining))
        return True

    def _fits(self, rows: int, steps: int, longest: int) -> bool:
        batch, limits = self.batch, self.limits
        fits = batch.rows + rows <= limits.max_batch_sequences and batch.tokens + steps <= limits.max_batch_tokens
        if fits and self.max_seconds < math.inf:
            cost, longest = self.queue.cost, max(batch.longest, longest)
            fits = cost.of(longest, batch.tokens + steps) <= max(self.max_seconds, STRETCHED * cost.of(longest, longest))
        return fits or (not batch.rows and rows == 1)

    def _exceeds_budget(self, longest: int, steps: int) -> bool:
        """Return whether a long indivisible sequence would delay shorter sequences beyond the budget. It runs when it is first."""
        batch, cost = self.batch, self.queue.cost
        return cost.of(max(batch.longest, longest), batch.tokens + steps) > budget_seconds(self.limits, cost)

    def _add(self, rows: int, steps: int, longest: int) -> None:
        batch = self.batch
        batch.rows += rows
        batch.tokens += steps
        batch.longest = max(batch.longest, longest)


def fair_share(lengths: Sequence[int], steps: int) -> int:
    """Return the most steps of each sequence, if all together take at most `steps`: what short sequences leave goes to the others."""
    if sum(lengths) <= steps:
        return UNLIMITED
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > steps:
            break
        steps -= length
        left -= 1
    return steps // left


def budget_seconds(limits: SchedulerLimits, cost: Cost) -> float:
    """Return the time budget of a batch."""
    return max(limits.batch_seconds, BUDGET_OF_FIXED * cost.fixed)


def steps_within_budget(limits: SchedulerLimits, rows: int, share: int, cost: Cost) -> int:
    """Return the most steps that a batch takes of each of its rows. share: see `fair_share`."""
    return max(LEAST_STEPS, min(cost.steps_within(budget_seconds(limits, cost), rows), share))


def step_limit(limits: SchedulerLimits, shortest: int, rows: int, share: int, cost: Cost) -> int:
    """Return K: the most steps that the next batch takes of a divisible sequence.

    shortest: steps of the shortest sequence in it; rows: how many sequences it takes; share: see `fair_share`.
    """
    within_budget = steps_within_budget(limits, rows, share, cost)
    return min(within_budget, max(_rounded(shortest), cost.steps_at_pace(PACE, within_budget, rows)))


def _first_of(waiting: Iterator[BlockRequest | S], most: int) -> tuple[list[BlockRequest | S], list[int]]:
    """Take requests with at least `most` sequences, or all. Returns them, and the remaining steps of their first `most` sequences."""
    requests: list[BlockRequest | S] = []
    lengths: list[int] = []
    for request in waiting:
        requests.append(request)
        if not isinstance(request, BlockRequest):
            lengths.append(request.remaining)
        elif request.sequences == 1:
            lengths.append(request.steps)
        else:
            lengths += request.block.lengths_of(request.row)
        if len(lengths) >= most:
            break
    return requests, lengths[:most]


def _rounded(steps: int) -> int:
    """Round up to a power of two, and to at least LEAST_STEPS."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())
