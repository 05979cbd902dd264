"""The engine process's loop: read the channels, run a batch, send the answers. One thread does it all."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np

from service.engine.batch import Batch
from service.engine.batching.batcher import Batcher
from service.engine.batching.request_block import QueuedBlock
from service.engine.execution.device_engine import DeviceEngine
from service.engine.frontend_channel import FrontendChannel
from service.engine.internal_errors import InternalErrors
from service.engine.known_answers import KnownAnswers
from service.engine.loading import ModelLoader
from service.engine.profiling.session import ProfilingSession
from service.engine.session_calls import SessionCall, SessionCalls
from service.engine.trials import TrialReports
from service.errors import ServiceError
from service.ipc.blocks import ID, join_blocks, key_of
from service.ipc.channel import Channel, Frame, encode, send_now
from service.ipc.heartbeat import IDLE_SECONDS, PATIENCE_SECONDS, Heartbeat
from service.ipc.messages.control import Attach, CloseModel, CollectMetrics, MetricsCollected, PrepareModel, Ready
from service.ipc.messages.inference import Backlog, Cancel, EngineStatus, RecordTrace, Release, RequestBlock
from service.ipc.messages.message import Done, Message, Refusal
from service.memory_limit import MemoryLimit, return_freed_memory
from service.metrics import Metrics

HANG_FACTOR = 10.0
"""A batch that takes longer than this multiple of its prediction, and PATIENCE_SECONDS, counts as hung."""
LAG_SECONDS, MOST_READ = 0.02, 1024
"""The loop launches a batch, if the device accepts one, after as many requests as a batch holds: otherwise, under overload, refusing
requests would keep the device idle. It reads up to MOST_READ once requests wait longer than LAG_SECONDS to be read, because a request that
is not in the queue yet is neither predicted nor refused."""
IDLE_WORK_SECONDS, SCARCE_SHARE = 1.0, 0.75
"""How often an idle engine checks a known answer and looks at the memory limit, and the share in use from which it returns freed memory."""


class Worker:
    """Serves the frontends that the supervisor attaches, until the supervisor closes `control`."""

    def __init__(
        self,
        control: Channel,
        heartbeat: Heartbeat,
        batcher: Batcher,
        engine: DeviceEngine,
        models: ModelLoader,
        trials: TrialReports,
        place: int,
        metrics: Metrics,
        errors: InternalErrors,
    ) -> None:
        self._control = control
        self._heartbeat = heartbeat
        self._batcher = batcher
        self._engine = engine
        self._models = models
        self._models.changed = self._send_status
        self._trials = trials
        self._place = place
        self._metrics = metrics
        self._errors = errors
        self._known_answers = KnownAnswers(engine)
        self._session_calls = SessionCalls(batcher.sessions, errors)
        self._profiling = ProfilingSession(engine, batcher, self._status(), heartbeat)
        self._frontends: dict[Channel, FrontendChannel] = {}
        self._store: Channel | None = None
        self._handled = 0
        """Requests and other messages since the last step of the batcher."""
        self._blocked: set[Channel] = set()
        """Channels that have not accepted all bytes. The selector reports when they have room."""
        self._control_handlers: dict[type[Message], Callable[[Frame, Any], None]] = {
            Attach: self._handle_attach,
            CollectMetrics: self._handle_collect_metrics,
            PrepareModel: self._handle_prepare_model,
            CloseModel: self._handle_close_model,
        }
        self._handlers: dict[type[Message], tuple[str, Callable[[FrontendChannel, Frame, Any], None]]] = {
            RequestBlock: ("requests", self._handle_block),
            Cancel: ("cancel", self._handle_cancel),
            RecordTrace: ("trace", self._handle_record_trace),
            Release: ("release", self._handle_release),
            **dict.fromkeys(get_args(SessionCall), ("session_call", self._session_calls.handle)),
        }
        """The handler of each message of a frontend, and the metric label of its work."""
        self._memory_limit, self._idle_work_due = MemoryLimit(), 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(models, selectors.EVENT_READ)

    def run(self) -> None:
        """Loop until the supervisor closes its end of the control channel."""
        send_now(self._control, Ready())
        while self._control.open:
            self.run_once()

    def run_once(self) -> None:
        """Read the channels, run a batch, and send the answers."""
        running = self._engine.running
        if running is None:
            self._heartbeat.beat()
        else:
            # The next beat is due when the batch counts as hung, even if this loop still runs.
            since, predicted = running
            self._heartbeat.beat_by(max(since, self._profiling.resumed) + _patience(predicted))
        # The loop does not sleep while the device works: it would wake too late for the end of the batch.
        idle = running is None and self._batcher.idle
        self._read_channels(IDLE_SECONDS if idle else 0.0)
        self._step()
        if self._trials.running:
            self._trials.end_batches(self._engine.runs)
        waiting = [channel for channel in self._frontends if channel.outgoing]
        backlog = self._batcher.backlog_seconds() if waiting else 0.0
        for channel in waiting:
            self._flush(channel, backlog)
        self._engine.count_ended()  # not before the answers have left
        if self._models.closing:
            self._models.settle()
        for other in (self._control, self._store):
            if other is not None and other.outgoing:
                self._flush(other)
        if self._profiling.trace is not None:
            self._profiling.step()
        elif time.monotonic() >= self._idle_work_due and self._batcher.idle and not self._engine.running:
            self._idle_work_due = time.monotonic() + IDLE_WORK_SECONDS
            self._work_while_idle()

    def _work_while_idle(self) -> None:
        """Check a model that is due. Return freed memory to the system if it is scarce: the frontends would refuse requests for it."""
        key = self._known_answers.next_model()
        if key is not None:
            self._heartbeat.beat(_patience(self._engine.cost(key).fixed))
            self._known_answers.check(key)
        if self._memory_limit.read().share > SCARCE_SHARE:
            return_freed_memory()

    def _step(self) -> None:
        self._handled = 0
        self._batcher.step(self._before_launch)

    def _before_launch(self, batch: Batch) -> None:
        if batch.model not in self._trials.passed:
            self._trials.begin_batch(batch.model)
        self._heartbeat.beat(_patience(self._engine.predicted_seconds(batch)))

    def _read_channels(self, timeout: float) -> None:
        for key, events in self._selector.select(timeout):
            channel = key.fileobj
            if channel is self._models:
                self._models.settle()
            if not isinstance(channel, Channel) or not events & selectors.EVENT_READ:
                continue
            if channel is not self._control and channel is not self._store and channel not in self._frontends:
                continue  # forgotten since the selector returned
            self._handle_frames(channel, channel.receive())
            if not channel.open:
                self._forget(channel)

    def _handle_frames(self, channel: Channel, frames: Sequence[Frame]) -> None:
        for frame in join_blocks(frames, self._batcher.batch_sequences) if len(frames) > 1 else frames:
            message = frame.message
            if self._handled >= self._batcher.batch_sequences and (self._handled >= MOST_READ or _lag(message) < LAG_SECONDS):
                self._step()
            self._handled += message.requests if isinstance(message, RequestBlock) else 1
            if channel is self._control:
                handle_control = self._control_handlers.get(type(message))
                if handle_control is not None:
                    handle_control(frame, message)
            elif channel is self._store:
                self._session_calls.handle_store_frame(channel, frame)
            elif channel in self._frontends:
                self._handle_frame(self._frontends[channel], frame)

    # Messages of the supervisor.

    def _handle_attach(self, frame: Frame, message: Attach) -> None:
        assert frame.attached is not None, "an Attach message carries a socket"
        channel = Channel(frame.attached)
        self._selector.register(channel, selectors.EVENT_READ)
        channel.send(encode(self._status()))
        if message.store:
            assert self._batcher.sessions.stored is not None, "a service with a session store has engines that use it"
            if self._store is not None:
                self._forget(self._store)  # its process has ended, and the end of the channel was not read yet
            self._store = channel
            self._batcher.sessions.stored.attach(lambda message, tail: channel.send(encode(message, tail=(tail,))))
        else:
            self._frontends[channel] = FrontendChannel(channel)
            self._trials.attach(channel)

    def _handle_collect_metrics(self, frame: Frame, message: CollectMetrics) -> None:
        self._engine.count_memory()
        self._batcher.count()
        self._metrics.backlog_seconds.set(self._batcher.backlog_seconds(), str(self._place))
        self._metrics.device_busy_seconds.raise_to(self._engine.busy_seconds, str(self._place))
        send_now(self._control, MetricsCollected(self._metrics.snapshot()), frame.id)

    def _handle_prepare_model(self, frame: Frame, message: PrepareModel) -> None:
        key = message.model_version.key

        def reply(error: ServiceError | None) -> None:
            self._trials.end_load(key)
            send_now(self._control, Done() if error is None else Refusal.of(error), frame.id)

        self._trials.begin_load(key)
        self._models.prepare(message.model_version, reply)

    def _handle_close_model(self, frame: Frame, message: CloseModel) -> None:
        def closed() -> None:
            self._trials.forget(message.key)
            send_now(self._control, Done(), frame.id)

        self._models.close(message, set(self._frontends), closed)

    def _status(self) -> EngineStatus:
        return EngineStatus(self._engine.loaded(), self._place, str(self._engine.device))

    def _send_status(self) -> None:
        """Tell every frontend which models this engine serves now, before the supervisor learns that a load is done."""
        for channel in list(self._frontends):
            channel.send(encode(self._status()))
            self._flush(channel)

    # Messages of the frontends.

    def _handle_frame(self, frontend: FrontendChannel, frame: Frame) -> None:
        """Handle a message. After an unexpected exception, its requests are refused and the loop continues."""
        work, handle = self._handlers[type(frame.message)]
        try:
            handle(frontend, frame, frame.message)
        except Exception as error:
            failure = self._errors.report(work, error)
            if isinstance(frame.message, RequestBlock):
                frontend.refuse(np.frombuffer(frame.tail, ID, frame.message.requests).tolist(), failure)
            elif not isinstance(frame.message, Cancel | Release):  # no reply to these is due
                frontend.send_refusal(frame.id, failure)

    def _handle_block(self, frontend: FrontendChannel, frame: Frame, message: RequestBlock) -> None:
        block_key = key_of(message.key)
        key = block_key.model
        served = self._engine.serves(key)
        if served:  # labels of other models would stay for ever
            waited = max(0.0, time.monotonic() - message.sent)
            self._metrics.stage_seconds.observe_often(waited, message.requests, *key.labels, "channel")
        divisible = served and self._engine.streams(key)
        self._batcher.submit(QueuedBlock.read(block_key, message, frame.tail, frontend, divisible=divisible))

    def _handle_cancel(self, frontend: FrontendChannel, frame: Frame, message: Cancel) -> None:
        self._batcher.cancel(frontend, frame.id)
        self._profiling.cancel(frontend.channel, frame.id)

    def _handle_record_trace(self, frontend: FrontendChannel, frame: Frame, message: RecordTrace) -> None:
        def reply(events: bytes) -> None:
            frontend.send(frame.id, encode(Done(), frame.id, (events,)))
            self._flush(frontend.channel)  # at once: the next event that wakes the loop may come late

        self._profiling.begin((frontend.channel, frame.id), message, reply, partial(frontend.send_refusal, frame.id))

    def _handle_release(self, frontend: FrontendChannel, frame: Frame, message: Release) -> None:
        self._models.release(frontend.channel, message.key)

    # Answers.

    def _flush(self, channel: Channel, backlog: float | None = None) -> None:
        """Write as much as the frontend accepts now; the rest leaves when the selector reports room.

        With answers goes the work left in this engine, and how many of the frontend's frames that includes, unless none was left before
        either. backlog: that work in predicted seconds, if it is known.
        """
        frontend = self._frontends.get(channel)
        if frontend is not None and frontend.answered:
            frontend.answered = False
            seconds = self._batcher.backlog_seconds() if backlog is None else backlog
            if seconds or frontend.backlog:
                channel.send(encode(Backlog(seconds, channel.frames_received)))
                frontend.backlog = seconds
        bytes_before, writes_before = channel.bytes_sent, channel.writes
        done = channel.flush()
        self._metrics.channel_bytes.add("engine", by=channel.bytes_sent - bytes_before)
        self._metrics.channel_writes.add("engine", by=channel.writes - writes_before)
        if not channel.open:
            self._forget(channel)
            return
        if done is (channel in self._blocked):
            (self._blocked.discard if done else self._blocked.add)(channel)
            self._selector.modify(channel, selectors.EVENT_READ | (0 if done else selectors.EVENT_WRITE))

    def _forget(self, channel: Channel) -> None:
        """The frontend has ended: cancel its requests."""
        frontend = self._frontends.pop(channel, None)
        if channel is self._store:
            self._store = None
            if self._batcher.sessions.stored is not None:
                self._batcher.sessions.stored.detach()
        elif frontend is None and channel is not self._control:
            return  # a write found the end before a read
        self._selector.unregister(channel)
        self._blocked.discard(channel)
        self._profiling.forget(channel)
        self._models.forget(channel)
        self._trials.detach(channel)
        if frontend is not None:
            self._batcher.cancel_owner(frontend)
        channel.close()


def _lag(message: Message) -> float:
    """Return how long requests have waited to be read. Other messages never wait too long."""
    return time.monotonic() - message.sent if isinstance(message, RequestBlock) else 0.0


def _patience(predicted_seconds: float) -> float:
    """Return how long a batch may take before it counts as hung."""
    return max(PATIENCE_SECONDS, HANG_FACTOR * predicted_seconds)
