"""The metrics of all processes are added up, and late processes are counted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from service.errors import ServiceError, Unavailable
from service.ipc.messages.control import CollectMetrics, MetricsCollected
from service.metrics import Metrics
from service.supervisor.metrics_aggregator import MetricsAggregator
from service.supervisor.process import Child
from tests.supervisor.fakes import FakeChild

LATE: dict[type, ServiceError] = {CollectMetrics: Unavailable("late")}


def counts(reruns: float) -> dict[type, Any]:
    return {CollectMetrics: MetricsCollected({"seqserve_rerun": [((), [reruns])]})}


def collect(aggregator: MetricsAggregator, *children: FakeChild) -> tuple[float, float]:
    """Return the rerun requests and the stale processes."""
    snapshot: dict[str, Any] = asyncio.run(aggregator.collect(cast("list[Child]", children), 7.0))
    [(_, [reruns])], [(_, [stale])] = snapshot["seqserve_rerun"], snapshot["seqserve_stale_processes"]
    return reruns, stale


def test_late_process_counts_with_its_last_values_and_as_stale() -> None:
    """Unless it still starts."""
    aggregator = MetricsAggregator(Metrics())
    engine, frontend = FakeChild("engine-0", replies=counts(1.0)), FakeChild("frontend-0", replies=counts(10.0))
    assert collect(aggregator, engine, frontend) == (11, 0)
    engine.errors, frontend.replies = LATE, counts(20.0)
    assert collect(aggregator, engine, frontend) == (21, 1)
    engine.errors, engine.replies = {}, counts(2.0)
    assert collect(aggregator, engine, frontend) == (22, 0)
    starting = FakeChild("engine-1", ready=False, errors=LATE)
    assert collect(aggregator, starting, engine) == (2, 0)
    assert engine.timeouts == {7.0}
