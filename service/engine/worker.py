"""The engine process's loop: drain the channels, run a turn, send the answers. One thread does it all."""

from __future__ import annotations

import selectors
import time
from functools import partial
from typing import Protocol

import msgspec

from service.engine.batch import Batch
from service.engine.batching.batcher import Batcher
from service.engine.batching.ticket import Ticket
from service.engine.loading import ModelLoader
from service.engine.profiling.session import ProfilingSession, Watched
from service.errors import ServiceError
from service.ipc.channel import Channel, Frame, Kind, encode, tell
from service.ipc.heartbeat import IDLE_SECONDS, PATIENCE_SECONDS, Heartbeat
from service.ipc.messages import Answer, Closing, EngineStatus, LoadedModel, ModelKey, ModelVersion, Refusal, Request, Trace
from service.metrics import Metrics

HANG_FACTOR = 10.0
"""A turn that takes longer than this many times its prediction, and PATIENCE_SECONDS, is taken for a hang."""


FRAMES_AT_ONCE = 64
"""A turn is launched, if the engine takes one, after so many frames: else refusing what is too much would keep the device idle."""


class Runs(Watched, Protocol):
    """What the loop asks of an engine besides its batcher."""

    @property
    def running(self) -> tuple[float, float] | None: ...

    def predicted_seconds(self, batch: Batch) -> float: ...

    def count_memory(self) -> None: ...

    def loaded(self) -> list[LoadedModel]: ...

    @property
    def device(self) -> object: ...


