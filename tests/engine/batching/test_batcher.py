"""Every ticket is answered once, whatever is cancelled, late, refused or broken. The engine is a few lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.engine.batch import Batch
from service.engine.execution.device import DeviceLost
from service.errors import DeadlineExceeded, InferenceFailed, InvalidInput, OutOfMemory, Overloaded, ServiceError, UnknownModel
from service.ipc.messages import FEATURES, IDS, Answer, ModelKey, Returns
from tests.engine.batching.fakes import MODEL, OTHER
from tests.engine.batching.harness import (
    POISON,
    AsynchronousEngine,
    EngineOfSmallMemory,
    EngineOfSteps,
    House,
    LostEngine,
    counted,
    total,
)


def test_requests_that_wait_run_in_one_turn_and_each_gets_its_own_answer() -> None:
    house = House()
    callers = [house.call([1, 2]), house.call([10]), house.call([100, 100, 100])]
    house.run()
    assert house.engine.ran == [[10, 1, 100]]
    assert [caller.sums for caller in callers] == [[3.0], [10.0], [300.0]]


def test_a_request_of_several_sequences_is_answered_once_in_their_order_although_they_run_in_different_turns() -> None:
    house = House(max_batch_sequences=2)
    many = house.call([5], [4, 4], [3], [2, 2, 2], [1])
    between = house.call([7], priority=1)
    while house.batcher.step():
        assert len(many.answers) == (0 if house.batcher.waiting else 1)
    assert len(house.engine.ran) == 3
    assert many.sums == many.expected
    assert between.sums == [7.0]


def test_an_answer_has_the_arrays_that_were_asked_for_laid_end_to_end() -> None:
    house = House(max_batch_sequences=1)
    caller = house.call([1, 2], [3], [4, 5, 6], returns=Returns(embedding=True, sequence=True))
    plain = house.call([9])
    house.run()
    [(answer, data)] = caller.answers
    assert answer == Answer(scores=(3, 2), embedding=(3, 1), sequence=(6, 1), steps=[2, 1, 3])
    assert np.frombuffer(data, FEATURES).tolist() == [3, 2, 3, 1, 15, 3, 2, 3, 6, 1, 2, 3, 4, 5, 6]
    assert plain.answers[0][0] == Answer(scores=(1, 2), steps=[1])


def test_an_answer_with_a_line_a_step_says_how_many_steps_each_sequence_has_and_has_no_shape_for_what_there_is_not() -> None:
    house = House(max_batch_sequences=2, engine=EngineOfSteps())
    caller = house.call([1, 2, 3, 4, 5], [6], [7, 8])
    house.run()
    [(answer, data)] = caller.answers
    assert answer == Answer(picks=(5, 1), steps=[3, 1, 1])
    assert np.frombuffer(data, IDS).tolist() == [1, 3, 5, 6, 7]


def test_a_cancelled_caller_does_not_take_its_batch_mates_along() -> None:
    house = House()
    first, gone, last = house.call([1]), house.call([2], [3]), house.call([4])
    house.hang_up(gone)
    house.run()
    assert house.engine.ran == [[1, 4]]
    assert (first.sums, last.sums, gone.told) == ([1.0], [4.0], 0)
    assert counted(house.metrics.cancelled) == {"waiting": 1}


def test_a_caller_that_goes_while_its_turn_runs_is_told_nothing_and_its_batch_mates_their_answers() -> None:
    house = House()
    stays, goes = house.call([1]), house.call([2])
    house.during_the_turn(lambda: house.hang_up(goes))
    assert (stays.sums, goes.told) == ([1.0], 0)
    assert counted(house.metrics.cancelled) == {"running": 1}


def test_a_caller_that_goes_between_its_turns_has_the_rest_taken_out_of_the_queue() -> None:
    house = House(max_batch_sequences=1)
    goes, stays = house.call([1], [2], [3]), house.call([4])
    house.batcher.step()
    house.hang_up(goes)
    house.run()
    assert house.engine.ran == [[1], [4]]
    assert (stays.sums, goes.told) == ([4.0], 0)


def test_cancelling_after_the_answer_or_twice_counts_nothing() -> None:
    house = House()
    answered, gone = house.call([1]), house.call([2])
    house.hang_up(gone)
    house.run()
    house.hang_up(answered)
    house.hang_up(gone)
    assert counted(house.metrics.cancelled) == {"waiting": 1}


def test_a_row_that_makes_the_model_raise_fails_alone() -> None:
    house = House()
    first, bad, last = house.call([1]), house.call([POISON]), house.call([3], [4])
    house.run()
    assert (first.sums, last.sums) == ([1.0], [3.0, 4.0])
    [error] = bad.errors
    assert isinstance(error, InferenceFailed)
    assert error.message == "the model raised ValueError: poisoned"


def test_the_log_says_which_model_raised_what(capsys: pytest.CaptureFixture[str]) -> None:
    house = House()
    house.call([POISON])
    house.run()
    [line] = [json.loads(one) for one in capsys.readouterr().err.splitlines()]
    assert (line["event"], line["level"]) == ("model raised", "error")
    assert (line["model"], line["version"], line["error"]) == (*MODEL.labels, "ValueError: poisoned")


def test_a_caller_that_goes_while_its_row_fails_is_counted_once() -> None:
    house = House()
    goes = house.call([POISON])
    house.during_the_turn(lambda: house.hang_up(goes))
    assert goes.told == 0
    assert counted(house.metrics.cancelled) == {"running": 1}
    assert total(house.metrics.failed) == 0


def test_a_request_with_one_row_that_fails_fails_once_and_its_waiting_rows_are_not_computed() -> None:
    house = House(max_batch_sequences=2)
    bad = house.call([POISON], [POISON], [3], [4])
    house.run()
    assert [type(error) for error in bad.errors] == [InferenceFailed]
    assert not bad.answers
    assert not any(3 in batch or 4 in batch for batch in house.engine.ran)


def test_rows_of_a_request_that_has_failed_are_not_run_again_alone() -> None:
    house = House()
    house.call([POISON], [5])
    house.run()
    assert house.engine.ran == [[POISON, 5], [POISON]]


def test_a_turn_for_which_there_is_no_memory_is_run_row_by_row_and_only_what_does_not_fit_alone_is_refused() -> None:
    house = House(engine=EngineOfSmallMemory())
    fitting, large, other = house.call([1, 2]), house.call([1, 1, 1, 1]), house.call([4])
    house.run()
    assert (fitting.sums, other.sums) == ([3.0], [4.0])
    [error] = large.errors
    assert isinstance(error, OutOfMemory) and error.retry_after == 1
    assert counted(house.metrics.refused) == {"out_of_memory": 1}
    assert total(house.metrics.failed) == 0


def test_without_a_device_nobody_is_told_anything_and_no_row_is_run_alone() -> None:
    house = House(engine=LostEngine())
    callers = [house.call([1]), house.call([2])]
    with pytest.raises(DeviceLost):
        house.batcher.step()
    assert [caller.told for caller in callers] == [0, 0]


def test_who_comes_while_the_device_works_is_in_the_next_turn_and_answers_come_when_it_has_ended() -> None:
    engine = AsynchronousEngine()
    house = House(engine=engine)
    first = house.call([1])
    assert house.batcher.step()
    second, third = house.call([2]), house.call([3])
    assert not house.batcher.step() and not first.told
    engine.end()
    assert house.batcher.step()
    assert first.sums == [1.0] and engine.ran == [[1], [2, 3]]
    engine.end()
    assert not house.batcher.step()
    assert (second.sums, third.sums) == ([2.0], [3.0])


def test_the_backlog_is_what_runs_and_all_that_waits() -> None:
    house = House(max_batch_sequences=1)
    house.call([1] * 4)
    house.call([1], [1], model=OTHER)
    assert house.batcher.backlog_seconds() == pytest.approx(1.004 + 2.002)
    house.batcher.step()
    house.engine.remaining_seconds = 7.0
    assert house.batcher.backlog_seconds() == pytest.approx(7.0 + 2.002)


def test_a_deadline_that_passes_in_the_queue_is_refused_and_nothing_is_computed_for_it() -> None:
    house = House()
    late, patient = house.call([1], [2], allowed=5.0), house.call([3], allowed=5.001)
    house.now = 5.0
    house.run()
    assert [type(error) for error in late.errors] == [DeadlineExceeded]
    assert house.engine.ran == [[3]]
    assert patient.sums == [3.0]
    assert counted(house.metrics.refused) == {"deadline_exceeded": 1}


def test_a_deadline_that_passes_between_two_turns_of_a_request_ends_it() -> None:
    house = House(max_batch_sequences=1)
    late = house.call([1], [2], allowed=5.0)
    house.batcher.step()
    house.now = 6.0
    house.run()
    assert [type(error) for error in late.errors] == [DeadlineExceeded]
    assert house.engine.ran == [[1]]


@pytest.mark.parametrize(
    "sequences, model, allowed, error",
    [
        ([[1]], ModelKey("unknown", "1"), 1.0, UnknownModel),
        ([[1]], ModelKey(MODEL.name, "2"), 1.0, UnknownModel),
        ([], MODEL, 1.0, InvalidInput),
        ([[1], []], MODEL, 1.0, InvalidInput),
        ([[1]], MODEL, 0.0, DeadlineExceeded),
        ([[1]], MODEL, -1.0, DeadlineExceeded),
        ([[1]] * 5, MODEL, 1.0, Overloaded),
    ],
)
def test_what_cannot_be_queued_is_refused_at_once(
    sequences: list[list[int]], model: ModelKey, allowed: float, error: type[ServiceError]
) -> None:
    house = House(max_waiting=4)
    caller = house.call(*sequences, model=model, allowed=allowed)
    assert [type(one) for one in caller.errors] == [error]
    assert caller.ticket is not None and caller.ticket.ended
    assert house.batcher.waiting == 0
    assert counted(house.metrics.refused) == {error.code: 1}
    assert not house.batcher.step()


def test_data_that_do_not_match_the_lengths_fail_alone() -> None:
    house = House()
    mate, wrong = house.call([1]), house.call([2], lengths=[3])
    house.run()
    assert mate.sums == [1.0]
    assert [type(error) for error in wrong.errors] == [InferenceFailed]


def test_the_time_in_the_queue_is_observed_once_a_sequence() -> None:
    house = House(max_batch_sequences=2)
    house.call([1], [2], [3])
    house.now = 4.0
    house.run()
    queued = house.metrics.stage_seconds.values[*MODEL.labels, "queue"]
    assert sum(queued[:-1]) == 3
    assert queued[-1] == 12.0


def test_sequences_counts_what_was_answered_and_not_what_was_thrown_away() -> None:
    house = House()
    house.call([1], [2])
    house.call([POISON], [3])
    gone = house.call([4])
    house.during_the_turn(lambda: house.hang_up(gone))
    house.run()
    assert total(house.metrics.sequences) == 2


def test_a_turn_is_announced_before_it_is_launched_each_time() -> None:
    house, announced = House(), list[list[int]]()

    def announce(batch: Batch) -> None:
        assert len(house.engine.ran) == len(announced)
        announced.append([chunk.steps for chunk in batch.chunks])

    house.call([1, 1])
    house.call([POISON])
    assert house.batcher.step(announce)
    assert announced == [[1, 2], [1], [2]]


class AnyOrder(RuleBasedStateMachine):
    """Any order of requests, turns, cancellations, deadlines and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House(max_waiting=8, max_batch_sequences=3, max_batch_tokens=7)

    @rule(
        sequences=st.lists(st.lists(st.sampled_from([1, 2, 3, POISON]), max_size=5), max_size=4),
        model=st.sampled_from([MODEL, OTHER, ModelKey("unknown", "1")]),
        allowed=st.sampled_from([0.0, 1.0, 2.0, 1e9]),
        priority=st.integers(-1, 1),
    )
    def call(self, sequences: list[list[int]], model: ModelKey, allowed: float, priority: int) -> None:
        self.house.call(*sequences, model=model, allowed=allowed, priority=priority)

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.house.now += seconds

    @rule(which=st.integers(0, 99))
    def hang_up(self, which: int) -> None:
        self._hang_up(which)

    @rule()
    def batch(self) -> None:
        self.house.batcher.step()

    @rule(which=st.integers(0, 99))
    def turn_during_which_somebody_hangs_up(self, which: int) -> None:
        self.house.during_the_turn(lambda: self._hang_up(which))

    def _hang_up(self, which: int) -> None:
        if self.house.callers:
            self.house.hang_up(self.house.callers[which % len(self.house.callers)])

    @invariant()
    def everybody_is_told_once_at_most_and_the_truth(self) -> None:
        for caller in self.house.callers:
            assert caller.told <= (0 if caller.gone else 1)
            assert not caller.answers or caller.sums == caller.expected

    @invariant()
    def every_request_is_somewhere(self) -> None:
        callers, metrics = self.house.callers, self.house.metrics
        answered = sum(len(caller.answers) for caller in callers)
        waiting = sum(caller.ticket is not None and not caller.ticket.ended for caller in callers)
        assert len(callers) == answered + sum(map(total, (metrics.failed, metrics.refused, metrics.cancelled))) + waiting
        assert (self.house.batcher.waiting > 0) == (waiting > 0)

    def teardown(self) -> None:
        self.house.run()
        assert self.house.batcher.waiting == 0
        assert all(caller.told == (0 if caller.gone else 1) for caller in self.house.callers)
        self.every_request_is_somewhere()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
