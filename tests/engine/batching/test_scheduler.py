"""Which sequences the scheduler puts into the next batch, and how many steps of each. Time is an argument: no test waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.batching.admission import CAUTION
from service.engine.batching.due import HEAD_START_SECONDS, STRETCH
from service.engine.batching.scheduler import Scheduler
from service.engine.batching.selection import LEAST_STEPS, UNLIMITED, fair_share
from service.engine.execution.cost_model import Cost
from service.errors import DeadlineExceeded, Overloaded
from service.ipc.messages.models import ModelKey
from tests.engine.batching.harness import COST, LIMITS, MODEL, NEVER, OTHER, FakeStates, block, scheduled_rows, scheduler

STEP_COST = Cost(0.0, 1.0, 0.0)
"""One second per step of the longest row."""


REQUEST_IDS = count(1)
OWNER: Any = object()


def add(
    to: Scheduler,
    *requests: int | list[int],
    deadline: float = NEVER,
    now: float = 0.0,
    model: ModelKey = MODEL,
    busy: float = 0.0,
    owner: object = OWNER,
    **options: Any,
) -> list[int]:
    """Add a block. requests: the steps of each, or of its sequences; options: of the block. Returns their ids; raises a refusal."""
    made = [(next(REQUEST_IDS), deadline, steps if isinstance(steps, list) else [steps]) for steps in requests]
    for refused in to.add_block(block(made, model=model, owner=owner, **options), now=now, busy=busy):
        raise refused.error
    return [id for id, *_ in made]


def batches(of: Scheduler) -> list[tuple[ModelKey, list[int]]]:
    """Return all batches until the queue is empty: the model, and the steps of each sequence, by its arrival."""
    taken = []
    while (next_batch := of.next_batch()) is not None:
        assert next_batch.rows, "a batch is never empty"
        taken.append((next_batch.model, [row.steps for row in scheduled_rows(next_batch)]))
    return taken


# The queue limit.


def test_full_queue_of_all_models_refuses_a_request_until_the_next_batch() -> None:
    """It counts sequences that have not begun. The refusal names the setting, both values and when to retry."""
    queue = scheduler(max_waiting=4, max_batch_sequences=2)
    add(queue, 1, model=OTHER)
    add(queue, 1, 1)
    with pytest.raises(Overloaded) as caught:
        add(queue, [1, 1])
    message = "3 sequences wait, this request has 2 and SEQSERVE_MAX_WAITING is 4: retry later, or raise SEQSERVE_MAX_WAITING"
    assert caught.value.message == message
    assert caught.value.retry_after == 1
    assert queue.waiting == 3, "none of its sequences is queued"
    queue.next_batch()
    add(queue, [1, 1])


# Batches of whole sequences.


def test_batch_respects_both_limits() -> None:
    queue = scheduler(max_batch_sequences=3, max_batch_tokens=10)
    add(queue, 1, 2, 3, 4, 6, 1, 9, 2)
    assert batches(queue) == [(MODEL, [1, 2, 3]), (MODEL, [4, 6]), (MODEL, [1, 9]), (MODEL, [2])]


def test_long_indivisible_sequence_runs_after_short_ones() -> None:
    queue = scheduler(cost=STEP_COST, batch_seconds=20.0, max_batch_tokens=1000)
    add(queue, 10, 90, 10, 12)
    assert batches(queue) == [(MODEL, [10, 10, 12]), (MODEL, [90])]


def test_long_indivisible_sequence_that_is_due_runs_with_others() -> None:
    queue = scheduler(cost=STEP_COST, batch_seconds=20.0, max_batch_tokens=1000)
    add(queue, 90)
    add(queue, 10, 80, now=90 * STRETCH)
    assert batches(queue) == [(MODEL, [90, 10, 80])]


def test_priority_level_is_worth_its_head_start() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, 1, now=0.0)
    add(queue, 2, now=0.999 * HEAD_START_SECONDS, priority=1)
    add(queue, 3, now=1.001 * HEAD_START_SECONDS, priority=1)
    assert batches(queue) == [(MODEL, [2]), (MODEL, [1]), (MODEL, [3])]


# Batches of chunks.


@given(st.lists(st.integers(1, 200), min_size=1, max_size=64), st.integers(64, 4000))
def test_share_is_the_most_steps_of_each_sequence_that_fit(lengths: list[int], steps: int) -> None:
    share = fair_share(lengths, steps)
    assert sum(min(length, share) for length in lengths) <= steps
    assert share == UNLIMITED or sum(min(length, share + 1) for length in lengths) > steps


def test_long_sequences_take_steps_that_short_ones_leave() -> None:
    queue = scheduler(max_batch_sequences=8, max_batch_tokens=160, cost=Cost(10.0, 1.0, 0.0), batch_seconds=1000.0)
    add(queue, *[10] * 6, 500, 500, divisible=True)
    # The short sequences leave 50 steps to each, and batches of 20 steps have 0.8 of that throughput.
    # With an equal share of 20 steps, K would be 16.
    assert [row.steps for row in scheduled_rows(queue.next_batch())] == [*[10] * 6, 20, 20]


def test_shortest_sequence_limits_the_steps_of_a_batch() -> None:
    queue = scheduler(cost=STEP_COST, max_batch_tokens=1000)
    add(queue, 90, 18, 80, divisible=True)
    assert batches(queue) == [(MODEL, [32, 18, 32]), (MODEL, [58, 48])]


def test_batch_takes_at_least_the_least_steps() -> None:
    queue = scheduler(cost=STEP_COST, batch_seconds=0.001)
    add(queue, 2 * LEAST_STEPS + 3, divisible=True)
    assert batches(queue) == [(MODEL, [LEAST_STEPS]), (MODEL, [LEAST_STEPS]), (MODEL, [3])]


def test_batch_takes_longer_than_its_fixed_time() -> None:
    """A host that is slow cuts no sequence that runs as long as the host takes for a batch."""
    queue = scheduler(cost=Cost(50.0, 1.0, 0.0), batch_seconds=10.0)
    add(queue, 50, divisible=True)
    add(queue, 51, divisible=True)
    assert batches(queue) == [(MODEL, [50, 50]), (MODEL, [1])]


def test_first_sequence_is_predicted_to_take_the_batches_that_it_takes() -> None:
    """Its batches are as long as their fixed time, which is above the budget."""
    queue = scheduler(cost=Cost(50.0, 1.0, 0.0), batch_seconds=10.0, max_batch_tokens=1000)
    add(queue, 200, deadline=CAUTION * 410.0, divisible=True, busy=1.0)
    assert batches(queue) == [(MODEL, [50])] * 4


def test_short_sequence_joins_and_leaves_while_a_long_one_runs() -> None:
    queue = scheduler(cost=STEP_COST, batch_seconds=16.0)
    [long] = add(queue, 64, divisible=True)
    assert [row.steps for row in scheduled_rows(queue.next_batch())] == [16]
    [short] = add(queue, 10, now=1.0, divisible=True)
    assert scheduled_rows(queue.next_batch()) == [(long, 0, 16, False, False), (short, 0, 10, True, True)]
    assert [row.id for row in scheduled_rows(queue.next_batch())] == [long]


def test_stream_of_short_sequences_does_not_starve_a_long_one() -> None:
    queue = scheduler(cost=STEP_COST, batch_seconds=100.0, max_batch_sequences=1)
    [long] = add(queue, 10, divisible=True)
    waited = running = 0
    while running != long:
        waited += 1
        add(queue, 1, now=waited, divisible=True)
        [(running, *_)] = scheduled_rows(queue.next_batch())
    assert waited == pytest.approx(9 * STRETCH, abs=2)


def test_sequence_without_room_for_its_state_waits() -> None:
    queue = scheduler(cost=STEP_COST, batch_seconds=10.0, states=FakeStates(room=1))
    first, _ = add(queue, 50, 60, divisible=True)
    [short] = add(queue, 9, now=1.0, divisible=True)
    assert [row.id for row in scheduled_rows(queue.next_batch())] == [first, short]
    [kept] = add(queue, 9, now=3.0, divisible=True, handles=np.array([7]))
    assert [row.id for row in scheduled_rows(queue.next_batch())] == [first, kept], "what is due first takes the room"


def test_chunk_that_waits_for_its_session_blocks_no_other() -> None:
    states = FakeStates(1000, 7)
    queue = scheduler(states=states)
    add(queue, 5, handles=np.array([7]))
    assert queue.next_batch() is None
    add(queue, 6, now=1.0)
    add(queue, 7, model=OTHER)
    assert batches(queue) == [(MODEL, [6]), (OTHER, [7])]
    states.in_use.clear()
    assert batches(queue) == [(MODEL, [5])]


# Several models.


def test_priority_counts_between_models_as_within_one() -> None:
    """A level is worth its head start in device time, and a model with the same level waits for its turn."""
    queue = scheduler(max_batch_sequences=1, cost=Cost(0.6 * HEAD_START_SECONDS, 0.0, 0.0))
    add(queue, 10, 11, 12, model=OTHER, priority=1)
    add(queue, 1, 2, 3)
    assert batches(queue) == [(OTHER, [10]), (OTHER, [11]), (MODEL, [1]), (OTHER, [12]), (MODEL, [2]), (MODEL, [3])]


def test_models_share_the_device_by_time() -> None:
    costs = {MODEL: COST, OTHER: Cost(3.0, 0, 0)}
    queue = Scheduler(replace(LIMITS, max_batch_sequences=1), costs.__getitem__, FakeStates())
    add(queue, *[1] * 40)
    add(queue, *[1] * 40, model=OTHER)
    assert [model for model, _ in batches(queue)][:40].count(MODEL) == 30


def test_idle_model_earns_no_credit() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, *[1] * 40)
    for _ in range(20):
        scheduled_rows(queue.next_batch())
    add(queue, *[1] * 40, model=OTHER)
    assert [model for model, _ in batches(queue)][:10].count(MODEL) == 5


# Requests that leave before they have run.


def test_drop_of_an_owner_leaves_the_requests_of_others() -> None:
    queue = scheduler()
    [other] = add(queue, [1, 2], owner=object())
    dropped = add(queue, 3) + add(queue, 4, 5, model=OTHER)
    assert [made.ids[index] for made, indices in queue.drop_owner(OWNER) for index in indices] == dropped
    assert queue.drop_request(OWNER, other) is None and queue.waiting == 2
    assert batches(queue) == [(MODEL, [1, 2])]


# Deadlines that cannot be met.


def test_request_that_would_miss_its_deadline_is_refused() -> None:
    queue, enough = scheduler(max_batch_sequences=1, cost=Cost(2.0, 0, 0)), CAUTION * 8
    add(queue, 1, 1, 1)
    with pytest.raises(Overloaded) as caught:
        add(queue, 1, deadline=enough - 0.1)
    assert caught.value.retry_after == 8
    assert f"an answer is expected in 8 s and the deadline is in {enough - 0.1:.3g} s" in caught.value.message
    add(queue, 1, deadline=enough)


def test_rejection_covers_similar_requests_until_the_queue_moves() -> None:
    queue = scheduler(max_batch_sequences=1, cost=STEP_COST)
    [first, second] = add(queue, 8, 8, priority=100)
    for deadline, steps in ((20.0, 4), (CAUTION * 20 - 0.1, 4), (19.0, 6)):
        with pytest.raises(Overloaded, match="expected in 20 s and the deadline is in 20 s"):
            add(queue, steps, deadline=deadline)
    with pytest.raises(Overloaded, match="expected in 17 s"):
        add(queue, 1, deadline=20.0)
    add(queue, 4, deadline=CAUTION * 20 + STRETCH * 4)
    assert all(queue.drop_request(OWNER, id) for id in (first, second))
    add(queue, 4, deadline=CAUTION * 20 - 0.1)


def test_full_batches_leave_time_for_sequences_due_earlier() -> None:
    queue = scheduler(max_batch_sequences=1, cost=STEP_COST, batch_seconds=8.0)
    add(queue, 8, 8, divisible=True)
    with pytest.raises(Overloaded, match="expected in 24 s"):
        add(queue, 8, deadline=CAUTION * 24 + STRETCH * 8 - 1, divisible=True)
    add(queue, 8, deadline=CAUTION * 24 + STRETCH * 8, divisible=True)


def test_running_batches_count_against_the_deadline() -> None:
    """An idle engine refuses nothing by prediction. A request that takes too long alone has another error."""
    queue = scheduler(cost=Cost(2.0, 0, 0))
    with pytest.raises(Overloaded):
        add(queue, 1, deadline=CAUTION * 5 - 0.1, busy=3.0)
    add(queue, 1, deadline=CAUTION * 5, busy=3.0)
    with pytest.raises(DeadlineExceeded, match="about 2 s alone"):
        add(queue, 1, deadline=CAUTION * 2 - 0.1)
    idle = scheduler(cost=Cost(1e6, 0, 0))
    add(idle, 1, deadline=0.1)
    assert idle.waiting == 1


def test_higher_priority_ignores_the_work_behind_it() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, *[1] * 50, priority=-1)
    with pytest.raises(Overloaded):
        add(queue, 1, deadline=10.0, priority=-1)
    add(queue, 1, deadline=10.0, priority=1)
