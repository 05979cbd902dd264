"""Requests in blocks: every step of every sequence runs once, in order and within all limits, and the same in blocks of one request."""

from __future__ import annotations

import random
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import msgspec
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
from tests.engine.batching.harness import MODEL, OTHER, FakeStates, block, scheduled_rows, scheduler

EVENTS = 250
LENGTHS = (1, 2, 5, 16, 17, 40)
TENANTS = Share("one"), Share("two", 4.0), Share("three")
SESSIONS = 5
NOBODY: Any = None


@dataclass
class SentRequest:
    """A request. handles: the state handles of its sequences, if they have any; order: how many requests arrived before it."""

    id: int
    model: ModelKey
    share: Share
    deadline: float
    lengths: list[int]
    handles: list[int]
    order: int

    def __post_init__(self) -> None:
        self.done = np.zeros(len(self.lengths), int)
        """How many steps of each of its sequences have run."""

    @property
    def left(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array(self.lengths) - self.done

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
    return *map(bytes, msgspec.structs.astuple(made.columns)), handles, list(made.sessions), list(made.at), *totals


class Story:
    """Two schedulers that receive the same requests, in joint blocks and in blocks of one request, and a plain account of these."""

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
        self.now, self.orders, self.handles = 0.0, count(), count(1000)

    def event(self) -> None:
        self.chance.choices((self.add, self.batch, self.cancel, self.drop_late, self.batches_end), (6, 5, 1, 1, 2))[0]()
        if self.chance.random() < 0.2:
            self.states.free = self.chance.choice([0, 1, 2, 5])
            self.now += self.chance.choice([0.3, 5.0, 50.0])
        self.note_whether_chunks_wait()
        self.check_counts()

    def add(self) -> None:
        choose = self.chance.choice
        model, priority, busy, share = choose([MODEL, OTHER]), choose([0, 0, -1, 1]), choose([0.0, 3.0]), choose(self.shares)
        kind, requests = choose(["plain", "plain", "session", "states"]), []
        for _ in range(choose([1, 1, 2, 4, 8])):
            lengths = [choose(LENGTHS) for _ in range(1 if kind == "session" else choose(self.sequences))]
            handles = [next(self.handles) for _ in lengths if kind == "states"]
            if kind == "session":
                handles = [SESSIONS * (len(TENANTS) * (model == OTHER) + self.shares.index(share)) + choose(range(SESSIONS))]
            deadline, order = self.now + choose([1.0, 30.0, 200.0, 1e9]), next(self.orders)
            requests.append(SentRequest(order + 1, model, share, deadline, lengths, handles, order))
        options = {"model": model, "priority": priority, "share": share, "divisible": self.divisible[model]}
        alone = [self.single.add_block(block_of([request], **options), now=self.now, busy=busy) for request in requests]
        all_refused = self.joint.add_block(block_of(requests, **options), now=self.now, busy=busy), chain(*alone)
        refused, expected = ({id: (type(error), error.message) for ids, error in each for id in ids} for each in all_refused)
        assert refused == expected
        self.queued |= {request.id: request for request in requests if request.id not in refused}

    def batch(self) -> None:
        batch, single = self.joint.next_batch(), self.single.next_batch()
        if batch is None or single is None:
            assert batch is single
            return
        rows = scheduled_rows(batch)
        assert (batch.model, rows) == (single.model, scheduled_rows(single))
        steps = [row.steps for row in rows]
        assert (batch.rows, batch.tokens, batch.longest) == (len(rows), sum(steps), max(steps))
        assert batch.rows == 1 or (
            batch.rows <= self.limits.max_batch_sequences and batch.tokens <= self.limits.max_batch_tokens
        )
        self.check_parts(batch)
        self.check_parts(single)
        assert sum(row.first and (not row.last or bool(self.queued[row.id].handles)) for row in rows) <= self.states.free
        handles: list[int] = []
        for id, number, taken, first, last in rows:
            request = self.queued[id]
            left = request.left[number]
            assert request.model == batch.model and 1 <= taken <= left
            assert (first, last) == (request.done[number] == 0, taken == left) and (last or self.divisible[batch.model])
            for handle in request.handles[number : number + 1]:
                assert handle not in handles and (not first or handle not in self.states.in_use)
                assert request.order == min(other.order for other in self.queued.values() if handle in other.handles)
                handles.append(handle)
                self.in_flight |= {handle} if last else set()
        self.states.in_use |= set(handles)
        for id, number, taken, *_ in rows:
            self.queued[id].done[number] += taken
        self.queued = {id: request for id, request in self.queued.items() if request.left.any()}

    def check_parts(self, batch: ScheduledBatch) -> None:
        """Check that requests that run as a whole are in blocks with their columns, and that others are in pieces."""
        ran = Counter(row.id for row in scheduled_rows(batch) if row.first and row.last)
        whole = [id for id, rows in ran.items() if rows == len(self.queued[id].lengths)]
        assert sorted(id for made in batch.blocks for id in made.ids) == whole
        for made in batch.blocks:
            assert contents(made) == contents(block_of([self.queued[id] for id in made.ids]))
        for piece in batch.pieces:
            numbers = piece.sequences - piece.block.first_sequences[piece.request]
            assert piece.done.tolist() == self.queued[piece.block.ids[piece.request]].done[numbers].tolist()

    def batches_end(self) -> None:
        ended = {handle for handle in self.in_flight if self.chance.random() < 0.7}
        self.in_flight -= ended
        self.states.in_use -= ended

    def cancel(self) -> None:
        """Cancel a request, or with it all chunks of its session behind it."""
        if self.queued:
            first = self.chance.choice(list(self.queued.values()))
            chunks = [
                other.id for other in self.queued.values() if other.handles == first.handles != [] and other.id > first.id
            ]
            for queue in (self.joint, self.single):
                for handle in first.handles[:1]:
                    assert dropped_ids(queue.drop_chunks(first.model, handle, first.order)) == chunks
                dropped = queue.drop_request(NOBODY, first.id)
                assert dropped is not None and dropped[0].ids[dropped[1]] == first.id
                assert queue.drop_request(NOBODY, first.id) is None
            self.forget([first.id, *chunks])

    def drop_late(self) -> None:
        late = [request.id for request in self.queued.values() if request.deadline <= self.now]
        for queue in (self.joint, self.single):
            assert not late or queue.earliest_deadline <= self.now
            assert dropped_ids(queue.drop_late(self.now)) == late
        self.forget(late)

    def forget(self, ids: Sequence[int]) -> None:
        """Forget requests that have left the queue. The handles of sequences that have begun are free."""
        for request in map(self.queued.pop, ids):
            begun = {handle for handle, done in zip(request.handles, request.done, strict=False) if done}
            self.states.in_use -= begun - self.in_flight

    def note_whether_chunks_wait(self) -> None:
        waiting = Counter(handle for request in self.queued.values() for handle in request.handles)
        self.states.behind = any(chunks > 1 or handle in self.in_flight for handle, chunks in waiting.items())

    def check_counts(self) -> None:
        expected: dict[tuple[ModelKey, str], Any] = defaultdict(lambda: np.zeros(3, int))
        for request in self.queued.values():
            left = request.left
            work = np.count_nonzero(left), left.sum(), np.count_nonzero(left[request.done > 0])
            expected[request.model, request.share.tenant] += work
        for queue in (self.joint, self.single):
            counts = {
                (model, tenant): [work.count, work.steps, work.begun]
                for model, of_model in queue._queues.items()
                for tenant, work in of_model.tenants.items()
            }
            assert counts == {key: work.tolist() for key, work in expected.items()}
            total, _, begun = sum(expected.values(), start=np.zeros(3, int))
            assert (queue.waiting, queue.begun) == (sum(queue.waiting_by_model().values()), begun) == (total - begun, begun)
        assert self.joint.backlog_seconds() == pytest.approx(self.single.backlog_seconds())

    def finish(self) -> None:
        self.states.free = 5
        for _ in range(5000):
            self.batches_end()
            self.note_whether_chunks_wait()
            self.batch()
            if not self.queued:
                return self.check_counts()
        raise AssertionError("requests never run")


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


REQUESTS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=8)


@given(REQUESTS, st.booleans(), st.data())
def test_part_and_rest_of_a_block_are_the_block(lengths: list[list[int]], stateful: bool, data: st.DataObject) -> None:
    """With the handles of their sequences, their sessions and the steps before them. A piece of a sequence has its values."""
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
    others = [request for index, request in enumerate(requests) if index not in chosen]
    assert contents(rest) == contents(block_of(others)) if rest is not None else not others
    part.arrive(2.0, 1000, None)
    assert list(part.orders) == list(range(1000, 1000 + len(chosen))), "it has arrived again, without the others"
    request, steps = requests[chosen[0]], lengths[chosen[0]]
    done = data.draw(st.integers(0, steps[-1] - 1))
    taken = data.draw(st.integers(1, steps[-1] - done))
    piece = whole.piece(chosen[0], [whole.first_sequences[chosen[0] + 1] - 1], [done], np.array([taken]))
    values = np.frombuffer(request.values(), IDS)[sum(steps[:-1]) + done :][:taken].tobytes()
    assert contents(piece) == contents(block([(request.id, request.deadline, [taken])], values))
