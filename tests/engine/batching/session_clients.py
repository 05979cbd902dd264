"""Short calls for tests of sessions."""

from __future__ import annotations

from typing import Any

from service.errors import ServiceError
from service.ipc.messages.models import ModelKey
from tests.engine.batching.harness import MODEL, AsynchronousEngine, BatcherHarness, FakeClient


def progress(client: FakeClient) -> tuple[float, int]:
    """Return the sum and the steps of the session so far."""
    return client.sums[0], client.answers[0][0].session_steps


def refused(client: FakeClient) -> type[ServiceError]:
    [error] = client.errors
    return type(error)


def send(harness: BatcherHarness, *values: int, session: str = "a", **options: object) -> FakeClient:
    client = harness.call(values, session=session, **options)  # type: ignore[arg-type]
    harness.run()
    return client


def used_slots(harness: BatcherHarness, model: ModelKey = MODEL) -> int:
    harness.batcher.count()
    return round(harness.metrics.state_slots_used.values.get(model.labels, [0.0])[0])


class InFlightHarness(BatcherHarness):
    """Runs up to two batches at once, which end when the test ends them."""

    def __init__(self, in_flight: int = 2, **options: Any) -> None:
        self.asynchronous = AsynchronousEngine(in_flight=in_flight)
        super().__init__(engine=self.asynchronous, **options)

    def batch(self) -> bool:
        """Launch a batch and end the oldest. Returns whether work is left."""
        self.batcher.step()
        self.asynchronous.end_batch()
        return self.asynchronous.busy or not self.batcher.idle


class ChunkedHarness(InFlightHarness):
    """Its batches take LEAST_STEPS of each sequence, one batch at a time."""

    def __init__(self) -> None:
        super().__init__(in_flight=1, batch_seconds=1.0)
        self.asynchronous.per_row = self.asynchronous.per_row._replace(fixed=0.0, per_step=1.0)

    def answer(self, *values: int) -> FakeClient:
        client = self.call(values, session="a")
        while not client.replies:
            self.batch()
        return client
