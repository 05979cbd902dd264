"""Requests in blocks: every step of every sequence runs once, in order and within all limits, and the same in blocks of one request."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.scheduler import ScheduledBatch, Scheduler
from service.engine.batching.selection import SchedulerLimits
from service.engine.execution.cost_model import Cost
from service.ipc.messages.inference import IDS, NO_TENANT, Share
from service.ipc.messages.models import ModelKey
from tests.engine.batching.harness import MODEL, NOBODY, OTHER, FakeStates, block, scheduled_rows, scheduler

EVENTS = 250
LENGTHS = (1, 2, 5, 16, 17, 40)
TENANTS = Share("one"), Share("two", 4.0), Share("three")
SESSIONS = 5


@dataclass
class SentRequest:
    """A request, and how many steps of each of its sequences have run. handles: the state handles of its sequences, if they have any.

    order: how many requests arrived before it.
    """

    id: int
    model: ModelKey
    share: Share
    deadline: float
    lengths: list[int]
    handles: list[int]
    order: int
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.lengths)

    @property
    def steps_left(self) -> int:
        return sum(self.lengths) - sum(self.done)

    @property
    def begun(self) -> int:
        """How many sequences have run in part."""
        return sum(0 < done < steps for done, steps in zip(self.done, self.lengths, strict=True))

    def values(self) -> bytes:
        """Return a value for each step that no other step of any request has."""
        return (1000 * self.id + np.arange(sum(self.lengths))).astype(IDS).tobytes()


def block_of(requests: Sequence[SentRequest], **options: Any) -> QueuedBlock:
    """Return a block of requests of one kind. Those with states also name sessions. options: as in `block`."""
    handles = [handle for request in requests for handle in request.handles]
    return block(
        [(request.id, request.deadline, request.lengths) for request in requests],
        b"".join(request.values() for request in requests),
        b"".join(bytes([handle % 256] * 4) for handle in handles),
        handles=np.array(handles) if handles else None,
        sessions=[str(request.id) for request in requests if handles],
        at=[request.order for request in requests if handles],
        **options,
    )


def contents(made: QueuedBlock) -> tuple[Any, ...]:
    """Return all columns of a block, and its totals."""
    totals = made.requests, made.sequences, made.steps, made.shortest, made.longest, made.deadline
    handles = None if made.handles is None else made.handles.tolist()
    return *map(bytes, made.columns), handles, list(made.sessions), list(made.at), *totals


class Story:
    """Two schedulers that receive the same requests, in joint blocks and in blocks of one request, and a plain account of these.

    shares: of the tenants that send requests. sequences: numbers of sequences in a request.
    """

    def __init__(self, seed: int, shares: Sequence[Share], sequences: Sequence[int]) -> None:
        self.chance = random.Random(seed)
        self.shares, self.sequences = shares, sequences
        choose = self.chance.choice
        self.costs = {
            # Sums of these are exact in any order.
            key: Cost(choose([0.0, 1.0, 20.0]), choose([0.0, 0.125, 1.0]), choose([0.0, 1 / 64]))
            for key in (MODEL, OTHER)
        }
        self.divisible = {key: choose([True, False]) for key in (MODEL, OTHER)}
        self.limits = SchedulerLimits(choose([5, 20, 100]), choose([1, 3, 8]), choose([30, 100]), choose([5.0, 10.0, 100.0]))
        self.states = FakeStates(choose([0, 1, 2, 5]))
        self.joint, self.single = (Scheduler(self.limits, self.costs.__getitem__, self.states) for _ in range(2))
        # Every request is predicted exactly, so that the bound of the other scheduler is never too small.
        self.single._sure_seconds = lambda *_: float("inf")  # type: ignore[method-assign, assignment]
        self.queued: dict[int, SentRequest] = {}
        self.in_flight: set[int] = set()
        """The handles whose last steps are in a batch that has not ended."""
        self.now, self.sent, self.handles = 0.0, 0, 1000

    def event(self) -> None:
        events = (self.add, self.batch, self.time_passes, self.cancel, self.drop_late, self.drop_chunks, self.batches_end)
        self.chance.choices(events, (6, 5, 2, 1, 1, 0.5, 2))[0]()
        if self.chance.random() < 0.2:
            self.states.free = self.chance.choice([0, 1, 2, 5])
        self.count_chunks()
        self.check_counts()

    def add(self) -> None:
        choose = self.chance.choice
        model, priority, busy, share = choose([MODEL, OTHER]), choose([0, 0, -1, 1]), choose([0.0, 3.0]), choose(self.shares)
        kind, requests = choose(["plain", "plain", "session", "states"]), []
        for _ in range(choose([1, 1, 2, 4, 8])):
            lengths = [choose(LENGTHS) for _ in range(1 if kind == "session" else choose(self.sequences))]
            handles = [self.new_handle() for _ in lengths if kind == "states"]
            if kind == "session":
                handles = [SESSIONS * (len(TENANTS) * (model == OTHER) + self.shares.index(share)) + choose(range(SESSIONS))]
            deadline = self.now + choose([1.0, 30.0, 200.0, 1e9])
            requests.append(SentRequest(self.sent + 1, model, share, deadline, lengths, handles, self.sent))
            self.sent += 1
        options = {"model": model, "priority": priority, "share": share, "divisible": self.divisible[model]}
        refused, alone = (
            {
                id: (type(error), error.message)
                for made in blocks
                for ids, error in queue.add_block(made, now=self.now, busy=busy)
                for id in ids
            }
            for queue, blocks in (
                (self.joint, [block_of(requests, **options)]),
                (self.single, [block_of([request], **options) for request in requests]),
            )
        )
        assert refused == alone
        self.queued |= {request.id: request for request in requests if request.id not in refused}

    def new_handle(self) -> int:
        self.handles += 1
        return self.handles

    def batch(self) -> None:
        batch, single = self.joint.next_batch(), self.single.next_batch()
        if batch is None or single is None:
            assert batch is single
            return
        rows = scheduled_rows(batch)
        assert (batch.model, rows) == (single.model, scheduled_rows(single))
        steps = [row.steps for row in rows]
        assert (batch.rows, batch.tokens, batch.longest) == (len(rows), sum(steps), max(steps))
        assert batch.rows <= self.limits.max_batch_sequences
        assert batch.rows == 1 or batch.tokens <= self.limits.max_batch_tokens
        self.check_parts(batch)
        self.check_parts(single)
        assert sum(row.first and (not row.last or bool(self.queued[row.id].handles)) for row in rows) <= self.states.free
        handles: list[int] = []
        for id, number, taken, first, last in rows:
            request = self.queued[id]
            left = request.lengths[number] - request.done[number]
            assert request.model == batch.model and 1 <= taken <= left
            assert (first, last) == (request.done[number] == 0, taken == left) and (last or self.divisible[batch.model])
            for handle in request.handles[number : number + 1]:
                assert not first or handle not in self.states.in_use
                assert request.order == min(other.order for other in self.queued.values() if handle in other.handles)
                handles.append(handle)
                if last:
                    self.in_flight.add(handle)
        assert len(set(handles)) == len(handles)
        self.states.in_use |= set(handles)
        for id, number, taken, *_ in rows:
            self.queued[id].done[number] += taken
        self.queued = {id: request for id, request in self.queued.items() if request.steps_left}

    def check_parts(self, batch: ScheduledBatch) -> None:
        """Check that requests that run as a whole are in blocks with their columns, and that others are in pieces."""
        rows = scheduled_rows(batch)
        whole = Counter(row.id for row in rows if row.first and row.last)
        ids = [id for made in batch.blocks for id in made.ids]
        assert sorted(ids) == [id for id, count in whole.items() if count == len(self.queued[id].lengths)]
        for made in batch.blocks:
            assert contents(made) == contents(block_of([self.queued[id] for id in made.ids]))
        for piece in batch.pieces:
            made = piece.block.piece(piece.request, piece.sequence, piece.done, piece.steps)
            request, number = self.queued[made.ids[0]], piece.sequence - piece.block.first_sequences[piece.request]
            begin = sum(request.lengths[:number]) + piece.done
            values = np.frombuffer(request.values(), IDS)[begin : begin + piece.steps].tobytes()
            assert piece.done == request.done[number]
            assert contents(made) == contents(block([(request.id, request.deadline, [piece.steps])], values))

    def batches_end(self) -> None:
        ended = {handle for handle in self.in_flight if self.chance.random() < 0.7}
        self.in_flight -= ended
        self.states.in_use -= ended

    def time_passes(self) -> None:
        self.now += self.chance.choice([0.0, 0.3, 5.0, 50.0])

    def cancel(self) -> None:
        if self.queued:
            id = self.chance.choice(list(self.queued))
            for queue in (self.joint, self.single):
                dropped = queue.drop_request(NOBODY, id)
                assert dropped is not None and dropped[0].ids[dropped[1]] == id
                assert queue.drop_request(NOBODY, id) is None
            self.forget([id])

    def drop_late(self) -> None:
        late = [request.id for request in self.queued.values() if request.deadline <= self.now]
        for queue in (self.joint, self.single):
            assert not late or queue.earliest_deadline <= self.now
            assert dropped_ids(queue.drop_late(self.now)) == late
        self.forget(late)

    def drop_chunks(self) -> None:
        of_sessions = [request for request in self.queued.values() if request.handles]
        if of_sessions:
            first = self.chance.choice(of_sessions)
            [handle], after = first.handles[:1], first.order - self.chance.choice([0, 1])
            chunks = [request.id for request in of_sessions if request.handles == [handle] and request.order > after]
            if len(first.handles) == 1:
                for queue in (self.joint, self.single):
                    assert dropped_ids(queue.drop_chunks(first.model, handle, after)) == chunks
                self.forget(chunks)

    def forget(self, ids: Sequence[int]) -> None:
        """Forget requests that have left the queue. The handles of sequences that have begun are free."""
        for request in map(self.queued.pop, ids):
            for handle, done in zip(request.handles, request.done, strict=bool(request.handles)):
                if done and handle not in self.in_flight:
                    self.states.in_use.discard(handle)

    def count_chunks(self) -> None:
        """Find out whether a chunk waits for another."""
        waiting = Counter(handle for request in self.queued.values() for handle in request.handles)
        self.states.behind = any(count > 1 or handle in self.in_flight for handle, count in waiting.items())

    def check_counts(self) -> None:
        for queue in (self.joint, self.single):
            for model in (MODEL, OTHER):
                requests = [request for request in self.queued.values() if request.model == model]
                left = [request.lengths[number] > done for request in requests for number, done in enumerate(request.done)]
                begun = sum(request.begun for request in requests)
                assert queue.holds(model) == bool(requests)
                assert queue.waiting_by_model().get(model, 0) == sum(left) - begun
                if requests:
                    work = queue._queues[model]
                    assert (work.count, work.steps) == (sum(left), sum(request.steps_left for request in requests))
                    for tenant, of_tenant in work.tenants.items():
                        own = [request for request in requests if request.share.tenant == tenant]
                        assert (of_tenant.steps, of_tenant.begun) == (
                            sum(request.steps_left for request in own),
                            sum(request.begun for request in own),
                        )
            assert queue.begun == sum(request.begun for request in self.queued.values())
            assert queue.waiting == sum(queue.waiting_by_model().values())
        assert self.joint.backlog_seconds() == pytest.approx(self.single.backlog_seconds())

    def finish(self) -> None:
        """Run everything that is queued."""
        self.states.free = 5
        for _ in range(5000):
            self.batches_end()
            self.count_chunks()
            self.batch()
            if not self.queued:
                break
        self.check_counts()
        assert not self.joint.waiting and not self.joint.begun


def dropped_ids(dropped: list[tuple[QueuedBlock, list[int]]]) -> list[int]:
    return sorted(made.ids[index] for made, indices in dropped for index in indices)


@pytest.mark.parametrize("seed", range(24))
def test_every_step_runs_once_and_in_order_within_all_limits(seed: int) -> None:
    """Every second story has requests of one sequence each, and half of both have tenants."""
    sequences = (1,) if seed % 2 else (1, 1, 1, 2, 4)
    story = Story(seed, TENANTS if seed % 4 in (1, 2) else (NO_TENANT,), sequences)
    for _ in range(EVENTS):
        story.event()
    story.finish()


def test_queue_that_is_never_empty_keeps_no_block_that_has_run() -> None:
    queue = scheduler()
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
    queue = scheduler(Cost(0.0, 1.0, 0.0), max_waiting=9, max_batch_sequences=2, max_batch_tokens=1000)
    assert not queue.add_block(block([(id, 1e9, [1]) for id in range(8)]), now=0.0)
    [refused] = queue.add_block(block([(id, deadline, [steps] * sequences) for id in range(10, 30)]), now=0.0)
    assert refused.ids == list(range(10 + accepted, 30))


def test_host_that_is_slower_than_the_budget_divides_no_request() -> None:
    """Its time counts for every batch, so more batches would only cost it more."""
    queue = scheduler(Cost(10.0, 0.5, 0.0), max_batch_tokens=1000, batch_seconds=1.0)
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


@given(REQUESTS, st.booleans(), st.data())
def test_part_and_rest_of_a_block_are_the_block(lengths: list[list[int]], stateful: bool, data: st.DataObject) -> None:
    """With the handles of their sequences, their sessions and the steps before them. So is each piece of a sequence."""
    handles = iter(range(100, 200))
    requests = [
        SentRequest(7 * index + 1, MODEL, NO_TENANT, 10.0 + index, steps, [next(handles) for _ in steps if stateful], index)
        for index, steps in enumerate(lengths)
    ]
    whole = block_of(requests)
    whole.arrive(1.0, 5, Cost(1.0, 1.0, 0.0))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    part, rest = whole.select(chosen), whole.without(chosen)
    assert contents(part) == contents(block_of([requests[index] for index in chosen]))
    assert part.due.tolist() == whole.due[chosen].tolist() and list(part.orders) == [whole.orders[index] for index in chosen]
    assert part.arrived == 1.0
    others = [request for index, request in enumerate(requests) if index not in chosen]
    assert contents(rest) == contents(block_of(others)) if rest is not None else not others
