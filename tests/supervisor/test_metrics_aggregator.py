"""The metrics of all processes are added up, and late processes are counted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from service.errors import Unavailable
from service.ipc.messages import MetricsCollected
from service.metrics import Metrics, Snapshot
from service.supervisor.metrics_aggregator import MetricsAggregator
from service.supervisor.process import Child

SECONDS = 7.0


class FakeChild:
    """Replies with a number of rerun requests, unless it is late."""

    def __init__(self, reruns: float, *, ready: bool = True) -> None:
        self.reruns = reruns
        self.ready = ready
        self.late = False
        self.metrics: Snapshot = {}

    async def call(self, message: object, reply: object, *, timeout: float) -> MetricsCollected:
        assert timeout == SECONDS
        if self.late:
            raise Unavailable("late")
        return MetricsCollected({"seqserve_rerun": [((), [self.reruns])]})


def collect(aggregator: MetricsAggregator, *children: FakeChild) -> tuple[float, float]:
    """Return the rerun requests and the stale processes."""
    snapshot: dict[str, Any] = asyncio.run(aggregator.collect(cast("list[Child]", children), SECONDS))
    [(_, [reruns])], [(_, [stale])] = snapshot["seqserve_rerun"], snapshot["seqserve_stale_processes"]
    return reruns, stale


def test_late_process_counts_with_its_last_values_and_as_stale() -> None:
    aggregator, engine, frontend = MetricsAggregator(Metrics()), FakeChild(1.0), FakeChild(10.0)
    assert collect(aggregator, engine, frontend) == (11, 0)
    engine.reruns, frontend.reruns, engine.late = 2.0, 20.0, True
    assert collect(aggregator, engine, frontend) == (21, 1)
    engine.late = False
    assert collect(aggregator, engine, frontend) == (22, 0)


def test_process_that_still_starts_is_not_stale() -> None:
    starting = FakeChild(1.0, ready=False)
    starting.late = True
    assert collect(MetricsAggregator(Metrics()), starting, FakeChild(10.0)) == (10, 0)
