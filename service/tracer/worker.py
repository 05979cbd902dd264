"""The tracer's loop: reads the requests that frontends recorded, makes spans and exports them in a thread, a batch at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from service.ipc.messages.tracing import RequestTrace
from service.log import Log
from service.metrics import Metrics
from service.tracer.spans import SpanMaker

EXPORT_SECONDS = 1.0
"""Time between two exports, if there are few spans."""
SPANS_PER_EXPORT = 512
MAX_WAITING_SPANS = 1 << 14
"""Further spans are dropped: the receiver is too slow, or does not answer."""


class Tracer:
    """Makes and exports spans."""

    def __init__(self, maker: SpanMaker, exporter: SpanExporter, metrics: Metrics, log: Log) -> None:
        self._maker = maker
        self._exporter = exporter
        self._metrics = metrics
        self._log = log
        self._waiting: list[ReadableSpan] = []
        self._wake = asyncio.Event()
        self._stopping = False

    def add(self, requests: Sequence[RequestTrace]) -> None:
        """Make the spans of requests."""
        now, offset = time.monotonic(), _unix_offset()
        for request in requests:
            try:
                spans = self._maker.request_spans(request, now, offset)
            except Exception as error:
                self._log.capped("error", "bug", error=f"{type(error).__name__}: {error}")
            else:
                self._queue(spans)

    async def run(self) -> None:
        """Export until `stop`, and then all waiting spans, including the spans of batches."""
        while not self._stopping:
            self._wake.clear()
            if len(self._waiting) < SPANS_PER_EXPORT:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), EXPORT_SECONDS)
            self._queue(self._maker.batch_spans(time.monotonic(), _unix_offset()))
            await self._export()
        self._queue(self._maker.batch_spans(math.inf, _unix_offset()))
        while self._waiting:
            await self._export()

    def stop(self) -> None:
        """Let `run` end."""
        self._stopping = True
        self._wake.set()

    def _queue(self, spans: list[ReadableSpan]) -> None:
        room = max(0, MAX_WAITING_SPANS - len(self._waiting))
        if len(spans) > room:
            self._metrics.spans.add("dropped", by=len(spans) - room)
        self._waiting += spans[:room]
        if len(self._waiting) >= SPANS_PER_EXPORT:
            self._wake.set()

    async def _export(self) -> None:
        spans, self._waiting = self._waiting[:SPANS_PER_EXPORT], self._waiting[SPANS_PER_EXPORT:]
        if not spans:
            return
        try:
            result = await asyncio.to_thread(self._exporter.export, spans)
        except Exception as error:
            self._log.capped("error", "spans not exported", error=f"{type(error).__name__}: {error}")
            result = SpanExportResult.FAILURE
        self._metrics.spans.add("exported" if result is SpanExportResult.SUCCESS else "failed", by=len(spans))


def _unix_offset() -> float:
    """Return Unix time less monotonic time, in seconds."""
    return datetime.now(UTC).timestamp() - time.monotonic()
