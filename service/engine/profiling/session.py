"""One trace at a time of an engine's turns, for the front that asked. Costs nothing while there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from service.engine.batching.batcher import Batcher
from service.engine.batching.ticket import Refuse
from service.engine.execution.device_engine import Watcher
from service.engine.profiling.recorder import Recorder
from service.errors import Overloaded, Unavailable
from service.ipc.channel import Channel
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import EngineStatus, RecordTrace
from service.log import Log

STANDSTILL_SECONDS = 60.0
"""The loop may stand still for so long while the profiler of a GPU starts for the first time, or says what it saw."""
Reply = Callable[[bytes], None]


class Watched(Protocol):
    """What a trace asks of an engine."""

    def watch(self, watcher: Watcher | None) -> None: ...


@dataclass(frozen=True, slots=True)
class _Trace:
    """`asker` is the front's channel and the id by which it asked."""

    asker: tuple[Channel, int]
    recorder: Recorder
    reply: Reply
    refuse: Refuse


class ProfilingSession:
    """Begins, goes on with and ends what fronts ask for. `resumed` is when the loop last went on after it had stood still for that."""

    def __init__(self, engine: Watched, batcher: Batcher, status: EngineStatus, heartbeat: Heartbeat) -> None:
        self._engine = engine
        self._batcher = batcher
        self._status = status
        self._heartbeat = heartbeat
        self._trace: _Trace | None = None
        self.resumed = 0.0

    @property
    def on(self) -> bool:
        return self._trace is not None

    def begin(self, asker: tuple[Channel, int], wanted: RecordTrace, reply: Reply, refuse: Refuse) -> None:
        """Record from now on. The trace leaves through `reply` once it is whole; what cannot be recorded is refused at once."""
        if self._trace is not None:
            refuse(Overloaded("a trace is being recorded, and there is one at a time: retry when it has ended", retry_after=1))
            return
        try:
            with self._standstill():
                recorder = Recorder(self._status.place, self._device, wanted.batches, wanted.seconds)
        except (OSError, RuntimeError) as fault:
            refuse(self._failed(fault))
            return
        self._trace = _Trace(asker, recorder, reply, refuse)
        self._engine.watch(recorder.end)
        self._batcher.watch(recorder.take)

    def step(self) -> None:
        """What ended in this turn of the loop has been answered; a trace that has enough by now leaves."""
        if self._trace is None:
            return
        self._trace.recorder.answer()
        if self._trace.recorder.over:
            self._leave(self._unwatched(self._trace))

    def cancel(self, channel: Channel, id: int) -> None:
        """Who asked by this id waits for nothing any more, which may have been a trace."""
        if self._trace is not None and self._trace.asker == (channel, id):
            self._abandon(self._trace)

    def forget(self, channel: Channel) -> None:
        """This front has ended."""
        if self._trace is not None and self._trace.asker[0] is channel:
            self._abandon(self._trace)

    def _abandon(self, trace: _Trace) -> None:
        with self._standstill(), suppress(OSError, RuntimeError):
            self._unwatched(trace).recorder.abandon()

    def _leave(self, trace: _Trace) -> None:
        try:
            with self._standstill():
                found = trace.recorder.stop()
        except (OSError, RuntimeError) as fault:
            trace.refuse(self._failed(fault))
        else:
            trace.reply(found)

    def _unwatched(self, trace: _Trace) -> _Trace:
        """The trace, of which no more is recorded."""
        self._trace = None
        self._engine.watch(None)
        self._batcher.watch(None)
        return trace

    @property
    def _device(self) -> str:
        return self._status.device

    @contextmanager
    def _standstill(self) -> Iterator[None]:
        """Neither this process nor the turn that runs is taken for hung meanwhile."""
        self._heartbeat.beat(STANDSTILL_SECONDS)
        try:
            yield
        finally:
            self.resumed = time.monotonic()

    def _failed(self, fault: Exception) -> Unavailable:
        Log(f"engine-{self._status.place}").error("trace failed", error=f"{type(fault).__name__}: {fault}")
        return Unavailable(f"the trace could not be recorded: {fault}")
