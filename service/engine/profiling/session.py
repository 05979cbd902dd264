"""Records a trace of an engine's batches for a frontend, one trace at a time. Costs nothing while no trace is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from service.engine.batching.batcher import Batcher
from service.engine.execution.device_engine import DeviceEngine
from service.engine.profiling.recorder import BatchRecorder
from service.errors import Overloaded, ServiceError, Unavailable
from service.ipc.channel import Channel
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.inference import EngineStatus, RecordTrace
from service.log import Log

BLOCKED_SECONDS = 60.0
"""How long the engine's loop may block while the profiler of a GPU starts for the first time or exports its events."""
TraceReply = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class _RunningTrace:
    """A trace that is being recorded. requester: the channel of the frontend, and the id of its request."""

    requester: tuple[Channel, int]
    recorder: BatchRecorder
    reply: TraceReply
    refuse: Callable[[ServiceError], None]


class ProfilingSession:
    """Starts, continues and ends the traces that frontends request.

    resumed: when the engine's loop last continued after the profiler had blocked it.
    """

    def __init__(self, engine: DeviceEngine, batcher: Batcher, status: EngineStatus, heartbeat: Heartbeat) -> None:
        self._engine = engine
        self._batcher = batcher
        self._status = status
        self._heartbeat = heartbeat
        self.trace: _RunningTrace | None = None
        self.resumed = 0.0

    def begin(
        self, requester: tuple[Channel, int], request: RecordTrace, reply: TraceReply, refuse: Callable[[ServiceError], None]
    ) -> None:
        """Start a trace, or refuse it at once. Calls `reply` with the events when the trace is complete."""
        if self.trace is not None:
            refuse(Overloaded("a trace is being recorded, and there is one at a time: retry when it has ended", retry_after=1))
            return
        try:
            with self._blocking():
                recorder = BatchRecorder(self._status.place, self._status.device, request.batches, request.seconds)
        except (OSError, RuntimeError) as error:
            refuse(self._failure(error))
            return
        self.trace = _RunningTrace(requester, recorder, reply, refuse)
        self._engine.watch(recorder.ended)
        self._batcher.watch(recorder.launching)

    def step(self) -> None:
        """Note that the replies of the ended batches are written, and end the trace if it is complete."""
        if self.trace is None:
            return
        self.trace.recorder.replied()
        if self.trace.recorder.over:
            self._complete(self._stop_watching(self.trace))

    def cancel(self, channel: Channel, id: int) -> None:
        """Abandon the trace if this request started it."""
        if self.trace is not None and self.trace.requester == (channel, id):
            self._abandon(self.trace)

    def forget(self, channel: Channel) -> None:
        """Abandon the trace if a frontend that has ended requested it."""
        if self.trace is not None and self.trace.requester[0] is channel:
            self._abandon(self.trace)

    def _abandon(self, trace: _RunningTrace) -> None:
        with self._blocking(), suppress(OSError, RuntimeError):
            self._stop_watching(trace).recorder.abandon()

    def _complete(self, trace: _RunningTrace) -> None:
        try:
            with self._blocking():
                events = trace.recorder.stop()
        except (OSError, RuntimeError) as error:
            trace.refuse(self._failure(error))
        else:
            trace.reply(events)

    def _stop_watching(self, trace: _RunningTrace) -> _RunningTrace:
        self.trace = None
        self._engine.watch(None)
        self._batcher.watch(None)
        return trace

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Announce that the loop blocks, so that the supervisor takes neither the process nor its running batch for hung."""
        self._heartbeat.beat(BLOCKED_SECONDS)
        self._engine.end_resident()
        try:
            yield
        finally:
            self.resumed = time.monotonic()

    def _failure(self, error: Exception) -> Unavailable:
        Log(f"engine-{self._status.place}").error("trace failed", error=f"{type(error).__name__}: {error}")
        return Unavailable(f"the trace could not be recorded: {error}")
