"""Single requests in, batches out: every ticket is answered once, whatever fails. Nothing here knows HTTP, gRPC or CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from service.batching.scheduler import Scheduler
from service.engine.device import DeviceLost
from service.engine.flight import Encoded
from service.engine.turn import Chunk, Turn
from service.errors import DeadlineExceeded, InferenceFailed, InvalidInput, ServiceError, UnknownModel
from service.logs import Log
from service.metrics import Metrics
from service.sequence import Answer, ModelKey, Request

Reply = Callable[[Answer, list[bytes]], None]
Refuse = Callable[[ServiceError], None]
Watcher = Callable[[Turn, list[float]], None]


class Runs(Protocol):
    """What the batcher asks of an engine."""

    @property
    def takes_turn(self) -> bool: ...

    @property
    def remaining_seconds(self) -> float: ...

    def serves(self, key: ModelKey) -> bool: ...

    def backlog_seconds(self, model: ModelKey, rows: int, tokens: int) -> float: ...

    def launch(self, turn: Turn) -> None: ...

    def finished(self) -> list[tuple[Chunk, Encoded]]: ...


def _unwatched(turn: Turn) -> None:
    """Nobody waits for a sign of life."""


class Ticket:
    """One request's promise of one answer. It has ended once it was answered, refused or given up."""

    def __init__(self, request: Request, reply: Reply, refuse: Refuse) -> None:
        self.request = request
        self._reply = reply
        self._refuse = refuse
        self._encoded: dict[int, Encoded] = {}
        self.chunks: list[Chunk] = []
        self.ended = False

    def take(self, chunk: Chunk, encoded: Encoded) -> bool:
        """One sequence's result; true when it was the last one and the answer has left."""
        if self.ended:
            return False
        self._encoded[id(chunk)] = encoded
        if len(self._encoded) < len(self.chunks):
            return False
        ordered = [self._encoded[id(chunk)] for chunk in self.chunks]
        self._end()
        self._reply(*_answer(ordered))
        return True

    def refuse(self, error: ServiceError) -> None:
        if not self.ended:
            self._end()
            self._refuse(error)

    def give_up(self) -> None:
        """Its caller has gone; its batch-mates have not."""
        self._end()

    def _end(self) -> None:
        self.ended = True
        # Chunks know their ticket: apart, both go at once, and the collector has nothing to look for.
        self.chunks, self._encoded = [], {}


class Batcher:
    """The queue in front of one engine."""

    def __init__(self, scheduler: Scheduler, engine: Runs, metrics: Metrics, clock: Callable[[], float], log: Log) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._watcher: Watcher | None = None

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    def backlog_seconds(self) -> float:
        """What all that runs and waits is expected to take."""
        waiting = self._scheduler.waiting_by_model()
        return self._engine.remaining_seconds + sum(self._engine.backlog_seconds(*one) for one in waiting)

    def submit(self, request: Request, data: bytes, reply: Reply, refuse: Refuse) -> Ticket:
        """Queue a request; what cannot be queued is refused at once, through `refuse`."""
        ticket = Ticket(request, reply, refuse)
        try:
            self._check(request)
            ticket.chunks = list(_chunks(request, data, ticket))
            self._scheduler.add(
                request.key, ticket.chunks, now=self._clock(), deadline=request.deadline, priority=request.priority
            )
        except ServiceError as error:
            self._metrics.refused.add(error.code)
            ticket.refuse(error)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The caller went away: what waits leaves the queue now, what runs is thrown away at the end of its turn."""
        if ticket.ended:
            return
        self._metrics.cancelled.add("waiting" if self._scheduler.drop(ticket) else "running")
        ticket.give_up()

    def watch(self, watcher: Watcher | None) -> None:
        """Have each turn told from now on before it is launched, with when each of its sequences came."""
        self._watcher = watcher

    def step(self, before_launch: Callable[[Turn], None] = _unwatched) -> bool:
        """One turn, if the engine takes one now: who is too late, who runs, who has his answer. `before_launch` hears of it. False when
        nothing was launched."""
        launched = self._engine.takes_turn and self._launch_next(before_launch)
        for chunk, encoded in self._engine.finished():
            ticket: Ticket = chunk.owner
            if ticket.take(chunk, encoded):
                self._metrics.sequences.add(*ticket.request.key, by=len(ticket.request.lengths))
        return launched

    def _launch_next(self, before_launch: Callable[[Turn], None]) -> bool:
        """False when nothing waits that can still be in time."""
        self._refuse_late()
        taken = self._scheduler.next_turn()
        if taken is None:
            return False
        turn, arrivals = taken
        now = self._clock()
        for arrived in arrivals:
            self._metrics.stage_seconds.observe(now - arrived, *turn.model, "queue")
        if self._watcher is not None:
            self._watcher(turn, arrivals)
        self._run(turn, before_launch)
        return True

    def _check(self, request: Request) -> None:
        if not self._engine.serves(request.key):
            raise UnknownModel(f"the engine does not serve {request.model} version {request.version}", field="model")
        if not request.lengths or min(request.lengths) < 1:
            raise InvalidInput("a request has at least one sequence, and a sequence at least one step", field="inputs")
        if request.deadline <= self._clock():
            raise DeadlineExceeded("the deadline had passed when the request reached the engine: allow it more time")

    def _refuse_late(self) -> None:
        for chunk in self._scheduler.drop_late(self._clock()):
            ticket: Ticket = chunk.owner
            if not ticket.ended:
                self._metrics.refused.add(DeadlineExceeded.code)
                ticket.refuse(DeadlineExceeded("the deadline passed in the queue: allow it more time, or send fewer requests"))

    def _run(self, turn: Turn, before_launch: Callable[[Turn], None]) -> None:
        """A turn that fails is run again row by row, so that only the row at fault pays; without the device, none can be."""
        before_launch(turn)
        try:
            self._engine.launch(turn)
        except DeviceLost:
            raise
        except Exception as fault:
            if turn.rows > 1:
                for chunk in turn.chunks:
                    if not chunk.owner.ended:
                        self._run(Turn(turn.model, [chunk]), before_launch)
                return
            ticket: Ticket = turn.chunks[0].owner
            if not ticket.ended:
                ticket.refuse(self._blamed(turn.model, fault))
                self._scheduler.drop(ticket)

    def _blamed(self, model: ModelKey, fault: Exception) -> ServiceError:
        """What the caller of a row that cannot be run is told."""
        if isinstance(fault, ServiceError):
            self._metrics.refused.add(fault.code)
            return fault
        said = f"{type(fault).__name__}: {fault}"
        self._metrics.failed.add(*model)
        self._log.error("model raised", model=model.name, version=model.version, error=said)
        return InferenceFailed(f"the model raised {said}")


def _chunks(request: Request, data: bytes, ticket: Ticket) -> Iterator[Chunk]:
    view, at = memoryview(data), 0
    step_bytes = len(data) // sum(request.lengths)
    for steps in request.lengths:
        yield Chunk(view[at : at + steps * step_bytes], steps, request.returns, ticket)
        at += steps * step_bytes


def _answer(encoded: list[Encoded]) -> tuple[Answer, list[bytes]]:
    """The arrays of one answer, sequence after sequence, and their shapes."""
    shapes, data = {}, []
    for name in ("scores", "picks", "embedding", "sequence"):
        parts = [array for one in encoded if (array := getattr(one, name)) is not None]
        if parts:
            shapes[name] = (sum(len(part) for part in parts), *parts[0].shape[1:])
            data += [part.tobytes() for part in parts]
    return Answer(**shapes, steps=[one.steps for one in encoded]), data
