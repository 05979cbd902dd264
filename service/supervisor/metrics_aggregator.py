"""The counts of all processes, summed when a front is scraped. Totals outlive the process that counted them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from service.ipc.channel import encode
from service.ipc.messages import CollectMetrics, MetricsCollected
from service.metrics import Metrics, Snapshot, merged, remains, without
from service.supervisor.process import Child

GATHER_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class _Scrape:
    """One scrape under way: who asked, under which id, who has not answered yet, and until when that is waited for."""

    frontend: Child
    id: int
    missing: set[Child]
    until: float


class MetricsAggregator:
    """Asks every child and sums what they say; one that is late is counted with what it last said."""

    def __init__(self, own: Metrics) -> None:
        self._own = own
        self._past: Snapshot = {}
        self._scrapes: dict[int, _Scrape] = {}
        self._last_id = 0

    def ask(self, frontend: Child, id: int, children: Iterable[Child]) -> None:
        """`frontend` was scraped: ask all `children`."""
        self._last_id += 1
        scrape = self._scrapes[self._last_id] = _Scrape(frontend, id, set(children), time.monotonic() + GATHER_SECONDS)
        for child in scrape.missing:
            child.tell(encode(CollectMetrics(), self._last_id))

    def count(self, child: Child, id: int, snapshot: Snapshot) -> None:
        """A child's answer."""
        child.counts = snapshot
        if id in self._scrapes:
            self._scrapes[id].missing.discard(child)

    def forget(self, child: Child) -> None:
        """A child has ended: its totals stay, nobody waits for it."""
        self._past = merged([self._past, remains(child.counts)])
        self._scrapes = {id: scrape for id, scrape in self._scrapes.items() if scrape.frontend is not child}
        for scrape in self._scrapes.values():
            scrape.missing.discard(child)

    def forget_model(self, name: str, version: str) -> None:
        """Remove the series of a version that is not served any more."""
        self._past = without(self._past, name, version)

    def answer(self, children: Iterable[Child]) -> None:
        """Answer every scrape that is complete, or has waited long enough."""
        now = time.monotonic()
        done = [id for id, scrape in self._scrapes.items() if not scrape.missing or now > scrape.until]
        if not done:
            return
        total = merged([self._own.snapshot(), self._past, *(child.counts for child in children)])
        for id in done:
            scrape = self._scrapes.pop(id)
            scrape.frontend.tell(encode(MetricsCollected(total), scrape.id))
