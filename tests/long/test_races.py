"""Two events race for one request, each at a named point of its way through a frontend and an engine.

Dispatcher, channel, worker and batcher are the real objects, in one thread and on a clock that the story moves. The device is a fake, and
the story decides when a batch ends. A story sends a marked request, which the events concern, and some more. In the end every request must
have exactly one outcome, and hold no resource any more.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np

from service.engine.batch import Batch
from service.engine.batching.batcher import Batcher
from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.session_table import SessionTable
from service.engine.batching.state_cache import StateCache
from service.engine.execution.in_flight import BlockResult, FinishedBatch
from service.engine.internal_errors import InternalErrors
from service.engine.loading import ModelLoader
from service.engine.trials import TrialReports
from service.engine.worker import Worker
from service.errors import ServiceError
from service.frontend.dispatch.connection import PendingRequest
from service.frontend.dispatch.dispatcher import Dispatcher
from service.ipc.channel import Channel, encode, pair
from service.ipc.heartbeat import Heartbeat
from service.ipc.messages.control import Attach, CloseModel
from service.ipc.messages.inference import FEATURES, Answer, AnswerBlock, RefusalBlock, Request, RequestBlock
from service.ipc.messages.message import Refusal
from service.ipc.messages.models import ModelKey
from service.ipc.session_journal import SessionJournal
from service.log import Log
from service.metrics import Metrics
from tests.engine.batching.harness import IDLE_SECONDS, LIMITS, MODEL, AsynchronousEngine, ids
from tests.frontend.http2.peer import ClockLoop
from tests.long import scaled

POINTS = (
    *("parsed", "sent", "received", "queued", "launching", "launched"),
    *("ended", "answering", "answered", "returned", "replying", "replied"),
)
"""The way of a request: it is about to be sent to the engine, was written to the channel, was read, and is in the queue; its batch is about
to start, has started, and has ended; its answer is about to be written, was written, and has arrived; its client is about to get it, and
has got it."""
At = Callable[[str], None]
FRONTEND_POINTS = ("parsed", "sent", "returned", "replying", "replied")


CODES = {
    "cancel": {"cancelled"},
    "deadline": {"deadline_exceeded"},
    "answer": {"ok"},
    "error": {"inference_failed"},
    "lost": {"engine_lost", "session_lost"},
    "unload": {"unknown_model", "session_lost"},
}
"""The outcomes that each event may have. Without an event a request is answered."""
REPLIES = (AnswerBlock, Refusal, RefusalBlock)


def report(
    at: At, owner: Any, name: str, before: str = "", after: str = "", when: Callable[..., Any] = lambda *_: True
) -> None:
    """Let a method call `at` with a point before and after it runs, where `when` is true of its arguments."""
    method = getattr(owner, name)

    def reporting(*arguments: Any) -> Any:
        is_reported = when(*arguments)
        if before and is_reported:
            at(before)
        result = method(*arguments)
        if after and is_reported:
            at(after)
        return result

    setattr(owner, name, reporting)


# The engine process of a story, which runs in the process of the test.

MARKED = 1_000_000
MARK = ids([[MARKED]])
"""The value of each step of the marked request."""
PLACE = 0


class StoryEngine(AsynchronousEngine):
    """A device. The story decides when batches end, and when batches with the marked request fail."""

    running = (0.0, 0.0)

    def __init__(self, story: Story) -> None:
        super().__init__()
        self._story = story

    def launch(self, batch: Batch) -> None:
        self._story.at("launching")
        if any(map(self._fails, batch.blocks)):
            raise ValueError("the model fails")
        super().launch(batch)
        self._story.at("launched")

    def finished(self) -> list[FinishedBatch]:
        while self._story.batches_end and self._launched:
            self.end_batch()
        batches = super().finished()
        if batches:
            self._story.at("ended")
        return [batch._replace(results=list(map(self._result, batch.batch.blocks, batch.results))) for batch in batches]

    def _result(self, block: QueuedBlock, result: BlockResult) -> BlockResult:
        broken: Any = "broken"
        return result._replace(scores=broken) if self._fails(block) else result

    def runs(self, key: ModelKey) -> bool:
        return self.busy

    def _fails(self, block: QueuedBlock) -> bool:
        """Return whether a block has the values of the marked request, which no other request has, and the model fails."""
        return self._story.model_fails and MARK in bytes(block.columns.values)


class EngineProcess:
    """A worker on a device, as a process would have it."""

    def __init__(self, story: Story, served: bool) -> None:
        self.engine = StoryEngine(story)
        if not served:
            self.engine.served.remove(MODEL)
        self.metrics = Metrics()
        clock = story.clock
        self.states = StateCache(self.engine, self.metrics)
        sessions = SessionTable(8, IDLE_SECONDS, story.journal, self.metrics, self.states)
        errors = InternalErrors(Log("engine", story.log), self.metrics, clock)
        self.batcher = Batcher(
            replace(LIMITS, max_batch_sequences=3, max_batch_tokens=7), self.engine, sessions, self.metrics, clock, errors
        )
        models = ModelLoader(self.engine, self.batcher, _nothing_is_loaded, Log("engine", story.log), clock)
        near, far = pair()
        self.supervisor, control = Channel(near), Channel(far)
        self._sockets = [self.supervisor, control]
        self.heartbeat = Heartbeat()
        self.worker = Worker(
            control, self.heartbeat, self.batcher, self.engine, models, TrialReports(control), PLACE, self.metrics, errors
        )
        worker = self.worker
        report(
            story.at, worker, "_handle_frame", "received", "queued", lambda _, frame: isinstance(frame.message, RequestBlock)
        )
        frontends = worker._frontends
        report(
            story.at,
            worker,
            "_flush",
            after="answered",
            when=lambda channel, *_: channel in frontends and frontends[channel].answered,
        )
        report(story.at, self.batcher._runs, "_answer", "answering")
        near, far = pair()
        self.supervisor.send(encode(Attach()), attached=far)
        far.close()
        self.supervisor.flush()
        story.dispatcher.attach(Channel(near))

    def unload(self) -> None:
        self.supervisor.send(encode(CloseModel(MODEL, 0.0)))
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
        runs, handles = self.batcher._runs, len(self.states.pending) - len(self.states._free_handles)
        slots = sum(values[0] for values in self.metrics.state_slots_used.values.values())
        figures = {"running": len(runs._running), "begun": len(runs._assemblies), "slots": slots, "handles": handles}
        figures |= {"waiting": self.batcher.waiting, "queued": not self.batcher.idle, "in flight": self.engine.busy}
        return [f"the engine holds {figure} {name}" for name, figure in figures.items() if figure]


def _nothing_is_loaded(*_: object) -> Any:
    raise AssertionError("nothing is loaded")


# Stories of a marked request, some other requests, and two events.

PATIENT_SECONDS, IMPATIENT_SECONDS = 3600.0, 10.0
TICKS, TURNS, LATER, RESTART = 4, 34, 12, 3
"""Ticks of the frontend between two turns of the engine, turns in a story, the turn in which events that wait for an end happen
at last, and how often an engine that ended is replaced."""
MAX_STEPS = 20
CHANNEL_BYTES = 1 << 20


class Ended(BaseException):
    """The engine process has ended, at once and without a word."""


@dataclass
class Client:
    """The receiver of one request: its outcomes, and how often the request was released."""

    values: list[int]
    at: Callable[[str], None]
    outcomes: list[str] = field(default_factory=list)
    releases: int = 0
    pending: PendingRequest | None = None
    gone: bool = False

    def answered(self, answer: Answer, data: bytes | memoryview) -> None:
        scores = np.frombuffer(data, FEATURES, int(np.prod(answer.scores))).reshape(answer.scores)
        self._note("ok" if scores[0, 0] == sum(self.values) else f"a sum of {scores[0, 0]}")

    def failed(self, error: ServiceError) -> None:
        self._note(error.code)

    def _note(self, outcome: str) -> None:
        self.at("replying")
        self.outcomes.append(outcome)
        self.at("replied")

    def released(self) -> None:
        self.releases += 1

    def leave(self, dispatcher: Dispatcher) -> None:
        """Disconnect, before or after the request is sent."""
        self.gone = True
        if self.pending is not None:
            if not self.pending.done:
                self.outcomes.append("cancelled")
            dispatcher.cancel(self.pending)


class Story:
    """A marked request, some other requests, and two events, each at a point. The second event is never earlier than the first event."""

    def __init__(self, first: str, second: str, seed: int, log: int) -> None:
        """log: the descriptor of the log."""
        chance = random.Random(f"{first} {second} {seed}")
        places = sorted(chance.choices(range(len(POINTS)), k=2))
        if seed % 3 == 0:
            places[1] = places[0]
        self.plan = [(POINTS[place], event) for place, event in zip(places, (first, second), strict=True)]
        self._described = " and ".join(f"{event} at {point}" for point, event in self.plan)
        self.events = {first, second}
        self.happened: set[tuple[str, str]] = set()
        self.log = log
        self.journal = SessionJournal(16)
        self._chance = chance
        self._numbers = count(1)
        self.batches_end = self.model_fails = False
        self.loop = ClockLoop()
        self._raised: list[str] = []
        """Exceptions in callbacks of the frontend."""
        self.loop.set_exception_handler(lambda _, context: self._raised.append(repr(context.get("exception"))))
        self.engines: list[EngineProcess] = []
        self.clients: list[Client] = []
        self.marked: Client | None = None
        self._unloaded = self._in_engine = False
        self.kind = ""

    def __str__(self) -> str:
        return f"{self._described}, {self.kind}: {[client.outcomes for client in self.clients]}"

    def clock(self) -> float:
        return self.loop.now

    def run(self) -> list[str]:
        """Run the story to its end. Returns the faults."""
        try:
            return [f"{self}: {fault}" for fault in self.loop.run_until_complete(self._run())]
        finally:
            for engine in self.engines:
                engine.end()
            self.dispatcher.close()
            self.journal.close()
            self.loop.close()

    async def _run(self) -> list[str]:
        self.dispatcher = Dispatcher(Metrics(), CHANNEL_BYTES, lambda: None, 1, self.clock)
        self._start_engine()
        while not self.dispatcher.ready:
            await self._turn()
        kinds = ["block", "long", "session"]
        self.kind = self._chance.choice(kinds)
        self._send(self.kind, marked=True)
        for _ in range(self._chance.randint(0, 3)):
            self._send(self._chance.choice(kinds))
        for turn in range(TURNS):
            if turn == LATER:
                self._finish_plan()
            if not self.engines and turn % RESTART == 0:
                self._start_engine()
            await self._turn()
        # Sessions that are still open belong to clients that may come back.
        self.loop.now += 2 * IDLE_SECONDS
        await self._turn()
        return [*self._wrong_outcomes(), *self.engines[-1].held(), *self._held_by_frontend()]

    # Events.

    def at(self, point: str) -> None:
        """A request has reached a point: let the events happen that are planned there."""
        self._in_engine = point not in FRONTEND_POINTS
        while self.plan and self.plan[0][0] == point:
            _, event = self.plan.pop(0)
            self.happened.add((event, point))
            self._happen(event)

    def _finish_plan(self) -> None:
        """Let all batches end, and the events happen whose point was never reached."""
        self._in_engine = False
        while self.plan:
            self._happen(self.plan.pop(0)[1])
        self.batches_end = True

    def _happen(self, event: str) -> None:
        assert self.marked is not None
        engine = self.engines[-1] if self.engines else None
        match event:
            case "cancel":
                self.marked.leave(self.dispatcher)
            case "deadline":
                self.loop.now += 2 * IMPATIENT_SECONDS
            case "unload" if not self._unloaded:
                self._unloaded = True
                self.dispatcher.release(MODEL)
                if engine is not None:
                    engine.unload()
            case "answer":
                self.batches_end = True
            case "error":
                self.model_fails = True
            case "lost" if engine is not None:
                self.engines.remove(engine)
                engine.end()
                if self._in_engine:
                    raise Ended

    # Processes.

    def _start_engine(self) -> None:
        self.engines.append(EngineProcess(self, served=not self._unloaded))
        channel: Any = self.dispatcher._connections[-1]._channel
        report(self.at, channel, "_on_frame", "returned", when=lambda frame: isinstance(frame.message, REPLIES))
        report(self.at, channel, "_on_written", after="sent", when=lambda size, _: size)

    async def _turn(self) -> None:
        """Let the frontend run for some ticks, and the engine once."""
        for _ in range(TICKS):
            await asyncio.sleep(0)
        if self.engines:
            with suppress(Ended):
                self.engines[-1].worker.run_once()

    def _send(self, kind: str, *, marked: bool = False) -> None:
        """Send a request. marked: the events concern it."""
        steps = self._chance.randint(8, MAX_STEPS) if kind == "long" else self._chance.randint(1, 3)
        values = [MARKED if marked else 1 + self._chance.randrange(9)] * steps
        client = Client(values, self.at)
        self.clients.append(client)
        if marked:
            self.marked = client
        session = f"session {next(self._numbers)}" if kind == "session" else None
        now = self.clock()
        seconds = IMPATIENT_SECONDS if marked else PATIENT_SECONDS
        ends = bool(session) and self._chance.random() < 0.5
        sent = Request(*MODEL.labels, [steps], now + seconds, now, session=session, session_ends=ends)
        self.at("parsed")
        try:
            client.pending = self.dispatcher.send(sent, ids([values]), client, client.released)
        except ServiceError as error:
            client.failed(error)
            client.released()
            return
        if client.gone:
            client.leave(self.dispatcher)

    # Checks at the end.

    def _wrong_outcomes(self) -> list[str]:
        allowed = {"ok"} | {code for event in self.events for code in CODES[event]}
        wrong = [
            f"the outcomes {client.outcomes} and {client.releases} releases of a request"
            for client in self.clients
            if len(client.outcomes) != 1 or not set(client.outcomes) <= allowed or client.releases != 1
        ]
        errors = sum(values[0] for values in self.engines[-1].metrics.engine_errors.values.values())
        unexplained = [f"{errors:.0f} errors in the engine"] if errors and "error" not in self.events else []
        return wrong + unexplained + self._raised

    def _held_by_frontend(self) -> list[str]:
        dispatcher = self.dispatcher
        [connection] = dispatcher._connections
        held = {"requests": dispatcher.has_requests_of(MODEL), "bytes": connection.pending_bytes}
        held |= {"deadlines": len(dispatcher._deadlines._slots), "predicted seconds": len(connection.wait._prices)}
        return [f"the frontend holds {figure} {name}" for name, figure in held.items() if figure]


SEEDS = 200


def test_every_request_has_one_outcome_and_one_release_over_many_seeds(tmp_path: Path, show: Callable[[object], None]) -> None:
    """Of all ordered pairs of events, each for some seeds. Each event happens at each point."""
    outcomes, happened, faults = Counter[str](), set[tuple[str, str]](), list[str]()
    with (tmp_path / "log").open("w") as log:
        for first, second, seed in product(CODES, CODES, range(scaled(SEEDS, 60))):
            story = Story(first, second, seed, log.fileno())
            faults += story.run()
            assert story.marked is not None
            outcomes.update(story.marked.outcomes)
            happened |= story.happened
    show(dict(outcomes))
    assert faults == []
    assert happened == set(product(CODES, POINTS))
