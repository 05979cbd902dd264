"""Counts the requests of a frontend: in plain lists, which are folded into the metrics when these are read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from service.metrics import OK, Metrics


class RequestTally:
    """The counts of requests since the metrics were read."""

    MAX_UNFOLDED = 2048
    """Requests after which the lists are folded in any case."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.accepted = 0
        """Requests that were sent to an engine, or refused. An attribute, because every request counts itself."""
        self._ended = self._unfolded = 0
        self._seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
        self._last_answer: dict[tuple[str, str], float] = {}
        metrics.before_snapshot(self._fold)

    def answer(
        self, labels: tuple[str, str], parse: Sequence[float], total: Sequence[float], *, reply: float, encode: float
    ) -> None:
        """Count requests of one model that were answered together.

        parse, total: seconds of each. reply: their mean. encode: seconds until all were encoded, which each of them waited.
        """
        seconds = self._seconds.get(labels)
        if seconds is None:
            seconds = self._seconds[labels] = {"parse": [], "total": []}
        seconds["parse"] += parse
        seconds["total"] += total
        self._metrics.stage_seconds.observe_often(reply, len(total), *labels, "reply")
        self._metrics.stage_seconds.observe_often(encode, len(total), *labels, "encode")
        self._last_answer[labels] = datetime.now(UTC).timestamp()
        self._ended += len(total)
        self._unfolded += len(total)
        if self._unfolded > self.MAX_UNFOLDED:
            self._fold()

    def fail(self, labels: tuple[str, str], outcome: str, seconds: float) -> None:
        """Count a request that ended without an answer, `seconds` after its arrival."""
        self._ended += 1
        self._metrics.requests.add(*labels, outcome)
        self._metrics.stage_seconds.observe(seconds, *labels, "total")
        self._metrics.failed_seconds.add(*labels, by=seconds)

    def _fold(self) -> None:
        metrics = self._metrics
        metrics.accepted.add(by=self.accepted)
        metrics.in_flight.add(by=self.accepted - self._ended)
        self.accepted = self._ended = self._unfolded = 0
        for labels, stages in self._seconds.items():
            metrics.requests.add(*labels, OK, by=len(stages["total"]))
            for stage, seconds in stages.items():
                metrics.stage_seconds.observe_all(seconds, *labels, stage)
            metrics.last_answer.set(self._last_answer[labels], *labels)
        self._seconds, self._last_answer = {}, {}
