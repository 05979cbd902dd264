"""The batcher replies to every request once, whatever is cancelled, late, refused or broken. Clients cannot fill the log with errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from service.engine.batch import Batch
from service.engine.batching.memory_limits import PERIOD_SECONDS
from service.engine.batching.request_block import QueuedBlock
from service.engine.execution.device import DeviceLost
from service.engine.execution.in_flight import BlockResult
from service.engine.internal_errors import LOG_SECONDS, MAX_KINDS, InternalErrors
from service.errors import (
    SERVICE_FAILED,
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    OutOfMemory,
    Overloaded,
    ServiceError,
    UnknownModel,
)
from service.ipc.messages.inference import FEATURES, IDS, Answer, Returns
from service.ipc.messages.models import ModelKey
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching.harness import (
    MODEL,
    OTHER,
    POISON,
    ROOM,
    AsynchronousEngine,
    BatcherHarness,
    EngineOfSmallMemory,
    EngineOfSteps,
    counted,
    total,
)


def test_sequences_of_several_batches_give_one_answer_in_order() -> None:
    harness = BatcherHarness(max_batch_sequences=2)
    many = harness.call([5], [4, 4], [3], [2, 2, 2], [1])
    between = harness.call([7], priority=1)
    while harness.batcher.step():
        assert len(many.answers) == (0 if harness.batcher.waiting else 1)
    assert len(harness.engine.ran) == 3
    assert many.sums == many.expected
    assert between.sums == [7.0]


def test_answer_packs_the_requested_arrays_end_to_end() -> None:
    harness = BatcherHarness(max_batch_sequences=1)
    client = harness.call([1, 2], [3], [4, 5, 6], returns=Returns(embedding=True, sequence=True))
    plain = harness.call([9])
    harness.run()
    [(answer, data)] = client.answers
    assert answer == Answer(scores=(3, 2), embedding=(3, 1), sequence=(6, 1), steps=[2, 1, 3])
    assert np.frombuffer(data, FEATURES).tolist() == [3, 2, 3, 1, 15, 3, 2, 3, 6, 1, 2, 3, 4, 5, 6]
    assert plain.answers[0][0] == Answer(scores=(1, 2), steps=[1])


def test_per_step_answer_counts_steps_and_omits_absent_arrays() -> None:
    harness = BatcherHarness(max_batch_sequences=2, engine=EngineOfSteps())
    client = harness.call([1, 2, 3, 4, 5], [6], [7, 8])
    harness.run()
    [(answer, data)] = client.answers
    assert answer == Answer(picks=(5, 1), steps=[3, 1, 1])
    assert np.frombuffer(data, IDS).tolist() == [1, 3, 5, 6, 7]


def test_cancelled_request_keeps_its_batch_mates(harness: BatcherHarness) -> None:
    """Also if it is cancelled while its batch runs."""
    first, cancelled, last = harness.call([1]), harness.call([2], [3]), harness.call([4])
    harness.disconnect(cancelled)
    harness.run()
    assert harness.engine.ran == [[1, 4]]
    assert (first.sums, last.sums, cancelled.replies) == ([1.0], [4.0], 0)
    mate, cancelled = harness.call([1]), harness.call([2])
    harness.during_batch(lambda: harness.disconnect(cancelled))
    assert (mate.sums, cancelled.replies) == ([1.0], 0)
    assert counted(harness.metrics.cancelled) == {"waiting": 1, "running": 1}


def test_late_or_repeated_cancel_counts_nothing(harness: BatcherHarness) -> None:
    answered, cancelled = harness.call([1]), harness.call([2])
    harness.disconnect(cancelled)
    harness.run()
    harness.disconnect(answered)
    harness.disconnect(cancelled)
    assert counted(harness.metrics.cancelled) == {"waiting": 1}


def test_sequence_that_makes_the_model_raise_fails_alone(harness: BatcherHarness, capfd: pytest.CaptureFixture[str]) -> None:
    """The log names the model and its error. Clients cannot fill it."""
    first, bad, last = harness.call([1]), harness.call([POISON]), harness.call([3], [4])
    harness.run()
    assert (first.sums, last.sums) == ([1.0], [3.0, 4.0])
    [error] = bad.errors
    assert isinstance(error, InferenceFailed)
    assert error.message == "the model raised an exception on this request: the log of the service names it"
    entries = list[str]()
    for seconds in (0.0, 0.0, LOG_SECONDS, 0.0):
        entries += capfd.readouterr().err.splitlines()
        harness.now += seconds
        harness.call([POISON])
        harness.run()
    entries += capfd.readouterr().err.splitlines()
    assert len(entries) == 2
    entry = json.loads(entries[0])
    assert (entry["event"], entry["level"]) == ("model raised", "error")
    assert (entry["model"], entry["version"], entry["error"]) == (*MODEL.labels, "ValueError: poisoned")


def test_failed_request_computes_no_further_sequence() -> None:
    harness = BatcherHarness(max_batch_sequences=2)
    bad = harness.call([POISON], [5], [3], [4])
    harness.run()
    assert [type(error) for error in bad.errors] == [InferenceFailed]
    assert not bad.answers
    assert harness.engine.ran == [[POISON, 5], [POISON]]


def test_batch_without_memory_runs_sequence_by_sequence() -> None:
    harness = BatcherHarness(engine=EngineOfSmallMemory())
    fitting, large, other = harness.call([1, 2]), harness.call([1, 1, 1, 1]), harness.call([4])
    harness.run()
    assert (fitting.sums, other.sums) == ([3.0], [4.0])
    [error] = large.errors
    assert isinstance(error, OutOfMemory) and error.retry_after == 1
    assert counted(harness.metrics.refused) == {"out_of_memory": 1}
    assert total(harness.metrics.failed) == 0


def failed_batches(harness: BatcherHarness) -> int:
    """Return how many batches fail while twice as many requests are answered as the device has memory for."""
    assert isinstance(harness.engine, EngineOfSmallMemory)
    before, clients = harness.engine.failures, [harness.call([1]) for _ in range(2 * ROOM)]
    harness.run()
    assert all(client.sums == [1.0] for client in clients)
    return harness.engine.failures - before


def test_batches_are_smaller_for_a_while_after_one_without_memory() -> None:
    harness = BatcherHarness(engine=EngineOfSmallMemory(), max_batch_tokens=2 * ROOM)
    assert [failed_batches(harness) for _ in range(3)] == [1, 0, 0]
    large = harness.call([1] * 2 * ROOM)
    harness.run()
    assert len(large.errors) == 1 and failed_batches(harness) == 0
    harness.now += PERIOD_SECONDS
    assert [failed_batches(harness) for _ in range(2)] == [1, 0], "the device still has too little memory for the usual batches"


def test_lost_device_answers_nothing_and_retries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, launched = BatcherHarness(), list[Batch]()

    def lose(batch: Batch) -> None:
        launched.append(batch)
        raise DeviceLost("the device is lost")

    monkeypatch.setattr(harness.engine, "launch", lose)
    clients = [harness.call([1]), harness.call([2])]
    with pytest.raises(DeviceLost):
        harness.batcher.step()
    assert [client.replies for client in clients] == [0, 0] and len(launched) == 1
    assert total(harness.metrics.engine_errors) == 0


def test_requests_that_arrive_while_a_batch_runs_join_the_next() -> None:
    engine = AsynchronousEngine()
    harness = BatcherHarness(engine=engine)
    first = harness.call([1])
    assert harness.batcher.step()
    second, third = harness.call([2]), harness.call([3])
    assert not harness.batcher.step() and not first.replies
    engine.end_batch()
    assert harness.batcher.step()
    assert first.sums == [1.0] and engine.ran == [[1], [2, 3]]
    engine.end_batch()
    assert not harness.batcher.step()
    assert (second.sums, third.sums) == ([2.0], [3.0])


def test_backlog_includes_running_and_queued_work() -> None:
    harness = BatcherHarness(max_batch_sequences=1)
    harness.call([1] * 4)
    harness.call([1], [1], model=OTHER)
    assert harness.batcher.backlog_seconds() == pytest.approx(1.004 + 2.002)
    harness.batcher.step()
    harness.engine.remaining_seconds = 7.0
    assert harness.batcher.backlog_seconds() == pytest.approx(7.0 + 2.002)


def test_deadline_that_passes_in_the_queue_is_refused_unrun(harness: BatcherHarness) -> None:
    late, patient = harness.call([1], [2], allowed=5.0), harness.call([3], allowed=5.001)
    harness.now = 5.0
    harness.run()
    assert [type(error) for error in late.errors] == [DeadlineExceeded]
    assert harness.engine.ran == [[3]]
    assert patient.sums == [3.0]
    assert counted(harness.metrics.refused) == {"deadline_exceeded": 1}


@pytest.mark.parametrize(
    "sequences, model, allowed, error",
    [
        ([[1]], ModelKey("unknown", "1"), 1.0, UnknownModel),
        ([], MODEL, 1.0, InvalidInput),
        ([[1], []], MODEL, 1.0, InvalidInput),
        ([[1]], MODEL, 0.0, DeadlineExceeded),
        ([[1]] * 5, MODEL, 1.0, Overloaded),
    ],
)
def test_invalid_request_is_refused_at_once(
    sequences: list[list[int]], model: ModelKey, allowed: float, error: type[ServiceError]
) -> None:
    harness = BatcherHarness(max_waiting=4)
    client = harness.call(*sequences, model=model, allowed=allowed)
    assert [type(refusal) for refusal in client.errors] == [error]
    assert client.replies == 1
    assert harness.batcher.waiting == 0
    assert counted(harness.metrics.refused) == {error.code: 1}
    assert not harness.batcher.step()


def test_request_whose_data_does_not_match_its_lengths_fails_alone(harness: BatcherHarness) -> None:
    mate, wrong = harness.call([1]), harness.call([2], lengths=[3])
    harness.run()
    assert mate.sums == [1.0]
    assert [type(error) for error in wrong.errors] == [InferenceFailed]


def test_metrics_count_queued_and_answered_sequences() -> None:
    harness = BatcherHarness(max_batch_sequences=2)
    metrics = harness.metrics
    harness.call([1], [2], [3])
    harness.call([POISON], [4], model=OTHER)
    harness.now = 4.0
    counted_at = []
    for _ in range(5):
        harness.batcher.count()
        counted_at.append(
            (metrics.queue_depth.values[()][0], [values[0] for values in metrics.sequences_waiting.values.values()])
        )
        harness.batcher.step()
    assert counted_at == [(5, [3, 2]), (3, [1, 2]), (1, [1, 0]), (0, [0, 0]), (0, [0, 0])]
    queued = metrics.stage_seconds.values[*MODEL.labels, "queue"]
    assert (sum(queued[:-1]), queued[-1]) == (3, 12.0), "seconds in the queue, once for each sequence"
    assert total(metrics.sequences) == 3 and total(metrics.failed) == 1


def test_every_launch_is_announced_before_it_happens() -> None:
    harness, announced = BatcherHarness(), list[list[int]]()

    def announce(batch: Batch) -> None:
        assert len(harness.engine.ran) == len(announced)
        announced.append(sorted([steps for block in batch.blocks for steps in block.lengths]))

    harness.call([1, 1])
    harness.call([POISON])
    assert harness.batcher.step(announce)
    assert announced[0] == [1, 2] and sorted(announced[1:]) == [[1], [2]]


def test_kinds_of_logged_errors_are_limited(capfd: pytest.CaptureFixture[str]) -> None:
    errors = InternalErrors(Log("engine"), Metrics())
    for number in range(2 * MAX_KINDS):
        errors.log("bug", ValueError("x" * 10_000), work=str(number))
    logged = capfd.readouterr().err.splitlines()
    assert len(logged) == MAX_KINDS and len(logged[0]) < 1000


def test_block_whose_answer_raises_is_refused_alone(harness: BatcherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = harness.frontend.answer

    def fail_first(block: QueuedBlock, result: BlockResult, ready: float) -> None:
        if block.ids[0] == 0:
            raise IndexError("secret")
        answer(block, result, ready)

    monkeypatch.setattr(harness.frontend, "answer", fail_first)
    bad, good = harness.call([1], [2]), harness.call([3])
    harness.run()
    [error] = bad.errors
    assert isinstance(error, InferenceFailed) and error.message == SERVICE_FAILED
    assert good.sums == [3.0]
    assert counted(harness.metrics.engine_errors) == {"answer": 1}
