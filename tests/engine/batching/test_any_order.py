"""The batcher replies to every request once, in any order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.ipc.messages.models import ModelKey
from tests.engine.batching.harness import MODEL, OTHER, POISON, BatcherHarness, total


class AnyOrder(RuleBasedStateMachine):
    """Requests, batches, cancellations, deadlines and failures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = BatcherHarness(max_waiting=8, max_batch_sequences=3, max_batch_tokens=7)

    @rule(
        sequences=st.lists(st.lists(st.sampled_from([1, 2, 3, POISON]), max_size=5), max_size=4),
        model=st.sampled_from([MODEL, OTHER, ModelKey("unknown", "1")]),
        allowed=st.sampled_from([0.0, 1.0, 2.0, 1e9]),
        priority=st.integers(-1, 1),
    )
    def call(self, sequences: list[list[int]], model: ModelKey, allowed: float, priority: int) -> None:
        self.harness.call(*sequences, model=model, allowed=allowed, priority=priority)

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.harness.now += seconds

    @rule(which=st.integers(0, 99))
    def disconnect(self, which: int) -> None:
        self._hang_up(which)

    @rule()
    def batch(self) -> None:
        self.harness.batcher.step()

    @rule(which=st.integers(0, 99))
    def batch_during_which_a_client_disconnects(self, which: int) -> None:
        self.harness.during_batch(lambda: self._hang_up(which))

    def _hang_up(self, which: int) -> None:
        if self.harness.clients:
            self.harness.disconnect(self.harness.clients[which % len(self.harness.clients)])

    @invariant()
    def every_client_gets_at_most_one_correct_reply(self) -> None:
        for client in self.harness.clients:
            assert client.replies <= (0 if client.disconnected else 1)
            assert not client.answers or client.sums == client.expected

    @invariant()
    def every_request_is_counted_once(self) -> None:
        clients, metrics = self.harness.clients, self.harness.metrics
        answered = sum(len(client.answers) for client in clients)
        waiting = sum(not client.replies and not client.disconnected for client in clients)
        assert len(clients) == answered + sum(map(total, (metrics.failed, metrics.refused, metrics.cancelled))) + waiting
        assert (self.harness.batcher.waiting > 0) == (waiting > 0)

    def teardown(self) -> None:
        self.harness.run()
        assert self.harness.batcher.waiting == 0
        assert all(client.replies == (0 if client.disconnected else 1) for client in self.harness.clients)
        self.every_request_is_counted_once()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=40)
