"""Takes the next batch of one model from its queue. Pure: nothing here knows a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.model_queue import LEAST_STEPS, ModelQueue, QueuedSequence, S
from service.engine.batching.request_block import LONGEST, SEQUENCES, STEPS, QueuedBlock
from service.engine.batching.request_order import ORDER, BlockRequest, RequestOrder
from service.engine.execution.cost_model import Cost

PACE = 0.8
"""K keeps this share of the throughput that a batch of the whole time budget reaches, even if the shortest sequence is very short."""
BUDGET_OF_FIXED = 2.0
"""The time budget of a batch is at least this multiple of its fixed time: a host that is slow would otherwise cut all sequences, which
takes it even longer."""
STRETCHED = 2.0
"""A batch may take this multiple of the time that its longest sequence takes alone, even where its time is limited."""
UNLIMITED = 1 << 30
"""More steps than any sequence has."""
LEAST_REQUESTS = 16
"""Fewer requests in blocks cost less as objects than as columns."""


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
class Taken(Generic[S]):
    """The part of a queue that the next batch takes.

    rows, tokens, longest: of the batch.
    blocks: all blocks of the queue, if it takes everything. Otherwise, whole: places of the whole requests, by the order that they are
    in; divided: places of the requests that became sequences. parts: the steps of sequences.
    """

    rows: int = 0
    tokens: int = 0
    longest: int = 0
    blocks: list[QueuedBlock] = field(default_factory=list)
    whole: dict[RequestOrder, list[int]] = field(default_factory=dict)
    divided: dict[RequestOrder, list[int]] = field(default_factory=dict)
    parts: list[ScheduledSteps[S]] = field(default_factory=list)


def take_all(queue: ModelQueue[S], limits: SchedulerLimits, max_seconds: float = math.inf) -> Taken[S] | None:
    """Return the whole queue if it has only blocks and fits into one batch, which is the usual case. max_seconds: see BatchBuilder."""
    if queue.sequences or queue.count > limits.max_batch_sequences or queue.steps > limits.max_batch_tokens:
        return None
    blocks, cost = queue.blocks, queue.cost
    longest = max([block.longest for block in blocks])
    if max_seconds < math.inf and cost.of(longest, queue.steps) > max(max_seconds, STRETCHED * cost.of(longest, longest)):
        return None
    taken: Taken[S] = Taken(queue.count, queue.steps, longest, blocks)  # a call of `Taken[S]` takes three times as long
    shortest = min([block.shortest for block in blocks])
    return taken if _runs_whole(taken, shortest, blocks[0].divisible, limits, cost) else None


def take_full(queue: ModelQueue[S], limits: SchedulerLimits, max_seconds: float = math.inf) -> Taken[S] | None:
    """Return the first requests of a queue that has only blocks, if they fill a batch exactly and run whole. Arguments as in take_all."""
    if queue.sequences or len(queue.tenants) > 1 or max_seconds < math.inf:
        return None
    [blocks] = [work.requests for work in queue.tenants.values()]
    rows = limits.max_batch_sequences
    _, table = blocks.first(rows)
    ends = table[:, SEQUENCES].cumsum()
    requests = int(ends.searchsorted(rows)) + 1
    if requests > len(table) or ends[requests - 1] != rows:
        return None
    first = table[:requests]
    tokens, longest = int(first[:, STEPS].sum()), int(first[:, LONGEST].max())
    taken: Taken[S] = Taken(rows, tokens, longest, whole={blocks: list(range(requests))})
    fits = taken.tokens <= limits.max_batch_tokens
    return taken if fits and _runs_whole(taken, 1, blocks.divisible, limits, queue.cost) else None


def _runs_whole(taken: Taken[S], shortest: int, divisible: bool, limits: SchedulerLimits, cost: Cost) -> bool:
    """Return whether BatchBuilder would take these requests whole. shortest: at most the steps of the shortest sequence."""
    if taken.longest <= LEAST_STEPS or taken.longest <= step_limit(limits, shortest, taken.rows, UNLIMITED, cost):
        return True
    return not divisible and cost.of(taken.longest, taken.tokens) <= budget_seconds(limits, cost)


def take_first(
    queue: ModelQueue[S],
    limits: SchedulerLimits,
    room: Callable[[], int],
    unpack: Callable[[QueuedBlock], list[S]],
    max_seconds: float = math.inf,
) -> Taken[S] | None:
    """Return the batch that BatchBuilder would take, without an object for each request that runs whole: for long queues.

    Returns None if tenants share the queue, if few requests in blocks wait, if such a request has several sequences, or if the batch passes
    over a sequence. A request in a block becomes a sequence of the queue if the batch takes a part of it. Arguments as in BatchBuilder.
    """
    if len(queue.tenants) > 1 or max_seconds < math.inf:
        return None
    first = FirstRequests.of(queue, limits.max_batch_sequences)
    if first is None:
        return None
    share = fair_share(first.lengths.tolist(), limits.max_batch_tokens)
    limit = step_limit(limits, int(first.lengths.min()), len(first.lengths), share, queue.cost)
    steps = np.minimum(first.lengths, limit) if first.divisible else first.lengths
    ends = steps.cumsum()
    rows = max(1, int(ends.searchsorted(limits.max_batch_tokens, side="right")))
    tokens, longest = int(ends[rows - 1]), int(steps[:rows].max())
    budget = budget_seconds(limits, queue.cost)
    if longest > max(limit, _rounded(int(first.lengths[0]))) and queue.cost.of(longest, tokens) > budget:
        return None
    # The request behind the batch counts too: without room for its state, BatchBuilder would pass over it and take a later one.
    new_states = int(first.new_states(steps)[: rows + 1].sum())
    if new_states and room() < new_states:
        return None
    whole, parts = first.split(steps[:rows])
    taken: Taken[S] = Taken(rows, tokens, longest, whole={first.blocks: whole} if whole else {})
    for place, steps_taken in parts:
        if place < first.in_blocks:
            taken.divided.setdefault(first.blocks, []).append(place)
            [sequence] = divide(queue, first.blocks.request(place), unpack)
        else:
            sequence = first.sequences[place - first.in_blocks]
        taken.parts.append(scheduled(sequence, steps_taken))
    return taken


class FirstRequests(NamedTuple, Generic[S]):
    """The requests that are due first, in columns.

    blocks: the candidates are its first `in_blocks` requests; sequences: the candidates that are not in blocks.
    divisible: whether batches may share their steps.
    places: (n,) the place of each in `blocks`, or `in_blocks` plus its index in `sequences`.
    lengths: (n,) remaining steps. begun, stateful: (n,) as in `QueuedSequence`.
    """

    blocks: RequestOrder
    in_blocks: int
    sequences: list[S]
    divisible: bool
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    begun: NDArray[np.bool_]
    stateful: NDArray[np.bool_]

    @classmethod
    def of(cls, queue: ModelQueue[S], most: int) -> FirstRequests[S] | None:
        """Return the first requests of a queue with one tenant, at most `most`. None if they need BatchBuilder or are too few."""
        [blocks] = [work.requests for work in queue.tenants.values()]
        due, table = blocks.first(most)
        if len(table) < LEAST_REQUESTS or table[:, SEQUENCES].max() > 1:
            return None
        in_blocks, divisible = len(table), blocks.divisible
        sequences = list(islice((sequence for sequence in queue.sequences if sequence.ready), most))
        if not sequences:
            false = np.zeros(in_blocks, bool)
            return cls(blocks, in_blocks, sequences, divisible, np.arange(in_blocks), table[:, STEPS], false, false)
        due = np.concatenate([due, [sequence.due for sequence in sequences]])
        orders = np.concatenate([table[:, ORDER], [sequence.order for sequence in sequences]])
        lengths = np.concatenate([table[:, STEPS], [sequence.remaining for sequence in sequences]])
        begun = np.array([False] * in_blocks + [sequence.begun for sequence in sequences])
        stateful = np.array([False] * in_blocks + [sequence.stateful for sequence in sequences])
        places = np.lexsort((orders, due))[:most]
        return cls(blocks, in_blocks, sequences, divisible, places, lengths[places], begun[places], stateful[places])

    def new_states(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return `needs_new_state` of each request when a batch takes these steps of them."""
        needs: NDArray[np.bool_] = ~self.begun & (self.stateful | (steps < self.lengths))
        return needs

    def split(self, steps: NDArray[np.int64]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the places of the requests in blocks that run whole, and the places of the others with their steps.

        steps: of the first requests, in one batch.
        """
        places = self.places[: len(steps)]
        whole = (places < self.in_blocks) & (steps == self.lengths[: len(steps)])
        return places[whole].tolist(), list(zip(places[~whole].tolist(), steps[~whole].tolist(), strict=True))


class BatchBuilder(Generic[S]):
    """Takes requests in order until the batch is full. The first sequence is always taken.

    in_order: the requests of the queue. max_seconds: limit of the predicted time of a batch, unless single sequences take about as long.
    room: returns how many more sequences of the model may keep a state between batches.
    unpack: returns the sequences of a block with one request.
    """

    def __init__(
        self,
        queue: ModelQueue[S],
        in_order: Iterator[BlockRequest | S],
        limits: SchedulerLimits,
        room: Callable[[], int],
        unpack: Callable[[QueuedBlock], list[S]],
        max_seconds: float = math.inf,
    ) -> None:
        self._queue = queue
        self._in_order = in_order
        self._max_seconds = max_seconds
        self._limits = limits
        self._room = room
        self._unpack = unpack
        self._free_room: int | None = None
        self._limit = self._usual = UNLIMITED
        self._taken: Taken[S] = Taken()

    def take(self) -> Taken[S]:
        """Return what the batch takes. Nothing if no sequence can run now."""
        waiting = (request for request in self._in_order if isinstance(request, BlockRequest) or request.ready)
        limits = self._limits
        first, lengths = _first_of(waiting, limits.max_batch_sequences)
        if first:
            share = fair_share(lengths, limits.max_batch_tokens)
            self._limit = step_limit(limits, min(lengths), len(lengths), share, self._queue.cost)
            self._usual = max(self._limit, _rounded(lengths[0]))
            for request in chain(first, waiting):
                if self._taken.rows == limits.max_batch_sequences:
                    break
                if not (self._take_request(request) if isinstance(request, BlockRequest) else self._take_steps(request)):
                    break
        return self._taken

    def _take_request(self, request: BlockRequest) -> bool:
        """Take a request of a block, or leave it where it is. Returns whether the batch may take more."""
        row = request.row
        if request.block.divisible and row.longest > self._limit:
            return self._divide(request)
        if not self._fits(row.sequences, row.steps, row.longest):
            steps = request.block.lengths[row.first]
            first_fits = row.sequences > 1 and self._fits(1, steps, steps)
            return first_fits and self._divide(request)
        if row.longest > self._usual and self._exceeds_budget(row.longest, row.steps):
            if row.sequences > 1:
                return self._divide(request)
            if self._taken.rows:
                return True
        self._add(row.sequences, row.steps, row.longest)
        self._taken.whole.setdefault(request.queue, []).append(request.place)
        return True

    def _divide(self, request: BlockRequest) -> bool:
        """Turn a request into its sequences, and take steps of them."""
        self._taken.divided.setdefault(request.queue, []).append(request.place)
        return all(self._take_steps(sequence) for sequence in divide(self._queue, request, self._unpack))

    def _take_steps(self, sequence: S) -> bool:
        """Take steps of a sequence, or leave it where it is. Returns whether the batch may take more."""
        steps = min(sequence.remaining, self._limit) if sequence.divisible else sequence.remaining
        if needs_new_state(sequence, steps):
            if self._free_room is None:
                self._free_room = self._room()
            if self._free_room == 0:
                return True
            self._free_room -= 1
        if not self._fits(1, steps, steps):
            return False
        if self._taken.rows and steps > self._usual and self._exceeds_budget(steps, steps):
            return True
        self._add(1, steps, steps)
        self._taken.parts.append(scheduled(sequence, steps))
        return True

    def _fits(self, rows: int, steps: int, longest: int) -> bool:
        taken, limits = self._taken, self._limits
        fits = taken.rows + rows <= limits.max_batch_sequences and taken.tokens + steps <= limits.max_batch_tokens
        if fits and self._max_seconds < math.inf:
            cost, longest = self._queue.cost, max(taken.longest, longest)
            fits = cost.of(longest, taken.tokens + steps) <= max(self._max_seconds, STRETCHED * cost.of(longest, longest))
        return fits or (not taken.rows and rows == 1)

    def _exceeds_budget(self, longest: int, steps: int) -> bool:
        """Return whether a long indivisible sequence would delay shorter sequences beyond the budget. It runs when it is first."""
        taken, cost = self._taken, self._queue.cost
        return cost.of(max(taken.longest, longest), taken.tokens + steps) > budget_seconds(self._limits, cost)

    def _add(self, rows: int, steps: int, longest: int) -> None:
        self._taken.rows += rows
        self._taken.tokens += steps
        self._taken.longest = max(self._taken.longest, longest)


def divide(queue: ModelQueue[S], request: BlockRequest, unpack: Callable[[QueuedBlock], list[S]]) -> list[S]:
    """Return the sequences of a request in a block, now in the queue on their own. The caller removes the request from its block."""
    block = request.block.select([request.index])
    sequences = unpack(block)
    for sequence in sequences:
        sequence.arrived, sequence.due, sequence.order = block.arrived, request.due, request.order
        queue.insert(sequence)
    return sequences


def needs_new_state(sequence: QueuedSequence, steps: int) -> bool:
    """Return whether a sequence occupies one more state slot when a batch takes some of its steps."""
    return not sequence.begun and (sequence.stateful or steps < sequence.remaining)


def scheduled(sequence: S, steps: int) -> ScheduledSteps[S]:
    return ScheduledSteps(sequence, steps, not sequence.begun, steps == sequence.remaining)


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
        if isinstance(request, BlockRequest):
            row = request.row
            lengths += request.block.lengths[row.first : row.first + row.sequences]
        else:
            lengths.append(request.remaining)
        if len(lengths) >= most:
            break
    return requests, lengths[:most]


def _rounded(steps: int) -> int:
    """Round up to a power of two, and to at least LEAST_STEPS."""
    return max(LEAST_STEPS, 1 << (steps - 1).bit_length())