class Worker:
    """Serves the fronts that the supervisor attaches, until the supervisor closes `control`."""

    def __init__(
        self,
        control: Channel,
        heartbeat: Heartbeat,
        batcher: Batcher,
        engine: Runs,
        models: ModelLoader,
        place: int,
        metrics: Metrics,
    ) -> None:
        self._control = control
        self._heartbeat = heartbeat
        self._batcher = batcher
        self._engine = engine
        self._models = models
        self._models.changed = self._greet_all
        self._place = place
        self._metrics = metrics
        self._profiling = ProfilingSession(engine, batcher, self._status(), heartbeat)
        self._tickets: dict[Channel, dict[int, Ticket]] = {}
        self._answered: set[Channel] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(models, selectors.EVENT_READ)

    def run(self) -> None:
        """Loop until the supervisor's end of file."""
        tell(self._control, Kind.READY)
        while self._control.open:
            self._beat()
            # While the device works the loop does not sleep: it would wake too late for the turn's end.
            self._drain(IDLE_SECONDS if self._batcher.idle and not self._engine.running else 0.0)
            self._batcher.step(self._before_launch)
            self._models.settle()
            for channel in [channel for channel in self._tickets if channel.outgoing]:
                self._flush(channel)
            if self._profiling.on:
                self._profiling.step()

    def _beat(self) -> None:
        """A turn that runs must end in time, however lively this loop is."""
        running = self._engine.running
        if running is None:
            self._heartbeat.beat()
        else:
            since, predicted = running
            self._heartbeat.beat_by(max(since, self._profiling.resumed) + _patience(predicted))

    def _before_launch(self, batch: Batch) -> None:
        self._heartbeat.beat(_patience(self._engine.predicted_seconds(batch)))

    def _drain(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            channel = key.fileobj
            if not isinstance(channel, Channel) or not events & selectors.EVENT_READ:
                continue
            for number, frame in enumerate(channel.receive(), 1):
                self._handle_control_message(frame) if channel is self._control else self._serve(channel, frame)
                if number % FRAMES_AT_ONCE == 0:
                    self._batcher.step(self._before_launch)
            if not channel.open:
                self._forget(channel)

    def _handle_control_message(self, frame: Frame) -> None:
        """A word of the supervisor."""
        if frame.kind == Kind.ATTACH and frame.attached is not None:
            channel = Channel(frame.attached)
            self._tickets[channel] = {}
            self._selector.register(channel, selectors.EVENT_READ)
            channel.send(encode(Kind.ENGINE_STATUS, 0, self._status()))
        elif frame.kind == Kind.GATHER:
            self._engine.count_memory()
            self._batcher.count()
            self._metrics.backlog_seconds.set(self._batcher.backlog_seconds(), str(self._place))
            tell(self._control, Kind.COUNTS, self._metrics.snapshot(), frame.id)
        elif frame.kind == Kind.PREPARE:
            self._models.prepare(frame.read(ModelVersion), partial(self._prepared, frame.id))
        elif frame.kind == Kind.CLOSE:
            closed = partial(tell, self._control, Kind.CLOSED, None, frame.id)
            self._models.close(frame.read(Closing), set(self._tickets), closed)

    def _prepared(self, id: int, refusal: ServiceError | None) -> None:
        tell(self._control, Kind.DONE if refusal is None else Kind.REFUSAL, refusal and Refusal.of(refusal), id)

    def _status(self) -> EngineStatus:
        return EngineStatus(self._engine.loaded(), self._place, str(self._engine.device))

    def _greet_all(self) -> None:
        """The models are no longer those that the fronts know of."""
        for channel in self._tickets:
            channel.send(encode(Kind.ENGINE_STATUS, 0, self._status()))

    def _serve(self, channel: Channel, frame: Frame) -> None:
        """A word of a front."""
        if frame.kind in (Kind.SUBMIT, Kind.RESUBMIT):
            request = frame.read(Request)
            self._metrics.channel_seconds.observe(max(0.0, time.monotonic() - request.sent))
            reply, refuse = partial(self._reply, channel, frame.id), partial(self._refuse, channel, frame.id)
            ticket = self._batcher.submit(request, frame.tail, reply, refuse, again=frame.kind == Kind.RESUBMIT)
            if not ticket.ended:
                self._tickets[channel][frame.id] = ticket
        elif frame.kind == Kind.CANCEL:
            ticket_or_none = self._tickets[channel].pop(frame.id, None)
            if ticket_or_none is not None:
                self._batcher.cancel(ticket_or_none)
            self._profiling.cancel(channel, frame.id)
        elif frame.kind == Kind.TRACE:
            reply, refuse = partial(self._trace, channel, frame.id), partial(self._refuse, channel, frame.id)
            self._profiling.begin((channel, frame.id), frame.read(Trace), reply, refuse)
        elif frame.kind == Kind.RELEASE:
            self._models.release(channel, frame.read(ModelKey))
        elif frame.kind in (Kind.EXPORT, Kind.ADOPT, Kind.END, Kind.MODEL_OF):
            self._serve_session(channel, frame)

    def _serve_session(self, channel: Channel, frame: Frame) -> None:
        """A word about a session itself."""
        id, said = frame.read(str), b""
        try:
            if frame.kind == Kind.EXPORT:
                said = self._batcher.export(id)
            elif frame.kind == Kind.ADOPT:
                self._batcher.adopt(id, frame.tail)
            elif frame.kind == Kind.MODEL_OF:
                said = msgspec.msgpack.encode(self._batcher.model_of(id))
            else:
                self._batcher.end(id)
        except ServiceError as error:
            self._refuse(channel, frame.id, error)
        else:
            self._send(channel, frame.id, encode(Kind.DONE, frame.id, None, (said,)))

    def _reply(self, channel: Channel, id: int, answer: Answer, arrays: list[bytes]) -> None:
        self._send(channel, id, encode(Kind.ANSWER, id, answer, arrays))

    def _refuse(self, channel: Channel, id: int, error: ServiceError) -> None:
        self._send(channel, id, encode(Kind.REFUSAL, id, Refusal.of(error)))

    def _trace(self, channel: Channel, id: int, events: bytes) -> None:
        """It leaves at once: nothing may come for a while that the loop would wake up for."""
        self._send(channel, id, encode(Kind.TRACED, id, None, (events,)))
        self._flush(channel)

    def _send(self, channel: Channel, id: int, frame: bytes) -> None:
        channel.send(frame)
        self._answered.add(channel)
        self._tickets[channel].pop(id, None)

    def _flush(self, channel: Channel) -> None:
        """Write what the front takes now; the rest leaves when the selector says that there is room."""
        self._report(channel)
        bytes_before, writes_before = channel.bytes_sent, channel.writes
        done = channel.flush()
        self._metrics.channel_bytes.add("engine", by=channel.bytes_sent - bytes_before)
        self._metrics.channel_writes.add("engine", by=channel.writes - writes_before)
        if not channel.open:
            self._forget(channel)
            return
        self._selector.modify(channel, selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE))

    def _report(self, channel: Channel) -> None:
        """Beside answers a front hears how much work is left here, and how many of its frames are counted in that."""
        if channel in self._answered:
            self._answered.discard(channel)
            channel.send(encode(Kind.LOAD, channel.frames_received, self._batcher.backlog_seconds()))

    def _forget(self, channel: Channel) -> None:
        """The front has ended: nobody waits for its requests any more."""
        self._selector.unregister(channel)
        self._answered.discard(channel)
        self._profiling.forget(channel)
        self._models.forget(channel)
        for ticket in self._tickets.pop(channel, {}).values():
            self._batcher.cancel(ticket)
        channel.close()


def _patience(predicted_seconds: float) -> float:
    """How long a turn may take."""
    return max(PATIENCE_SECONDS, HANG_FACTOR * predicted_seconds)
