"""Single requests in, batches out: every ticket is answered once, whatever fails. Nothing here knows HTTP, gRPC or CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from service.engine import session_state as states_of
from service.engine.batch import Batch, Chunk
from service.engine.batching.scheduler import Cut, Limits, Scheduler
from service.engine.batching.sessions import Sessions
from service.engine.batching.state_cache import Keeps, States
from service.engine.batching.ticket import Refuse, Reply, Row, Session, Ticket
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import DeviceLost
from service.engine.execution.in_flight import ChunkResult
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    ServiceError,
    SessionConflict,
    SessionLost,
    UnknownModel,
)
from service.ipc.messages import ZEROS, ModelKey, Request
from service.log import Log
from service.metrics import Metrics
from service.modeling.spec import ModelSpec

Watcher = Callable[[Batch, list[float]], None]


class Runs(Keeps, Protocol):
    """What the batcher asks of an engine."""

    @property
    def accepts_batch(self) -> bool: ...

    @property
    def remaining_seconds(self) -> float: ...

    def serves(self, key: ModelKey) -> bool: ...

    def newest(self, name: str, version: str) -> ModelKey | None: ...

    def runs(self, key: ModelKey) -> bool: ...

    def streams(self, key: ModelKey) -> bool: ...

    def spec(self, key: ModelKey) -> ModelSpec: ...

    def cost(self, key: ModelKey) -> Cost: ...

    def launch(self, batch: Batch) -> None: ...

    def finished(self) -> list[tuple[Chunk, ChunkResult]]: ...


def _unwatched(batch: Batch) -> None:
    """Nobody waits for a sign of life."""


class Batcher:
    """The queue in front of one engine, and the sessions in it."""

    def __init__(
        self, limits: Limits, engine: Runs, sessions: Sessions, metrics: Metrics, clock: Callable[[], float], log: Log
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._states = States(engine, metrics)
        self._scheduler = Scheduler[Row](limits, engine.cost, self._states.room)
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._watcher: Watcher | None = None

    @property
    def waiting(self) -> int:
        """Sequences of which nothing has run."""
        return self._scheduler.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be launched."""
        return not self._scheduler.waiting and not self._scheduler.begun

    def backlog_seconds(self) -> float:
        """What all that runs and waits is expected to take."""
        return self._engine.remaining_seconds + self._scheduler.backlog_seconds()

    def count(self) -> None:
        """Bring the gauges up to date."""
        self._metrics.queue_depth.set(self._scheduler.waiting)
        waiting = self._metrics.sequences_waiting
        for labels in waiting.values:
            waiting.set(0.0, *labels)
        for model, count in self._scheduler.waiting_by_model().items():
            waiting.add(*model.labels, by=count)
        self._metrics.sequences_begun.set(self._scheduler.begun)
        self._metrics.sessions.set(len(self._sessions))
        self._states.count()

    # Requests.

    def submit(self, request: Request, data: bytes, reply: Reply, refuse: Refuse, *, again: bool = False) -> Ticket:
        """Queue a request; what cannot be queued is refused at once, through `refuse`. again: another engine ended while it had it."""
        ticket = Ticket(request, reply, refuse)
        try:
            self._check(request, ticket.key, again)
            self._queue(ticket, data, again)
        except ServiceError as error:
            if not (isinstance(error, SessionConflict) and error.elsewhere):  # else it comes again
                self._metrics.refused.add(error.code)
            ticket.refuse(error)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The caller went away: what waits leaves the queue now, what runs is thrown away at the end of its turn."""
        if ticket.ended:
            return
        self._metrics.cancelled.add("running" if any(row.launched for row in ticket.rows) else "waiting")
        self._let_go(ticket)
        ticket.give_up()

    def watch(self, watcher: Watcher | None) -> None:
        """Have each turn told from now on before it is launched, with when each of its sequences came."""
        self._watcher = watcher

    def step(self, before_launch: Callable[[Batch], None] = _unwatched) -> bool:
        """One turn, if the engine takes one now: who is too late, who runs, who has his answer. `before_launch` hears of it. False when
        nothing was launched."""
        launched = self._engine.accepts_batch and self._launch_next(before_launch)
        for chunk, encoded in self._engine.finished():
            row: Row = chunk.owner
            if not row.ticket.ended and row.take(encoded):
                self._finish(row)
        self._expire()
        return launched

    def _check(self, request: Request, key: ModelKey, again: bool) -> None:
        if not self._engine.serves(key):
            if again and request.session is not None:
                # Its version went with the engine that had it: of the two, that the state is lost is what its caller has to know.
                self._sessions.going_on(request, again)
            raise UnknownModel(f"the engine does not serve {request.model} version {request.version}", field="model")
        if not request.lengths or min(request.lengths) < 1:
            raise InvalidInput("a request has at least one sequence, and a sequence at least one step", field="inputs")
        if request.deadline <= self._clock():
            raise DeadlineExceeded("the deadline had passed when the request reached the engine: allow it more time")
        if request.session is not None:
            self._check_chunk(request)

    def _check_chunk(self, request: Request) -> None:
        if len(request.lengths) != 1:
            raise InvalidInput(f"{len(request.lengths)} inputs for one session: send its chunks one by one", field="inputs")
        if not self._engine.streams(request.key):
            raise InvalidInput(
                f"{request.model} sees the whole of a sequence before it answers and has no sessions: leave session out",
                field="session",
            )

    def _queue(self, ticket: Ticket, data: bytes, again: bool) -> None:
        request = ticket.request
        session = None if request.session is None else self._session(request, again)
        rows = _rows(ticket, data, session, cuts=self._engine.streams(ticket.key))
        try:
            self._scheduler.add(ticket.key, rows, now=self._clock(), busy=self._engine.remaining_seconds)
        except ServiceError:
            if session is not None:
                self._leave(session)
            raise
        ticket.open(rows)
        if session is not None:
            rows[0].ready = not session.rows
            session.rows.append(rows[0])
            self._sessions.wake(session)

    def _launch_next(self, before_launch: Callable[[Batch], None]) -> bool:
        """False when nothing waits that can run and still be in time."""
        now = self._clock()
        for row in self._scheduler.drop_late(now):
            if not row.ticket.ended:
                late = DeadlineExceeded("the deadline passed in the queue: allow it more time, or send fewer requests")
                self._turn_away(row.ticket, late)
        taken = self._scheduler.next_batch()
        if taken is None:
            return False
        model, cuts = taken
        for cut in cuts:
            if cut.first:
                self._metrics.stage_seconds.observe(now - cut.of.arrived, *model.labels, "queue")
        batch = Batch(model, [self._chunk(model, cut) for cut in cuts], min([cut.of.arrived for cut in cuts]))
        if self._watcher is not None:
            self._watcher(batch, [cut.of.arrived for cut in cuts])
        self._run(batch, before_launch)
        return True

    def _chunk(self, model: ModelKey, cut: Cut[Row]) -> Chunk:
        """Most sequences are run whole, and need no place."""
        row = cut.of
        if cut.first and cut.last and row.session is None:
            row.launched = 1
            return Chunk(row.data, cut.steps, row.ticket.request.returns, row)
        return self._states.chunk(model, cut)

    def _run(self, batch: Batch, before_launch: Callable[[Batch], None]) -> None:
        """A turn that fails is run again row by row, so that only the row at fault pays; without the device, none can be."""
        before_launch(batch)
        try:
            self._engine.launch(batch)
        except DeviceLost:
            raise
        except Exception as fault:
            if batch.rows > 1:
                for chunk in batch.chunks:
                    if not chunk.owner.ticket.ended:
                        self._run(Batch(batch.model, [chunk]), before_launch)
                return
            ticket: Ticket = batch.chunks[0].owner.ticket
            if not ticket.ended:
                self._refuse(ticket, self._blamed(batch.model, fault))
            return
        for chunk in batch.chunks:
            if chunk.owner.source is not None:
                self._states.launched(chunk.owner)

    def _blamed(self, model: ModelKey, fault: Exception) -> ServiceError:
        """What the caller of a row that cannot be run is told."""
        if isinstance(fault, ServiceError):
            self._metrics.refused.add(fault.code)
            return fault
        said = f"{type(fault).__name__}: {fault}"
        self._metrics.failed.add(*model.labels)
        self._log.error("model raised", model=model.name, version=model.version, error=said)
        return InferenceFailed(f"the model raised {said}")

    def _finish(self, row: Row) -> None:
        """All steps of a row have run."""
        ticket = row.ticket
        steps = 0 if row.session is None else self._advance(row, row.session)
        if ticket.row_done():
            self._metrics.sequences.add(*ticket.key.labels, by=len(ticket.rows))
            ticket.answer(steps)

    def _turn_away(self, ticket: Ticket, error: ServiceError) -> None:
        """Refuse what no turn was to blame for."""
        self._metrics.refused.add(error.code)
        self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: ServiceError) -> None:
        self._let_go(ticket)
        ticket.refuse(error)

    def _let_go(self, ticket: Ticket) -> None:
        """Nothing of it runs any more; of a chunk of a session, nothing has."""
        self._scheduler.drop(ticket.rows)
        for row in ticket.rows:
            self._states.release(row)
            if row.session is not None:
                self._skip(row, row.session)

    # Sessions.

    def export(self, id: str) -> bytes:
        """The state of a session as a safetensors file; raises ServiceError."""
        session = self._sessions.get(id)
        if session.rows:
            raise SessionConflict(f"a chunk of session {id!r} is still to run: wait for its answer", field="session")
        state = self._states.read(session.held)
        assert state is not None, "a session without a chunk has been answered once"
        return states_of.pack(state, self._origin(session.key, session.steps))

    def adopt(self, id: str, data: bytes) -> None:
        """Open a session with a state that `export` gave; raises ServiceError."""
        if self._sessions.find(id) is not None:
            raise SessionConflict(f"session {id!r} is open: delete it first, or name another", field="session")
        state, origin = states_of.unpack(data)
        key = self._engine.newest(origin.model, origin.version)
        if key is None or not self._engine.streams(key):
            raise SessionConflict(
                f"the state is of {origin.model!r:.100} version {origin.version!r:.100}, which has no sessions here",
                field="session",
            )
        states_of.check(state, self._engine.save(key, ZEROS), origin, self._origin(key, origin.steps))
        session = self._sessions.open(id, key)
        session.held.cold, session.steps = state, origin.steps
        self._sessions.rest(session, self._clock())

    def model_of(self, id: str) -> ModelKey | None:
        """Of which version a session is, if it is open."""
        session = self._sessions.find(id)
        return None if session is None else session.key

    def end(self, id: str) -> None:
        """End a session; chunks of it that have not run are refused. Raises ServiceError when it is not open."""
        self._end(self._sessions.get(id), "deleted")

    def lose_sessions(self, key: ModelKey) -> None:
        """Those of a version that is served no longer: chunks that wait are refused, and whoever else goes on with one is told once."""
        for session in self._sessions.of(key):
            if session.rows:
                self._end(session, "unloaded", SessionLost)
            else:
                self._states.forget(session.held)
                self._sessions.lose(session)

    def has(self, key: ModelKey) -> bool:
        """Whether anything of this version is left: a session, or something that waits or runs."""
        return self._scheduler.holds(key) or self._engine.runs(key) or bool(self._sessions.of(key))

    def close(self, key: ModelKey) -> None:
        """Nothing of this version is left, and nothing comes."""
        self._states.close(key)

    def _session(self, request: Request, again: bool) -> Session:
        """The session of which a request is a chunk; raises what became of it."""
        id = request.session
        assert id is not None
        if request.session_starts and (old := self._sessions.find(id)) is not None:
            self._end(old, "restarted")
        found = self._sessions.going_on(request, again)
        return found or self._sessions.open(id, request.key)

    def _advance(self, row: Row, session: Session) -> int:
        """A chunk has run: how many steps its session has had now."""
        session.steps += sum(part.steps for part in row.parts)
        session.rows.popleft()
        if not row.keeps:
            self._states.release(row)
            self._states.forget(session.held)
            self._sessions.close(session, "ended")
        else:
            self._states.keep(row)
            if session.rows:
                session.rows[0].ready = True
            else:
                self._sessions.rest(session, self._clock())
        return session.steps

    def _skip(self, row: Row, session: Session) -> None:
        """A chunk does not run, and so none can that came after it."""
        if row not in session.rows:
            return
        place = session.rows.index(row)
        behind = list(session.rows)[place + 1 :]
        while len(session.rows) > place:
            session.rows.pop()
        for one in behind:
            said = f"a chunk of session {session.id!r} that came before this one was not run: send both again, in their order"
            self._turn_away(one.ticket, SessionConflict(said, field="session"))
        self._leave(session)

    def _leave(self, session: Session) -> None:
        """A chunk has gone: a session without any is idle, or was never begun."""
        if session.rows:
            return
        if session.steps:
            self._sessions.rest(session, self._clock())
        else:
            self._sessions.close(session, "unbegun")

    def _end(self, session: Session, reason: str, kind: type[ServiceError] = SessionConflict) -> None:
        behind, session.rows = list(session.rows), type(session.rows)()
        for row in behind:
            said = f"session {session.id!r} was {reason} before this chunk was answered"
            self._turn_away(row.ticket, kind(said, field="session"))
        self._states.forget(session.held)
        self._sessions.close(session, reason)

    def _expire(self) -> None:
        for session in self._sessions.expire(self._clock()):
            self._states.forget(session.held)

    def _origin(self, key: ModelKey, steps: int) -> states_of.Origin:
        return states_of.Origin.of(self._engine.spec(key), key, steps)


def _rows(ticket: Ticket, data: bytes, session: Session | None, *, cuts: bool) -> list[Row]:
    request = ticket.request
    view, at, step_bytes = memoryview(data), 0, len(data) // sum(request.lengths)
    rows = []
    for steps in request.lengths:
        size = steps * step_bytes
        rows.append(Row(ticket, view[at : at + size], steps, step_bytes=step_bytes, cuts=cuts, session=session))
        at += size
    return rows
