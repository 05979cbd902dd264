"""The engine process of a story, which runs in the process of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from service.engine.batch import Batch, Chunk
from service.engine.batching.batcher import Batcher
from service.engine.batching.request_block import RequestBlock
from service.engine.batching.session_table import SessionTable
from service.engine.execution.in_flight import FinishedPart
from service.engine.internal_errors import InternalErrors
from service.engine.loading import ModelLoader
from service.engine.trials import Trials
from service.engine.worker import Worker
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc import messages
from service.ipc.channel import Channel, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages import ModelKey
from service.ipc.session_journal import SessionJournal
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching.harness import IDLE_SECONDS, MODEL, AsynchronousEngine, ids, limits

MARKED = 1_000_000
MARK = ids([[MARKED]])
"""The value of each step of the marked request."""
PLACE = 0


class World(Protocol):
    """The story, as its engines see it. log: the descriptor of their log."""

    batches_end: bool
    model_fails: bool
    journal: SessionJournal
    dispatcher: Dispatcher
    log: int

    def at(self, point: str) -> None:
        """Note that a request has reached a point."""

    def clock(self) -> float: ...


class StoryEngine(AsynchronousEngine):
    """A device. The story decides when batches end, and when batches with the marked request fail."""

    running = (0.0, 0.0)

    def __init__(self, story: World) -> None:
        super().__init__()
        self._story = story

    def launch(self, batch: Batch) -> None:
        self._story.at("launching")
        if any(map(self._fails, batch.blocks)) or any(map(self._fails, batch.chunks)):
            raise ValueError("the model fails")
        super().launch(batch)
        self._story.at("launched")

    def finished(self) -> list[FinishedPart]:
        if self._story.batches_end:
            self.end()
        parts: list[Any] = super().finished()
        if parts:
            self._story.at("ended")
        return [(part, result._replace(scores="broken") if self._fails(part) else result) for part, result in parts]

    def runs(self, key: ModelKey) -> bool:
        return self.busy

    def _fails(self, part: RequestBlock | Chunk) -> bool:
        """Return whether a part of a batch has the values of the marked request, which no other request has, and the model fails."""
        data = part.columns.values if isinstance(part, RequestBlock) else part.data
        return self._story.model_fails and MARK in bytes(data)


class EngineProcess:
    """A worker on a device, as a process would have it."""

    def __init__(self, story: World, served: bool) -> None:
        self.engine = StoryEngine(story)
        if not served:
            self.engine.served.remove(MODEL)
        self.metrics = Metrics()
        clock = story.clock
        sessions = SessionTable(8, IDLE_SECONDS, story.journal, self.metrics)
        errors = InternalErrors(Log("engine", story.log), self.metrics, clock)
        self.batcher = Batcher(
            limits(max_batch_sequences=3, max_batch_tokens=7), self.engine, sessions, self.metrics, clock, errors
        )
        models = ModelLoader(self.engine, self.batcher, _nothing_is_loaded, Log("engine", story.log), clock)
        near, far = pair()
        self.supervisor, control = Channel(near), Channel(far)
        self._sockets = [self.supervisor, control]
        self.heartbeat = Heartbeat()
        self.worker = Worker(
            control, self.heartbeat, self.batcher, self.engine, models, Trials(control), PLACE, self.metrics, errors
        )
        self._watch(story.at)
        near, far = pair()
        self.supervisor.send(encode(messages.Attach()), attached=far)
        far.close()
        self.supervisor.flush()
        story.dispatcher.attach(Channel(near))

    def unload(self) -> None:
        self.supervisor.send(encode(messages.CloseModel(MODEL, 0.0)))
        self.supervisor.flush()

    def end(self) -> None:
        """Close all descriptors, as the system does for a process that ends."""
        for channel in (*self.worker._frontends, *self._sockets):
            channel.close()
        self.worker._selector.close()
        self.heartbeat.close()

    def held(self) -> list[str]:
        """Return the resources that are held for requests."""
        self.batcher.count()
        tickets = sum(len(frontend.tickets) for frontend in self.worker._frontends.values())
        slots = sum(values[0] for values in self.metrics.state_slots_used.values.values())
        figures = {"tickets": tickets, "running": len(self.batcher._running), "slots": slots, "waiting": self.batcher.waiting}
        figures |= {"queued": not self.batcher.idle, "in flight": self.engine.busy}
        return [f"the engine holds {figure} {name}" for name, figure in figures.items() if figure]

    def _watch(self, at: Callable[[str], None]) -> None:
        """Call `at` at the points of the engine."""
        worker = self.worker
        handle, flush = worker._handle_frame, worker._flush
        answer, send_block = worker._answer, worker.send_block

        def handling(channel: Channel, frame: Any) -> None:
            is_request = isinstance(frame.message, (messages.Request, messages.RequestBlock))
            if is_request:
                at("received")
            handle(channel, frame)
            if is_request:
                at("queued")

        def flushing(channel: Channel) -> None:
            answers = channel in worker._answered
            flush(channel)
            if answers:
                at("answered")

        def answering(*arguments: Any) -> None:
            at("answering")
            answer(*arguments)

        def answering_block(*arguments: Any) -> None:
            at("answering")
            send_block(*arguments)

        worker._handle_frame, worker._flush = handling, flushing  # type: ignore[method-assign]
        worker._answer, worker.send_block = answering, answering_block  # type: ignore[method-assign,assignment]


def _nothing_is_loaded(*_: object) -> Any:
    raise AssertionError("nothing is loaded")
