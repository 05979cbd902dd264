"""Records turns while an engine runs them, and what torch's profiler sees of them: operations, launches, copies and kernels."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from torch.profiler import ProfilerActivity, profile, record_function

from service.engine.batch import Batch
from service.engine.execution.in_flight import InFlightBatch
from service.engine.profiling.timeline import Event, Mark, Profiled, TracedBatch, events

MARKS = 8
"""The first ones take long; the shortest is the one that counts."""
SILENT = "KINETO_LOG_LEVEL", "99"
"""The profiler would say on standard error what it does, where the log has a line of JSON for each event."""


class Recorder:
    """Records the turns that begin from now on, until it has so many or so many seconds have passed.

    To begin, to stop and to abandon it takes up to seconds, in which nothing else happens.
    """

    def __init__(self, place: int, device: str, batches: int, seconds: float) -> None:
        """Raises OSError when there is no folder for a file of the profiler."""
        self._place = place
        self._device = device
        self._wanted = batches
        self._profiling = Profiling(device)
        self._taken: dict[int, tuple[Batch, Sequence[float]]] = {}
        self._turns: list[TracedBatch] = []
        self._unanswered = 0
        self._free = self._began = time.monotonic()
        self._until = self._began + seconds

    @property
    def over(self) -> bool:
        """Whether enough was recorded, or enough time has passed."""
        return (len(self._turns) >= self._wanted and not self._unanswered) or time.monotonic() >= self._until

    def take(self, batch: Batch, arrivals: Sequence[float]) -> None:
        """A turn is about to be launched."""
        # Kept with its turn: another one could have the same id as soon as this one is gone.
        self._taken[id(batch)] = batch, arrivals

    def end(self, in_flight: InFlightBatch, ended: float) -> None:
        """A turn has ended, and its answers are apart."""
        _, arrivals = self._taken.pop(id(in_flight.batch), (None, ()))
        if in_flight.began >= self._began and len(self._turns) < self._wanted:
            self._turns.append(_traced(in_flight, arrivals, self._free, ended))
            self._unanswered += 1
        self._free = ended

    def answer(self) -> None:
        """What has ended so far is answered."""
        now = time.monotonic()
        for batch in self._turns[len(self._turns) - self._unanswered :]:
            batch.replied = now
        self._unanswered = 0

    def stop(self) -> bytes:
        """All that was recorded, as a JSON array of trace events; raises RuntimeError when the profiler gave nothing."""
        with _uncollected():
            profiled = self._profiling.stop()
            found: list[Event] = events(self._place, self._device, self._turns, profiled, self._profiling.marks)
            return msgspec.json.encode(found)

    def abandon(self) -> None:
        self._profiling.abandon()


class Profiling:
    """torch's profiler, which runs from here on. The first time in a process this loads what it needs, on a GPU for seconds."""

    def __init__(self, device: str) -> None:
        os.environ.setdefault(*SILENT)
        self._folder = tempfile.TemporaryDirectory(prefix="seqserve-")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.startswith("cuda") else [])]
        self._profiler = profile(activities=activities, acc_events=True)  # or it warns that events are cleared
        self._profiler.start()
        self.marks = [_mark(f"mark {number}") for number in range(MARKS)]

    def stop(self) -> list[Profiled]:
        """What it saw; raises RuntimeError when it cannot say."""
        with self._folder as folder:
            self._profiler.stop()
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            try:
                return msgspec.json.decode(file.read_bytes(), type=_Exported).events
            except (OSError, msgspec.MsgspecError) as fault:
                raise RuntimeError(f"the profiler's file cannot be read: {fault}") from fault

    def abandon(self) -> None:
        with self._folder:
            self._profiler.stop()


class _Exported(msgspec.Struct):
    """The profiler's file."""

    events: list[Profiled] = msgspec.field(name="traceEvents")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector, which would look at hundreds of thousands of events again and again: it all takes half as long."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _mark(name: str) -> Mark:
    before = time.monotonic()
    with record_function(name):
        pass
    return Mark(name, before, time.monotonic())


def _traced(in_flight: InFlightBatch, arrivals: Sequence[float], free: float, ended: float) -> TracedBatch:
    """What is told of it later; its arrays and its sequences are not kept."""
    batch, now = in_flight.batch, time.monotonic()
    return TracedBatch(
        model=batch.model,
        rows=batch.rows,
        tokens=batch.tokens,
        longest=batch.longest,
        padded_tokens=in_flight.padded_tokens,
        by="graph" if in_flight.by_graph else "launches",
        asynchronous=in_flight.place is not None,
        arrivals=arrivals,
        began=in_flight.began,
        staged=in_flight.staged,
        launched=in_flight.launched,
        free=free,
        ended=ended,
        apart=now,
        replied=now,
    )
