"""Sums the metrics of all processes. The totals of a process outlive it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from service.errors import ServiceError
from service.ipc.messages.control import CollectMetrics, MetricsCollected
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics, Snapshot, merged, remains, without
from service.supervisor.process import Child

COLLECT_SECONDS = 0.2
"""Longest wait for one child's metrics."""


class MetricsAggregator:
    """Adds up the metrics of the supervisor, the running children and the ended children."""

    def __init__(self, supervisor_metrics: Metrics) -> None:
        self._supervisor_metrics = supervisor_metrics
        self._ended: Snapshot = {}

    async def collect(self, children: Collection[Child], timeout: float) -> Snapshot:
        """Return the metrics of all processes. A child that does not reply in time counts with its last known values."""
        late = await asyncio.gather(*(self._update(child, timeout) for child in children))
        self._supervisor_metrics.stale_processes.set(sum(late))
        return merged([self._supervisor_metrics.snapshot(), self._ended, *(child.metrics for child in children)])

    def keep_totals(self, child: Child) -> None:
        """Keep the totals of a child that has ended."""
        self._ended = merged([self._ended, remains(child.metrics)])
        child.metrics = {}

    def forget_model(self, key: ModelKey) -> None:
        """Remove the series of a model version that no process serves any more."""
        self._ended = without(self._ended, *key.labels)

    @staticmethod
    async def _update(child: Child, timeout: float) -> bool:
        """Ask a child for its metrics. Returns whether it is late. One that still starts has no values yet."""
        try:
            child.metrics = (await child.call(CollectMetrics(), MetricsCollected, timeout=timeout)).snapshot
        except ServiceError:
            return child.ready
        return False
