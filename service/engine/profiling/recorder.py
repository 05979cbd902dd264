"""Records the batches that an engine runs, and the profiler's view of them: operations, launches, copies and kernels."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from torch.autograd.profiler import profile, record_function

from service.engine.batch import Batch
from service.engine.execution.in_flight import InFlightBatch
from service.engine.profiling.timeline import ClockMark, ProfilerEvent, TracedBatch, events

MARKS = 8
"""The first marks take long. The shortest of all is used."""
SILENT = "KINETO_LOG_LEVEL", "99"
"""Keeps the profiler from writing to standard error, where every line of the log is a JSON object."""


class BatchRecorder:
    """Records the batches that begin from now on, until it has `batches` of them or `seconds` have passed.

    Creating, stopping and abandoning a recorder may block for seconds.
    """

    def __init__(self, place: int, device: str, batches: int, seconds: float) -> None:
        """Raises OSError if the profiler's file has no folder to go to."""
        self._place = place
        self._device = device
        self._limit = batches
        self._profiler = Profiler(device)
        self._launched: dict[Batch, Sequence[float]] = {}
        self._batches: list[TracedBatch] = []
        self._unreplied = 0
        self._device_free = self._began = time.monotonic()
        self._until = self._began + seconds

    @property
    def over(self) -> bool:
        """Whether enough batches are recorded, or the time has passed."""
        return (len(self._batches) >= self._limit and not self._unreplied) or time.monotonic() >= self._until

    def launching(self, batch: Batch, arrivals: Sequence[float]) -> None:
        """Note a batch before its launch."""
        self._launched[batch] = arrivals

    def ended(self, in_flight: InFlightBatch, ended: float) -> None:
        """Record a batch that has ended, after its results were split."""
        arrivals = self._launched.pop(in_flight.batch, ())
        if in_flight.began >= self._began and len(self._batches) < self._limit:
            self._batches.append(_traced(in_flight, arrivals, self._device_free, ended))
            self._unreplied += 1
        self._device_free = ended

    def replied(self) -> None:
        """Note that the replies of all batches that have ended are written."""
        now = time.monotonic()
        for batch in self._batches[len(self._batches) - self._unreplied :]:
            batch.replied = now
        self._unreplied = 0

    def stop(self) -> bytes:
        """Stop recording. Returns a JSON array of trace events; raises RuntimeError if the profiler fails."""
        gc.disable()  # it would scan hundreds of thousands of events again and again: without it, stopping takes half the time
        try:
            profiled = self._profiler.stop()
            return msgspec.json.encode(events(self._place, self._device, self._batches, profiled, self._profiler.marks))
        finally:
            gc.enable()

    def abandon(self) -> None:
        self._profiler.abandon()


class Profiler:
    """torch's profiler, running. On a GPU, the first profiler of a process loads the driver's library."""

    def __init__(self, device: str) -> None:
        os.environ.setdefault(*SILENT)
        self._folder = tempfile.TemporaryDirectory(prefix="seqserve-")
        # torch.profiler.profile would import torch's compiler at its first start, for seconds.
        self._profile = cast(Any, profile(use_kineto=True, use_device="cuda" if device.startswith("cuda") else None))
        self._profile.__enter__()
        self.marks = [_mark(f"mark {number}") for number in range(MARKS)]

    def stop(self) -> list[ProfilerEvent]:
        """Return the events; raises RuntimeError if there are none to read."""
        with self._folder as folder:
            self._profile.__exit__(None, None, None)
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            try:
                return msgspec.json.decode(file.read_bytes(), type=_ExportedTrace).events
            except (OSError, msgspec.MsgspecError) as error:
                raise RuntimeError(f"the profiler's file cannot be read: {error}") from error

    def abandon(self) -> None:
        with self._folder:
            self._profile.__exit__(None, None, None)


class _ExportedTrace(msgspec.Struct):
    """The profiler's file."""

    events: list[ProfilerEvent] = msgspec.field(name="traceEvents")


def _mark(name: str) -> ClockMark:
    before = time.monotonic()
    with record_function(name):
        pass
    return ClockMark(name, before, time.monotonic())


def _traced(in_flight: InFlightBatch, arrivals: Sequence[float], device_free: float, ended: float) -> TracedBatch:
    """Return the values of a batch that the timeline needs, without its arrays and chunks."""
    batch, now = in_flight.batch, time.monotonic()
    return TracedBatch(
        model=batch.model,
        rows=batch.rows,
        tokens=batch.tokens,
        longest=batch.longest,
        padded_tokens=in_flight.padded_tokens,
        by=in_flight.by,
        asynchronous=in_flight.collector is not None,
        arrivals=arrivals,
        began=in_flight.began,
        staged=in_flight.staged,
        launched=in_flight.launched,
        device_free=device_free,
        ended=ended,
        split=now,
        replied=now,
    )
