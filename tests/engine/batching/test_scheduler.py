"""Who runs in the next turn, and how far. The time is an argument, so nothing here waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.engine.batching.scheduler import CAUTION, HEAD_START_SECONDS, LEAST_STEPS, STRETCH, Cut, Scheduler, Waiting
from service.engine.execution.cost_model import Cost
from service.errors import DeadlineExceeded, Overloaded
from service.ipc.messages import ModelKey
from tests.engine.batching.fakes import COST, MODEL, NEVER, OTHER, limits, sequences

BY_STEP = Cost(0.0, 1.0, 0.0)
"""A second for each step of the longest row."""


def scheduler(
    max_waiting: int = 100,
    max_batch_sequences: int = 8,
    max_batch_tokens: int = 100,
    *,
    cost: Cost = COST,
    batch_seconds: float = 100.0,
    room: int = 1000,
    continuous: bool = True,
) -> Scheduler[Waiting]:
    said = limits(max_waiting, max_batch_sequences, max_batch_tokens, batch_seconds, continuous)
    return Scheduler(said, lambda _: cost, lambda _: room)


def add(
    to: Scheduler[Waiting],
    *steps: int,
    now: float = 0.0,
    model: ModelKey = MODEL,
    priority: int = 0,
    deadline: float = NEVER,
    cuts: bool = False,
    stateful: bool = False,
    busy: float = 0.0,
) -> list[Waiting]:
    made = sequences(*steps, deadline=deadline, priority=priority, cuts=cuts, stateful=stateful)
    to.add(model, made, now=now, busy=busy)
    return made


def batch(of: Scheduler[Waiting]) -> tuple[ModelKey, list[Cut[Waiting]]]:
    taken = of.next_batch()
    assert taken is not None
    return taken


def batches(of: Scheduler[Waiting]) -> list[tuple[ModelKey, list[int]]]:
    """All turns until nothing waits: the model, and the steps of each sequence that run."""
    taken = []
    while (next_batch := of.next_batch()) is not None:
        assert next_batch[1], "a turn is never empty"
        taken.append((next_batch[0], [cut.steps for cut in next_batch[1]]))
    return taken


# The bound.


@given(limit=st.integers(1, 20), requests=st.lists(st.integers(1, 12), max_size=12))
@settings(deadline=None)
def test_a_request_is_refused_exactly_when_it_does_not_fit(limit: int, requests: list[int]) -> None:
    queue, waiting = scheduler(max_waiting=limit), 0
    for count in requests:
        if waiting + count > limit:
            with pytest.raises(Overloaded):
                add(queue, *[1] * count)
        else:
            add(queue, *[1] * count)
            waiting += count
        assert queue.waiting == waiting


@given(limit=st.sampled_from([1, 7, 64]), offered=st.lists(st.integers(1, 60), max_size=60), data=st.data())
@settings(deadline=None)
def test_what_is_refused_is_what_was_offered_less_what_runs_and_what_may_wait(
    limit: int, offered: list[int], data: st.DataObject
) -> None:
    """Sequences that have begun wait in no line, however much of them is left."""
    queue, refused, accepted, ran = scheduler(max_waiting=limit, cost=BY_STEP, batch_seconds=10.0), 0, 0, 0
    for steps in offered:
        before = queue.waiting
        try:
            add(queue, steps, cuts=True)
            accepted += 1
            assert before < limit
        except Overloaded:
            refused += 1
            assert before == limit
        if data.draw(st.booleans()):
            taken = queue.next_batch()
            ran += sum(cut.first for cut in taken[1]) if taken else 0
        assert queue.waiting == accepted - ran <= limit
    assert refused + accepted == len(offered)


def test_nothing_of_a_refused_request_is_queued() -> None:
    queue = scheduler(max_waiting=4)
    add(queue, 1, 2)
    with pytest.raises(Overloaded):
        add(queue, 3, 4, 5)
    assert batches(queue) == [(MODEL, [1, 2])]


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
    queue = scheduler(max_waiting=4, max_batch_sequences=3)
    add(queue, 1, 1, 1, 1)
    with pytest.raises(Overloaded):
        add(queue, 2)
    queue.next_batch()
    add(queue, 2, 2, 2)
    assert queue.waiting == 4


def test_a_request_without_sequences_changes_nothing() -> None:
    queue = scheduler()
    add(queue)
    assert queue.next_batch() is None


# Turns of whole sequences.


def test_nothing_runs_when_nothing_waits() -> None:
    assert scheduler().next_batch() is None


def test_whatever_waits_runs_together() -> None:
    queue = scheduler()
    for now in (0.0, 5.0, 9.0):
        add(queue, 7, now=now)
    assert batches(queue) == [(MODEL, [7, 7, 7])]


def test_a_turn_has_at_most_so_many_rows() -> None:
    queue = scheduler(max_batch_sequences=3)
    add(queue, 1, 2, 3, 4, 5, 6, 7)
    assert batches(queue) == [(MODEL, [1, 2, 3]), (MODEL, [4, 5, 6]), (MODEL, [7])]


def test_a_turn_has_at_most_so_many_steps() -> None:
    queue = scheduler(max_batch_tokens=10)
    add(queue, 4, 6, 1, 9, 2)
    assert batches(queue) == [(MODEL, [4, 6]), (MODEL, [1, 9]), (MODEL, [2])]


@pytest.mark.parametrize("steps", [(500, 1, 1), (1, 500, 1), (1, 1, 500)], ids=str)
def test_a_sequence_longer_than_a_turn_that_cannot_be_cut_runs_alone(steps: tuple[int, ...]) -> None:
    queue = scheduler(max_batch_tokens=10)
    add(queue, *steps)
    taken = batches(queue)
    assert (MODEL, [500]) in taken
    assert [one for _, run in taken for one in run] == list(steps)


def test_what_cannot_be_cut_and_is_long_does_not_hold_up_short_ones_and_has_its_own_turn_after_them() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=20.0, max_batch_tokens=1000)
    add(queue, 10, 90, 10, 12)
    assert batches(queue) == [(MODEL, [10, 10, 12]), (MODEL, [90])]


def test_a_long_one_that_cannot_be_cut_and_is_due_first_runs_with_whoever_waits() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=20.0, max_batch_tokens=1000)
    add(queue, 90)
    add(queue, 10, 80, now=90 * STRETCH)
    assert batches(queue) == [(MODEL, [90, 10, 80])]


def test_within_a_priority_who_came_first_runs_first() -> None:
    queue = scheduler(max_batch_sequences=1)
    for steps in (5, 3, 4):
        add(queue, steps, now=7.0)
    add(queue, 1, 2, now=8.0)
    assert batches(queue) == [(MODEL, [steps]) for steps in (5, 3, 4, 1, 2)]


def test_a_higher_priority_runs_first() -> None:
    queue = scheduler(max_batch_sequences=1)
    for priority in (0, 2, -1, 1):
        add(queue, 10 + priority, priority=priority)
    assert batches(queue) == [(MODEL, [10 + priority]) for priority in (2, 1, 0, -1)]


def test_a_level_of_priority_is_worth_its_head_start_and_no_more() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, 1, now=0.0)
    add(queue, 2, now=0.999 * HEAD_START_SECONDS, priority=1)
    add(queue, 3, now=1.001 * HEAD_START_SECONDS, priority=1)
    assert batches(queue) == [(MODEL, [2]), (MODEL, [1]), (MODEL, [3])]


def test_the_lowest_priority_does_not_starve_behind_a_stream_of_the_highest() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, 7, now=0.0, priority=-10)
    ran: list[int] = []
    for second in range(1, 30):
        add(queue, 1, now=second * HEAD_START_SECONDS, priority=10)
        ran += [cut.steps for cut in batch(queue)[1]]
    assert ran.index(7) == 19


# Turns of parts.


def test_a_turn_takes_as_many_steps_as_its_budget_allows() -> None:
    queue = scheduler(cost=Cost(4.0, 1.0, 0.5), batch_seconds=100.0, max_batch_tokens=1000)
    add(queue, 200, cuts=True)
    assert batches(queue) == [(MODEL, [64]), (MODEL, [64]), (MODEL, [64]), (MODEL, [8])]


def test_more_rows_leave_fewer_steps_to_each() -> None:
    queue = scheduler(cost=Cost(0.0, 1.0, 1.0), batch_seconds=60.0, max_batch_tokens=1000)
    add(queue, 100, 100, cuts=True)
    assert batch(queue)[1][0].steps == 20


def test_a_turn_takes_no_more_than_the_shortest_has_left_rounded_to_a_power_of_two() -> None:
    queue = scheduler(cost=BY_STEP, max_batch_tokens=1000)
    add(queue, 90, 18, 80, cuts=True)
    assert batches(queue) == [(MODEL, [18, 32, 32]), (MODEL, [48, 58])]


def test_a_turn_takes_so_many_steps_at_least() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=0.001)
    add(queue, 2 * LEAST_STEPS + 3, cuts=True)
    assert batches(queue) == [(MODEL, [LEAST_STEPS]), (MODEL, [LEAST_STEPS]), (MODEL, [3])]


def test_who_comes_joins_the_next_turn_and_leaves_when_it_has_run_while_a_long_one_goes_on() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=16.0)
    [long] = add(queue, 64, cuts=True)
    assert [cut.steps for cut in batch(queue)[1]] == [16]
    [short] = add(queue, 10, now=1.0, cuts=True)
    taken = batch(queue)[1]
    assert {(cut.of, cut.steps, cut.first, cut.last) for cut in taken} == {(long, 16, False, False), (short, 10, True, True)}
    assert [cut.of for cut in batch(queue)[1]] == [long]


def test_long_ones_do_not_keep_a_short_one_out_however_many_they_are() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=10.0, max_batch_sequences=4)
    add(queue, *[1000] * 12, cuts=True)
    batch(queue)
    [short] = add(queue, 5, now=1.5, cuts=True)
    assert any(cut.of is short for cut in batch(queue)[1])


def test_of_equals_who_came_first_is_first_done_whoever_comes_after() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=20.0, max_batch_sequences=4)
    first = add(queue, *[100] * 4, cuts=True)
    for now in range(1, 6):
        add(queue, *[100] * 4, now=now, cuts=True)
        assert [cut.of for cut in batch(queue)[1]] == first
    assert all(one.left == 0 for one in first)


def test_a_long_one_is_not_held_up_for_ever_by_a_stream_of_short_ones() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=100.0, max_batch_sequences=1)
    [long] = add(queue, 10, cuts=True)
    waited = 0
    while long.left:
        waited += 1
        add(queue, 1, now=waited, cuts=True)
        batch(queue)
    assert waited == pytest.approx(9 * STRETCH, abs=2)


def test_who_would_have_to_be_kept_waits_for_room_and_others_run() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=10.0, room=1)
    first, second = add(queue, 50, 60, cuts=True)
    [short] = add(queue, 9, now=1.0, cuts=True)
    assert [cut.of for cut in batch(queue)[1]] == [short, first]
    [kept] = add(queue, 9, now=3.0, cuts=True, stateful=True)
    taken = [cut.of for cut in batch(queue)[1]]
    assert taken == [kept, first] and second.left == 60, "there is room again, and who is due first has it"


def test_who_is_not_ready_waits_and_holds_nobody_up() -> None:
    queue = scheduler()
    [blocked] = add(queue, 5)
    blocked.ready = False
    assert queue.next_batch() is None
    add(queue, 6, now=1.0)
    add(queue, 7, model=OTHER)
    assert batches(queue) == [(MODEL, [6]), (OTHER, [7])]
    blocked.ready = True
    assert batches(queue) == [(MODEL, [5])]


def test_behind_many_who_are_not_ready_others_still_fill_a_turn() -> None:
    queue = scheduler(max_batch_sequences=3)
    for one in add(queue, *[9] * 5):
        one.ready = False
    add(queue, 1, 2, 3, 4, now=1.0)
    assert batches(queue) == [(MODEL, [1, 2, 3]), (MODEL, [4])]


def test_static_batching_cuts_nothing_and_mixes_all() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=10.0, continuous=False)
    add(queue, 50, 10, 40, cuts=True)
    assert batches(queue) == [(MODEL, [50, 10, 40])]


# Models side by side.


def test_a_turn_is_of_one_model() -> None:
    queue = scheduler(max_batch_sequences=2)
    add(queue, 1)
    add(queue, 10, 11, 12, model=OTHER)
    add(queue, 2, 3)
    assert batches(queue) == [(MODEL, [1, 2]), (OTHER, [10, 11]), (MODEL, [3]), (OTHER, [12])]


def test_a_model_with_a_long_line_does_not_keep_another_waiting() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, *[1] * 50)
    batch(queue)
    add(queue, 7, model=OTHER, now=1.0)
    assert batch(queue)[0] == OTHER


def test_models_share_the_engine_by_time_and_not_by_turns() -> None:
    queue: Scheduler[Waiting] = Scheduler(limits(max_batch_sequences=1), {MODEL: COST, OTHER: Cost(3.0, 0, 0)}.__getitem__)
    add(queue, *[1] * 40)
    add(queue, *[1] * 40, model=OTHER)
    ran = [batch(queue)[0] for _ in range(40)]
    assert ran.count(MODEL) == 30


def test_a_model_that_was_away_has_no_claim_for_that_time() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, *[1] * 40)
    for _ in range(20):
        batch(queue)
    add(queue, *[1] * 40, model=OTHER)
    ran = [batch(queue)[0] for _ in range(10)]
    assert ran.count(MODEL) == 5


# Who leaves before it has run.


def test_dropping_takes_out_what_is_named_and_nothing_else() -> None:
    queue = scheduler()
    gone = add(queue, 1, 2)
    add(queue, 3)
    gone += add(queue, 4, model=OTHER)
    assert queue.drop(gone) == 3
    assert queue.waiting == 1
    assert queue.drop(gone) == 0
    assert batches(queue) == [(MODEL, [3])]


def test_what_has_passed_its_deadline_is_taken_out_and_returned() -> None:
    queue = scheduler()
    late = add(queue, 1, 2, deadline=5.0)
    late += add(queue, 3, deadline=4.0, model=OTHER)
    add(queue, 4, deadline=7.0)
    assert queue.drop_late(3.999) == []
    assert set(queue.drop_late(5.0)) == set(late)
    assert queue.waiting == 1
    assert batches(queue) == [(MODEL, [4])]


def test_a_sequence_whose_deadline_passes_between_two_of_its_turns_is_taken_out() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=10.0)
    [long] = add(queue, 100, deadline=150.0, cuts=True)
    batch(queue)
    assert (queue.waiting, queue.begun) == (0, 1)
    assert queue.drop_late(150.0) == [long]
    assert (queue.waiting, queue.begun) == (0, 0)


# Deadlines that cannot be met.


def test_what_cannot_be_in_time_behind_what_waits_is_refused_at_once_and_told_when_to_retry() -> None:
    queue = scheduler(max_batch_sequences=1, cost=Cost(2.0, 0, 0), continuous=False)
    add(queue, 1, 1, 1)
    with pytest.raises(Overloaded) as caught:
        add(queue, 1, deadline=9.9)
    assert caught.value.retry_after == 8
    assert "an answer is expected in 8 s and the deadline is in 9.9 s" in caught.value.message
    add(queue, 1, deadline=10.0)


def test_who_asks_for_as_much_as_one_who_was_refused_is_refused_until_something_has_run_or_left() -> None:
    queue = scheduler(max_batch_sequences=1, cost=BY_STEP, continuous=False)
    [first, _] = add(queue, 8, 8)
    for deadline, steps in ((20.0, 4), (24.9, 4), (19.0, 6)):
        with pytest.raises(Overloaded, match="expected in 20 s and the deadline is in 20 s"):
            add(queue, steps, deadline=deadline)
    with pytest.raises(Overloaded, match="expected in 17 s"):
        add(queue, 1, deadline=20.0)
    add(queue, 4, deadline=25.0)
    assert queue.drop([first]) == 1
    add(queue, 4, deadline=20.0)


def test_where_turns_are_full_time_is_left_for_those_who_will_be_due_before() -> None:
    queue = scheduler(max_batch_sequences=1, cost=BY_STEP, batch_seconds=8.0)
    add(queue, 8, 8, cuts=True)
    with pytest.raises(Overloaded, match="expected in 24 s"):
        add(queue, 8, deadline=CAUTION * 24 + STRETCH * 8 - 1, cuts=True)
    add(queue, 8, deadline=CAUTION * 24 + STRETCH * 8, cuts=True)


def test_what_runs_now_counts_too() -> None:
    queue = scheduler(cost=Cost(2.0, 0, 0))
    with pytest.raises(Overloaded):
        add(queue, 1, deadline=5.0, busy=3.0)
    add(queue, 1, deadline=7.0, busy=3.0)


def test_what_takes_longer_alone_than_it_may_is_told_so() -> None:
    queue = scheduler(cost=BY_STEP)
    add(queue, 1)
    with pytest.raises(DeadlineExceeded, match="about 50 s alone"):
        add(queue, 50, deadline=40.0)


def test_nobody_is_refused_by_a_prediction_when_nothing_else_is_there() -> None:
    queue = scheduler(cost=Cost(1e6, 0, 0))
    add(queue, 1, deadline=0.1)
    assert queue.waiting == 1


def test_a_short_one_is_not_refused_for_what_long_ones_do_after_it() -> None:
    queue = scheduler(cost=BY_STEP, batch_seconds=16.0, max_batch_tokens=10_000)
    add(queue, *[1000] * 4, cuts=True)
    batch(queue)
    add(queue, 10, deadline=100.0, cuts=True)
    with pytest.raises((Overloaded, DeadlineExceeded)):
        add(queue, 1000, deadline=100.0, cuts=True)


def test_a_higher_priority_is_not_refused_for_what_waits_behind_it() -> None:
    queue = scheduler(max_batch_sequences=1)
    add(queue, *[1] * 50, priority=-1)
    with pytest.raises(Overloaded):
        add(queue, 1, deadline=10.0, priority=-1)
    add(queue, 1, deadline=10.0, priority=1)


@dataclass(frozen=True)
class Queued:
    """One sequence as a plain list sees it."""

    model: ModelKey
    one: Waiting


class Queueing(RuleBasedStateMachine):
    """Any order of requests, turns, cancellations and deadlines, beside one plain list."""

    ROWS, TOKENS, LIMIT, BUDGET = 3, 30, 12, 10.0

    def __init__(self) -> None:
        super().__init__()
        self.room = 2
        said = limits(self.LIMIT, self.ROWS, self.TOKENS, self.BUDGET)
        self.queue: Scheduler[Waiting] = Scheduler(said, lambda _: Cost(0.0, 1.0, 0.0), lambda _: self.room)
        self.plain: list[Queued] = []
        self.steps: dict[Waiting, int] = {}
        self.now = 0.0

    @rule(
        steps=st.lists(st.integers(1, 40), min_size=1, max_size=5),
        model=st.sampled_from([MODEL, OTHER]),
        cuts=st.booleans(),
        priority=st.integers(-2, 2),
        allowed=st.sampled_from([1.0, 50.0, 1e9]),
    )
    def request(self, steps: list[int], model: ModelKey, cuts: bool, priority: int, allowed: float) -> None:
        made = sequences(*steps, deadline=self.now + allowed, priority=priority, cuts=cuts)
        waiting = sum(not queued.one.taken for queued in self.plain)
        try:
            self.queue.add(model, made, now=self.now)
        except (Overloaded, DeadlineExceeded) as refused:
            full = waiting + len(steps) > self.LIMIT
            assert full == ("SEQSERVE_MAX_WAITING" in refused.message)
            assert full or self.plain, "alone, nobody is refused"
            return
        assert waiting + len(steps) <= self.LIMIT
        self.plain += [Queued(model, one) for one in made]
        self.steps |= dict(zip(made, steps, strict=True))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        if self.plain:
            gone = self.plain.pop(which % len(self.plain))
            assert self.queue.drop([gone.one]) == 1
            self._leaves(gone.one)

    @rule()
    def look_at_the_clock(self) -> None:
        late = {queued.one for queued in self.plain if queued.one.deadline <= self.now}
        assert set(self.queue.drop_late(self.now)) == late
        self.plain = [queued for queued in self.plain if queued.one not in late]
        for one in late:
            self._leaves(one)

    @rule()
    def batch(self) -> None:
        before = {queued.one: (queued.one.left, queued.one.due, queued.one.taken) for queued in self.plain}
        taken = self.queue.next_batch()
        if taken is None:
            assert not self.plain
            return
        model, cuts = taken
        mine = {queued.one for queued in self.plain if queued.model == model}
        assert len(cuts) <= self.ROWS and {cut.of for cut in cuts} <= mine
        assert len(cuts) == len({cut.of for cut in cuts})
        assert len(cuts) == 1 or sum(cut.steps for cut in cuts) <= self.TOKENS
        for cut in cuts:
            left, _, begun = before[cut.of]
            assert 1 <= cut.steps <= left and cut.of.left == left - cut.steps
            assert (cut.first, cut.last) == (not begun, cut.of.left == 0)
            assert cut.of.cuts or cut.last
            assert cut.last or cut.steps <= max(LEAST_STEPS, self.BUDGET)
            self.room -= cut.first and not cut.last
            self.room += cut.last and begun
        assert self.room >= 0
        self.plain = [queued for queued in self.plain if queued.one.left]

    def _leaves(self, one: Waiting) -> None:
        self.room += one.taken

    @invariant()
    def the_counts_are_what_is_queued(self) -> None:
        assert self.queue.waiting == sum(not queued.one.taken for queued in self.plain)
        assert self.queue.begun == sum(queued.one.taken for queued in self.plain)

    def teardown(self) -> None:
        for _ in range(sum(-(-self.steps[queued.one] // LEAST_STEPS) for queued in self.plain)):
            self.batch()
        assert not self.plain, "every sequence comes to its end"


TestQueueing = Queueing.TestCase
TestQueueing.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
