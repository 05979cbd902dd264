"""States that requests bring and ask for, and their slots: each sequence continues from its own, and no slot is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from service.engine.execution.cost_model import Cost
from service.errors import InferenceFailed, InvalidInput
from service.ipc.messages.inference import FEATURES, Returns
from tests.engine.batching.harness import OTHER, POISON, BatcherHarness, FakeClient, FakeEngine

STATE = Returns(state=True)


def call(
    harness: BatcherHarness, *sequences: Sequence[int], states: Sequence[tuple[float, float]] = (), returns: Returns = STATE
) -> FakeClient:
    """Submit a request whose sequences start from `states`, the sum and the number of the ids before."""
    return harness.call(*sequences, initial=np.array(states, FEATURES).tobytes(), returns=returns)


def final(client: FakeClient) -> list[list[float]]:
    """Return the states in the only answer, which are its last array."""
    [(answer, data)] = client.answers
    size = int(np.prod(answer.state))
    states: list[list[float]] = np.frombuffer(data, FEATURES)[-size:].reshape(answer.state).tolist()
    return states


def used(harness: BatcherHarness) -> float:
    harness.batcher.count()
    return sum(values[0] for values in harness.metrics.state_slots_used.values.values())


def test_sequences_start_from_their_states_and_return_those_after_them(harness: BatcherHarness) -> None:
    client = call(harness, [1, 2, 3], [4], states=[(10.0, 2.0), (20.0, 5.0)])
    fresh = call(harness, [7, 8])
    harness.run()
    assert client.sums == [16.0, 24.0] and final(client) == [[16.0, 5.0], [24.0, 6.0]]
    assert fresh.sums == [15.0] and final(fresh) == [[15.0, 2.0]]
    assert used(harness) == 0


def test_long_sequence_keeps_its_state_over_several_batches() -> None:
    harness = BatcherHarness(batch_seconds=0.02)
    harness.engine.per_row = Cost(0.001, 0.0, 0.001)
    call(harness, [1])
    client = call(harness, list(range(300)), states=[(100.0, 1.0)])
    harness.run()
    assert len(harness.engine.ran) > 2
    assert final(client) == [[100.0 + sum(range(300)), 301.0]]
    assert used(harness) == 0


def test_more_sequences_than_slots_wait_for_free_ones() -> None:
    harness = BatcherHarness(engine=FakeEngine(slots=2))
    clients = [call(harness, [number], states=[(1.0, 1.0)]) for number in range(9)]
    harness.run()
    assert [final(client) for client in clients] == [[[number + 1.0, 2.0]] for number in range(9)]
    assert used(harness) == 0


@pytest.mark.parametrize("returns", [STATE, Returns()])
def test_request_may_have_more_long_sequences_than_slots(returns: Returns) -> None:
    harness = BatcherHarness(engine=FakeEngine(slots=2), batch_seconds=0.02)
    harness.engine.per_row = Cost(0.001, 0.0, 0.001)
    clients = [call(harness, *[[number] * 40 for number in range(3)], returns=returns) for _ in range(2)]
    for _ in range(100):
        harness.batcher.step()
    assert [client.sums for client in clients if client.answers] == [[0.0, 40.0, 80.0]] * 2 and used(harness) == 0


def test_failed_and_cancelled_requests_free_their_slots(harness: BatcherHarness) -> None:
    failed, cancelled, served = (call(harness, [number], states=[(1.0, 1.0)]) for number in (POISON, 5, 6))
    harness.during_batch(lambda: harness.disconnect(cancelled))
    harness.run()
    assert [type(error) for error in failed.errors] == [InferenceFailed]
    assert not cancelled.replies and final(served) == [[7.0, 2.0]]
    assert used(harness) == 0


def test_model_without_states_refuses_them(harness: BatcherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    without = harness.engine.spec(OTHER)
    without.states = {}
    monkeypatch.setattr(harness.engine, "spec", lambda _: without)
    client = call(harness, [1])
    assert [type(error) for error in client.errors] == [InvalidInput]
