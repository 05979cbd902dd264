"""Requests in blocks are queued, refused, dropped and scheduled exactly as the same requests one by one, within all limits."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service.engine.batching.batch_builder import SchedulerLimits

from service.engine.batching.model_queue import QueuedSequence
from service.engine.batching.request_block import STEPS, QueuedBlock
from service.engine.batching.scheduler import Scheduler
from service.engine.execution.cost_model import Cost
from service.errors import ServiceError
from service.ipc.messages.inference import IDS, NO_TENANT, Share
from tests.engine.batching.harness import MODEL, OTHER, block

EVENTS = 250
NOBODY: Any = None
"""The owner of the blocks."""
LENGTHS = (1, 2, 5, 16, 17, 40)
TENANTS = Share("one"), Share("two", 4.0), Share("three")


class NamedSequence(QueuedSequence):
    """A sequence that knows its request. number: its place among the sequences of the request."""

    def __init__(self, id: int, number: int, steps: int, deadline: float, priority: int = 0, **options: Any) -> None:
        """options: as in QueuedSequence."""
        super().__init__(steps, deadline, priority, **options)
        self.id = id
        self.number = number


@dataclass
class Pair:
    """Two schedulers that receive the same events: `single` request by request, `blocks` in blocks.

    shares: of the tenants that send requests. sequences: numbers of sequences in a request. Requests of several tenants have one sequence
    each, because the sequences of a request take turns with sequences of other tenants only if the request is not in a block.
    """

    chance: random.Random
    shares: Sequence[Share] = (NO_TENANT,)
    sequences: Sequence[int] = (1, 1, 1, 2, 4)
    now: float = 0.0
    last_id: int = 0
    single_sequences: dict[int, list[NamedSequence]] = field(default_factory=dict)
    block_sequences: dict[int, list[NamedSequence]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choose = self.chance.choice
        self.costs = {
            # Sums of these are exact in any order.
            key: Cost(choose([0.0, 1.0, 20.0]), choose([0.0, 0.125, 1.0]), choose([0.0, 1 / 64]))
            for key in (MODEL, OTHER)
        }
        self.divisible = {key: choose([True, False]) for key in (MODEL, OTHER)}
        limits = SchedulerLimits(choose([5, 20, 100]), choose([1, 3, 8]), choose([30, 100]), choose([5.0, 10.0, 100.0]))
        self.limits = limits
        self.room = choose([0, 1, 2, 5])
        self.single: Scheduler[NamedSequence] = Scheduler(limits, self.costs.__getitem__, lambda _: self.room)
        # Every request is predicted exactly, so that the bound of the other scheduler is never too small.
        self.single._surely_in_time = lambda *_: False  # type: ignore[method-assign]
        self.blocks: Scheduler[NamedSequence] = Scheduler(limits, self.costs.__getitem__, lambda _: self.room, self._unpack)

    def event(self) -> None:
        events = (self.add, self.batch, self.time_passes, self.cancel, self.drop_late, self.add_chunk, self.change_readiness)
        self.chance.choices(events, (5, 5, 2, 1, 1, 1, 1))[0]()
        if self.chance.random() < 0.2:
            self.room = self.chance.choice([0, 1, 2, 5])
        queued = [each for sequences in self.single_sequences.values() for each in sequences if each.remaining]
        assert (self.single.waiting, self.single.begun) == (self.blocks.waiting, self.blocks.begun)
        assert self.single.begun == sum(sequence.begun for sequence in queued)
        assert self.single.waiting == len(queued) - self.single.begun
        assert self.single.waiting_by_model() == self.blocks.waiting_by_model()
        assert self.single.backlog_seconds() == pytest.approx(self.blocks.backlog_seconds())

    def add(self) -> None:
        choose = self.chance.choice
        model, priority, busy, share = choose([MODEL, OTHER]), choose([0, 0, -1, 1]), choose([0.0, 3.0]), choose(self.shares)
        requests, refused = [], {}
        for _ in range(self.chance.choice([1, 1, 2, 4, 8])):
            self.last_id += 1
            deadline = self.now + self.chance.choice([1.0, 30.0, 200.0, 1e9])
            steps = [self.chance.choice(LENGTHS) for _ in range(self.chance.choice(self.sequences))]
            requests.append((self.last_id, deadline, steps))
            sequences = [
                NamedSequence(self.last_id, number, count, deadline, priority, share=share, divisible=self.divisible[model])
                for number, count in enumerate(steps)
            ]
            try:
                self.single.add(model, sequences, now=self.now, busy=busy)
                self.single_sequences[self.last_id] = sequences
            except ServiceError as error:
                refused[self.last_id] = (type(error), error.message)
        options = {"model": model, "priority": priority, "share": share, "divisible": self.divisible[model]}
        made = block(requests, _values(requests), **options)  # type: ignore[arg-type]
        answers = self.blocks.add_block(made, now=self.now, busy=busy)
        assert {id: (type(error), error.message) for ids, error in answers for id in ids} == refused

    def add_chunk(self) -> None:
        """Add a chunk of a session, which is never in a block."""
        model = self.chance.choice([MODEL, OTHER])
        if not self.divisible[model]:
            return
        self.last_id += 1
        steps, deadline = self.chance.choice(LENGTHS), self.now + self.chance.choice([30.0, 1e9])
        share = self.chance.choice(self.shares)
        errors = []
        for queue, sequences in ((self.single, self.single_sequences), (self.blocks, self.block_sequences)):
            sequence = NamedSequence(self.last_id, 0, steps, deadline, share=share, divisible=True, stateful=True)
            try:
                queue.add(model, [sequence], now=self.now)
                sequences[self.last_id] = [sequence]
            except ServiceError as error:
                errors.append(error.message)
        assert len(set(errors)) <= 1 and len(errors) in (0, 2)

    def change_readiness(self) -> None:
        """Let some chunks wait for an earlier chunk, and others no longer."""
        for id, [sequence, *_] in self.single_sequences.items():
            if sequence.stateful and id in self.block_sequences:
                sequence.ready = self.block_sequences[id][0].ready = self.chance.random() < 0.5

    def batch(self) -> None:
        before = {
            sequence: (sequence.remaining, sequence.begun)
            for sequences in self.single_sequences.values()
            for sequence in sequences
        }
        single, blocks = self.single.next_batch(), self.blocks.next_batch()
        if single is None or blocks is None:
            assert single is blocks
            return
        parts = [part for part in single.parts if not part.sequence.stateful]
        assert 1 <= len(single.parts) <= self.limits.max_batch_sequences
        assert len(single.parts) == 1 or sum(part.steps for part in single.parts) <= self.limits.max_batch_tokens
        assert sum(part.first and not part.last for part in parts) <= self.room
        for part in single.parts:
            left, begun = before[part.sequence]
            assert 1 <= part.steps <= left and part.sequence.remaining == left - part.steps
            assert (part.first, part.last) == (not begun, part.steps == left)
            assert part.last or part.sequence.divisible
        assert single.model == blocks.model
        rows = [(part.sequence.id, part.sequence.number, *part[1:]) for part in blocks.parts]
        for whole in blocks.blocks:
            _check_columns(whole)
            for row, id in enumerate(whole.ids):
                rows += [(id, number, steps, True, True) for number, steps in enumerate(whole.lengths_of(row))]
        assert sorted((part.sequence.id, part.sequence.number, *part[1:]) for part in single.parts) == sorted(rows)

    def time_passes(self) -> None:
        self.now += self.chance.choice([0.0, 0.3, 5.0, 50.0])

    def cancel(self) -> None:
        queued = [id for id, sequences in self.single_sequences.items() if any(sequence.remaining for sequence in sequences)]
        if not queued:
            return
        id = self.chance.choice(queued)
        dropped = self.single.drop(self.single_sequences.pop(id))
        if id in self.block_sequences:
            assert self.blocks.drop(self.block_sequences[id]) == dropped
        else:
            assert self.blocks.drop_request(NOBODY, id) == (dropped > 0)

    def drop_late(self) -> None:
        single, blocks = self.single.drop_late(self.now), self.blocks.drop_late(self.now)
        late = [sequence.id for sequence in blocks.sequences]
        late += [id for whole in blocks.blocks for row, id in enumerate(whole.ids) for _ in whole.lengths_of(row)]
        assert sorted(sequence.id for sequence in single.sequences) == sorted(late)
        assert all(sequence.deadline <= self.now for sequence in single.sequences)
        for sequence in single.sequences:
            self.single_sequences.pop(sequence.id, None)

    def _unpack(self, one: QueuedBlock) -> list[NamedSequence]:
        [id] = one.ids
        _check_columns(one)
        self.block_sequences[id] = [
            NamedSequence(id, number, steps, one.deadline, one.priority, share=one.share, divisible=one.divisible)
            for number, steps in enumerate(one.lengths)
        ]
        return self.block_sequences[id]


def _values(requests: list[tuple[int, float, list[int]]]) -> bytes:
    """Return the id of its request as every value."""
    return b"".join(np.full(sum(steps), id, IDS).tobytes() for id, _, steps in requests)


def _check_columns(made: QueuedBlock) -> None:
    """Check that the columns of a block belong together, and that its totals match them."""
    assert (made.requests, made.sequences, made.steps) == (len(made.ids), len(made.lengths), sum(made.lengths))
    assert (made.shortest, made.longest, made.deadline) == (min(made.lengths), max(made.lengths), min(made.deadlines))
    expected = [id for id, steps in zip(made.ids, made.sizes[:, STEPS].tolist(), strict=True) for _ in range(steps)]
    assert np.frombuffer(made.columns.values, IDS).tolist() == expected


@pytest.mark.parametrize("seed", range(24))
def test_blocks_run_as_their_requests_would_one_by_one(seed: int) -> None:
    """Every second story has requests of one sequence each, and every fourth has tenants."""
    sequences = (1,) if seed % 2 else (1, 1, 1, 2, 4)
    pair = Pair(random.Random(seed), TENANTS if seed % 4 == 1 else (NO_TENANT,), sequences)
    for _ in range(EVENTS):
        pair.event()


def test_queue_that_is_never_empty_keeps_no_block_that_has_run() -> None:
    queue: Scheduler[NamedSequence] = Scheduler(SchedulerLimits(100, 8, 1000, 100.0), lambda _: Cost(1.0, 0.0, 0.0))
    alive: list[weakref.ref[QueuedBlock]] = []
    for number in range(200):
        made = block([(10 * number + id, 1e9, [1 + id % 3]) for id in range(8)])
        alive.append(weakref.ref(made))
        assert not queue.add_block(made, now=float(number))
        del made
        if number > 3:
            scheduled = queue.next_batch()
            assert scheduled is not None and sum(taken.sequences for taken in scheduled.blocks) == 8
            del scheduled
    assert queue.waiting == 32
    assert sum(reference() is not None for reference in alive) <= 5


@pytest.mark.parametrize(
    ("steps", "sequences", "deadline", "accepted"), [(1, 1, 1e9, 1), (1, 3, 1e9, 0), (40, 1, 50.0, 0), (40, 1, 10.0, 0)]
)
def test_requests_with_the_same_error_are_refused_together(steps: int, sequences: int, deadline: float, accepted: int) -> None:
    queue: Scheduler[NamedSequence] = Scheduler(SchedulerLimits(9, 2, 1000, 100.0), lambda _: Cost(0.0, 1.0, 0.0))
    assert not queue.add_block(block([(id, 1e9, [1]) for id in range(8)]), now=0.0)
    [refused] = queue.add_block(block([(id, deadline, [steps] * sequences) for id in range(10, 30)]), now=0.0)
    assert refused.ids == list(range(10 + accepted, 30))


def test_host_that_is_slower_than_the_budget_divides_no_request() -> None:
    """Its time counts for every batch, so more batches would only cost it more."""
    queue: Scheduler[NamedSequence] = Scheduler(SchedulerLimits(100, 8, 1000, 1.0), lambda _: Cost(10.0, 0.5, 0.0))
    for id in (1, 2):
        assert not queue.add_block(block([(id, 1e9, [1, *[18] * 7])]), now=0.0)
        scheduled = queue.next_batch()
        assert scheduled is not None and [whole.ids for whole in scheduled.blocks] == [[id]]


def test_arrival_renews_the_order_of_requests() -> None:
    """Requests that are too late leave a block before it arrives."""
    left = block([(1, 0.0, [1]), (2, 9.0, [1]), (3, 9.0, [1])]).without([0])
    assert left is not None
    left.arrive(1.0, 1000, None)
    assert list(left.orders) == [1000, 1001]


REQUESTS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=8)


@given(REQUESTS, st.data())
def test_part_and_rest_of_a_block_are_the_block(lengths: list[list[int]], data: st.DataObject) -> None:
    requests = [(7 * index + 1, 10.0 + index, steps) for index, steps in enumerate(lengths)]
    whole = block(requests, _values(requests))
    whole.arrive(1.0, 5, Cost(1.0, 1.0, 0.0))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    part, rest = whole.select(chosen), whole.without(chosen)
    for made in (part, rest) if rest is not None else (part,):
        _check_columns(made)
        assert made.arrived == 1.0
    ids = part.ids + (rest.ids if rest is not None else [])
    assert sorted(ids) == whole.ids
    assert part.due.tolist() == whole.due[chosen].tolist() and list(part.orders) == [whole.orders[index] for index in chosen]
