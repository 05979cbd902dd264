"""Who runs in the next turn. The time is an argument, so nothing here waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.batching.scheduler import HEAD_START_SECONDS, Scheduler
from service.engine.turn import Chunk
from service.errors import Overloaded
from service.sequence import ModelKey
from tests.batching.made_up import MODEL, OTHER, chunks

NEVER = 1e9


def scheduler(max_waiting: int = 100, max_turn_rows: int = 8, max_turn_tokens: int = 100) -> Scheduler:
    return Scheduler(max_waiting=max_waiting, max_turn_rows=max_turn_rows, max_turn_tokens=max_turn_tokens)


def add(
    to: Scheduler,
    *steps: int,
    now: float = 0.0,
    model: ModelKey = MODEL,
    priority: int = 0,
    deadline: float = NEVER,
    owner: object = None,
) -> list[Chunk]:
    made = chunks(*steps, owner=owner)
    to.add(model, made, now=now, deadline=deadline, priority=priority)
    return made


def turns(of: Scheduler) -> list[tuple[ModelKey, list[int]]]:
    """All turns until nothing waits: the model, and the steps of each chunk."""
    taken = []
    while (next_turn := of.next_turn()) is not None:
        assert next_turn[0].chunks, "a turn is never empty"
        taken.append((next_turn[0].model, [chunk.steps for chunk in next_turn[0].chunks]))
    return taken


@given(limit=st.integers(1, 20), requests=st.lists(st.integers(1, 12), max_size=12))
@settings(deadline=None)
def test_a_request_is_refused_exactly_when_it_does_not_fit(limit: int, requests: list[int]) -> None:
    queue, waiting = scheduler(max_waiting=limit), 0
    for sequences in requests:
        if waiting + sequences > limit:
            with pytest.raises(Overloaded):
                add(queue, *[1] * sequences)
        else:
            add(queue, *[1] * sequences)
            waiting += sequences
        assert queue.waiting == waiting


def test_nothing_of_a_refused_request_is_queued() -> None:
    queue = scheduler(max_waiting=4)
    add(queue, 1, 2)
    with pytest.raises(Overloaded):
        add(queue, 3, 4, 5)
    assert turns(queue) == [(MODEL, [1, 2])]


def test_the_bound_is_over_all_models() -> None:
    queue = scheduler(max_waiting=3)
    add(queue, 1, 1, model=OTHER)
    with pytest.raises(Overloaded):
        add(queue, 1, 1)


def test_a_refusal_names_the_knob_both_values_and_when_to_retry() -> None:
    queue = scheduler(max_waiting=4)
    add(queue, 1, 1, 1)
    with pytest.raises(Overloaded) as caught:
        add(queue, 1, 1)
    said = "3 sequences wait, this request has 2 and SEQSERVE_MAX_WAITING is 4: retry later, or raise SEQSERVE_MAX_WAITING"
    assert caught.value.message == said
    assert caught.value.retry_after == 1


def test_a_request_that_was_refused_fits_once_a_turn_has_left() -> None:
    queue = scheduler(max_waiting=4, max_turn_rows=3)
    add(queue, 1, 1, 1, 1)
    with pytest.raises(Overloaded):
        add(queue, 2)
    queue.next_turn()
    add(queue, 2, 2, 2)
    assert queue.waiting == 4


def test_nothing_runs_when_nothing_waits() -> None:
    assert scheduler().next_turn() is None


def test_whatever_waits_runs_together() -> None:
    queue = scheduler()
    for now in (0.0, 5.0, 9.0):
        add(queue, 7, now=now)
    assert turns(queue) == [(MODEL, [7, 7, 7])]


def test_a_turn_has_at_most_so_many_rows() -> None:
    queue = scheduler(max_turn_rows=3)
    add(queue, 1, 2, 3, 4, 5, 6, 7)
    assert turns(queue) == [(MODEL, [1, 2, 3]), (MODEL, [4, 5, 6]), (MODEL, [7])]


def test_a_turn_has_at_most_so_many_steps() -> None:
    queue = scheduler(max_turn_tokens=10)
    add(queue, 4, 6, 1, 9, 2)
    assert turns(queue) == [(MODEL, [4, 6]), (MODEL, [1, 9]), (MODEL, [2])]


@pytest.mark.parametrize("steps", [(500, 1, 1), (1, 500, 1), (1, 1, 500)], ids=str)
def test_a_sequence_longer_than_a_turn_runs_alone(steps: tuple[int, ...]) -> None:
    queue = scheduler(max_turn_tokens=10)
    add(queue, *steps)
    taken = turns(queue)
    assert (MODEL, [500]) in taken
    assert [one for _, turn in taken for one in turn] == list(steps)


def test_a_turn_says_when_each_chunk_came() -> None:
    queue = scheduler()
    add(queue, 1, now=3.0)
    add(queue, 2, 3, now=5.0, priority=10)
    taken = queue.next_turn()
    assert taken is not None
    assert dict(zip([chunk.steps for chunk in taken[0].chunks], taken[1], strict=True)) == {1: 3.0, 2: 5.0, 3: 5.0}


def test_within_a_priority_who_came_first_runs_first() -> None:
    queue = scheduler(max_turn_rows=1)
    for steps in (5, 3, 4):
        add(queue, steps, now=7.0)
    add(queue, 1, 2, now=8.0)
    assert turns(queue) == [(MODEL, [steps]) for steps in (5, 3, 4, 1, 2)]


def test_a_higher_priority_runs_first() -> None:
    queue = scheduler(max_turn_rows=1)
    for priority in (0, 2, -1, 1):
        add(queue, 10 + priority, priority=priority)
    assert turns(queue) == [(MODEL, [10 + priority]) for priority in (2, 1, 0, -1)]


def test_a_level_of_priority_is_worth_its_head_start_and_no_more() -> None:
    queue = scheduler(max_turn_rows=1)
    add(queue, 1, now=0.0)
    add(queue, 2, now=0.999 * HEAD_START_SECONDS, priority=1)
    add(queue, 3, now=1.001 * HEAD_START_SECONDS, priority=1)
    assert turns(queue) == [(MODEL, [2]), (MODEL, [1]), (MODEL, [3])]


def test_the_lowest_priority_does_not_starve_behind_a_stream_of_the_highest() -> None:
    queue = scheduler(max_turn_rows=1)
    add(queue, 7, now=0.0, priority=-10)
    ran: list[int] = []
    for second in range(1, 30):
        add(queue, 1, now=second * HEAD_START_SECONDS, priority=10)
        taken = queue.next_turn()
        assert taken is not None
        ran += [chunk.steps for chunk in taken[0].chunks]
    assert ran.index(7) == 19


def test_a_turn_is_of_one_model_and_the_one_due_first_runs_first() -> None:
    queue = scheduler(max_turn_rows=2)
    add(queue, 1, now=0.0)
    add(queue, 10, 11, 12, now=1.0, model=OTHER)
    add(queue, 2, 3, now=2.0)
    assert turns(queue) == [(MODEL, [1, 2]), (OTHER, [10, 11]), (OTHER, [12]), (MODEL, [3])]


def test_dropping_an_owner_takes_all_its_chunks_and_no_other() -> None:
    queue = scheduler()
    add(queue, 1, 2, owner="a")
    add(queue, 3, owner="b")
    add(queue, 4, owner="a", model=OTHER)
    assert queue.drop("a") == 3
    assert queue.waiting == 1
    assert queue.drop("a") == 0
    assert turns(queue) == [(MODEL, [3])]


def test_owners_are_told_apart_by_identity() -> None:
    queue, one, equal = scheduler(), [1], [1]
    add(queue, 1, owner=one)
    assert queue.drop(equal) == 0
    assert queue.drop(one) == 1


def test_what_has_passed_its_deadline_is_taken_out_and_returned() -> None:
    queue = scheduler()
    late = add(queue, 1, 2, deadline=5.0)
    late += add(queue, 3, deadline=4.0, model=OTHER)
    add(queue, 4, deadline=5.001)
    assert queue.drop_late(3.999) == []
    assert sorted(chunk.steps for chunk in queue.drop_late(5.0)) == sorted(chunk.steps for chunk in late)
    assert queue.waiting == 1
    assert turns(queue) == [(MODEL, [4])]


def test_a_request_without_chunks_changes_nothing() -> None:
    queue = scheduler()
    add(queue)
    assert queue.next_turn() is None


@dataclass(frozen=True)
class Queued:
    """One waiting chunk as a plain list sees it."""

    due: float
    model: ModelKey
    deadline: float
    chunk: Chunk


class Queueing(RuleBasedStateMachine):
    """Any order of requests, turns, cancellations and deadlines, beside one plain list in the order of arrival."""

    ROWS, TOKENS, LIMIT = 3, 10, 12

    def __init__(self) -> None:
        super().__init__()
        self.queue = scheduler(self.LIMIT, self.ROWS, self.TOKENS)
        self.plain: list[Queued] = []
        self.now = 0.0

    @rule(
        steps=st.lists(st.integers(1, 14), min_size=1, max_size=5),
        model=st.sampled_from([MODEL, OTHER]),
        owner=st.integers(0, 3),
        priority=st.integers(-2, 2),
        allowed=st.integers(0, 4),
    )
    def request(self, steps: list[int], model: ModelKey, owner: int, priority: int, allowed: int) -> None:
        deadline = self.now + allowed
        try:
            made = add(self.queue, *steps, now=self.now, model=model, owner=owner, priority=priority, deadline=deadline)
        except Overloaded:
            assert len(self.plain) + len(steps) > self.LIMIT
            return
        due = self.now - priority * HEAD_START_SECONDS
        self.plain += [Queued(due, model, deadline, chunk) for chunk in made]
        assert len(self.plain) <= self.LIMIT

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(owner=st.integers(0, 3))
    def cancel(self, owner: int) -> None:
        kept = [one for one in self.plain if one.chunk.owner != owner]
        assert self.queue.drop(owner) == len(self.plain) - len(kept)
        self.plain = kept

    @rule()
    def look_at_the_clock(self) -> None:
        late = [one.chunk for one in self.plain if one.deadline <= self.now]
        assert {id(chunk) for chunk in self.queue.drop_late(self.now)} == {id(chunk) for chunk in late}
        self.plain = [one for one in self.plain if one.deadline > self.now]

    @rule()
    def turn(self) -> None:
        taken = self.queue.next_turn()
        if taken is None:
            assert not self.plain
            return
        turn, _ = taken
        mine = sorted((one for one in self.plain if one.model == turn.model), key=lambda one: one.due)
        assert mine[0].due == min(one.due for one in self.plain)
        first = [one.chunk for one in mine[: turn.rows]]
        assert [id(chunk) for chunk in turn.chunks] == [id(chunk) for chunk in first]
        assert turn.rows == 1 or turn.tokens <= self.TOKENS
        left_out = mine[turn.rows :]
        assert turn.rows == self.ROWS or not left_out or turn.tokens + left_out[0].chunk.steps > self.TOKENS
        assert turn.rows <= self.ROWS
        gone = {id(chunk) for chunk in turn.chunks}
        self.plain = [one for one in self.plain if id(one.chunk) not in gone]

    @invariant()
    def the_count_is_what_is_queued(self) -> None:
        assert self.queue.waiting == len(self.plain)
        queued = {model: [one.chunk.steps for one in self.plain if one.model == model] for model in (MODEL, OTHER)}
        expected = {(model, len(steps), sum(steps)) for model, steps in queued.items() if steps}
        assert set(self.queue.waiting_by_model()) == expected


TestQueueing = Queueing.TestCase
TestQueueing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
