"""The queue in front of one engine: requests in, batches out, one reply per request. Knows nothing of HTTP, gRPC or CUDA.

`step` is one cycle: it drops requests after their deadline, launches the next batch if the engine accepts one, and replies to requests
that are complete. The engine's loop calls it again and again; between two calls, `submit` and `cancel` change the queue.

Requests without a session arrive in blocks, and stay in them if they run as a whole. Otherwise a request leaves its block and gets a
ticket, as the chunks of sessions have. Every request is answered or refused exactly once, unless its client
disconnects. A batch that fails runs again sequence by sequence, so only the request that caused the failure is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from service.engine.batch import Batch, Chunk
from service.engine.batching.batch_builder import ScheduledBatch, ScheduledSteps, SchedulerLimits
from service.engine.batching.request_block import BlockOwner, QueuedBlock
from service.engine.batching.scheduler import Scheduler
from service.engine.batching.session_state import State
from service.engine.batching.session_table import SessionTable
from service.engine.batching.sessions import Sessions
from service.engine.batching.state_cache import StateCache
from service.engine.batching.stored_sessions import StoredSessions, Waiting
from service.engine.batching.ticket import (
    FLOAT_BYTES,
    RequestSequence,
    SendAnswer,
    SendRefusal,
    Session,
    Ticket,
    sequences_of,
    unpack,
)
from service.engine.execution.device import DeviceLost
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BlockResult, ChunkResult
from service.engine.internal_errors import InternalErrors
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    OutOfMemory,
    ServiceError,
    SessionConflict,
    UnknownModel,
)
from service.ipc.messages.inference import Request
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics

WITHOUT_STEPS = "a request needs at least one sequence, and every sequence at least one step"
LATE = "the deadline had passed when the request reached the engine: allow more time"
ARRIVED_OF = attrgetter("arrived")
LaunchObserver = Callable[[Batch, list[float]], None]
"""Called before each launch with the batch and the arrival time of each row in it."""


def _ignore(batch: Batch) -> None:
    pass


class Batcher:
    """The requests of one engine, from their arrival to their reply. `sessions` has the calls that concern sessions alone."""

    def __init__(
        self,
        limits: SchedulerLimits,
        engine: DeviceEngine,
        table: SessionTable,
        metrics: Metrics,
        clock: Callable[[], float],
        errors: InternalErrors,
        stored: StoredSessions | None = None,
    ) -> None:
        """stored: None for a service without a session store."""
        self.batch_sequences = limits.max_batch_sequences
        """Most sequences in a batch."""
        self._engine = engine
        self._table = table
        self._states = StateCache(engine, metrics)
        self._scheduler = Scheduler[RequestSequence](limits, engine.cost, self._states.room, unpack)
        self.sessions = Sessions(engine, table, self._states, metrics, clock, self._reject, stored)
        self._metrics = metrics
        self._clock = clock
        self._errors = errors
        self._observer: LaunchObserver | None = None
        self._running: dict[QueuedBlock, set[int]] = {}
        """The blocks that run, each with the ids of its cancelled requests."""

    @property
    def waiting(self) -> int:
        """Sequences that have not begun."""
        return self._scheduler.waiting

    @property
    def idle(self) -> bool:
        """Whether no sequence has steps left to launch."""
        return not self._scheduler.waiting and not self._scheduler.begun

    def backlog_seconds(self) -> float:
        """Return the predicted time of all running and queued work."""
        return self._engine.remaining_seconds + self._scheduler.backlog_seconds()

    def count(self) -> None:
        """Update the gauges."""
        self._metrics.queue_depth.set(self._scheduler.waiting)
        waiting = self._metrics.sequences_waiting
        for labels in waiting.values:
            waiting.set(0.0, *labels)
        for model, count in self._scheduler.waiting_by_model().items():
            waiting.add(*model.labels, by=count)
        self._metrics.sequences_begun.set(self._scheduler.begun)
        self.sessions.count()

    def submit(
        self, request: Request, data: bytes | memoryview, reply: SendAnswer, refuse: SendRefusal, *, again: bool = False
    ) -> Ticket:
        """Queue a request, or refuse it at once through `refuse`. again: another engine ended while it had the request."""
        ticket = Ticket(request, reply, refuse)
        self._submit(ticket, data, again)
        return ticket

    def _submit(self, ticket: Ticket, data: bytes | memoryview, again: bool) -> None:
        """Queue a request, or keep it until this replica owns its session."""
        request = ticket.request
        try:
            self._check(request, ticket.key, again)
            if request.session is not None and self.sessions.stored is not None:
                waiting = Waiting(
                    lambda: self._submit(ticket, data, again),
                    lambda error: self._reject(ticket, error),
                    lambda: ticket.ended,
                    request.session_limit,
                    begins=request.session_starts is not False and not request.session_at,
                    anew=request.session_starts is True,
                    is_chunk=True,
                )
                if self.sessions.stored.hold(request.session, waiting):
                    return
            self._queue(ticket, data, again)
        except ServiceError as error:
            # A chunk for another version of its session's model is not counted: the frontend sends it again.
            if not (isinstance(error, SessionConflict) and error.elsewhere):
                self._metrics.refused.add(error.code)
            ticket.refuse(error)
        except Exception as error:
            self._fail(ticket, "requests", error)

    def submit_block(self, block: QueuedBlock) -> None:
        """Queue the requests of a block. Those that cannot be queued are refused at once."""
        key, now = block.model, self._clock()
        if not self._engine.serves(key):
            self._refuse_requests(block, _not_served(key))
            return
        if block.shortest < 1:
            self._refuse_requests(block, InvalidInput(WITHOUT_STEPS, field="inputs"))
            return
        if block.deadline <= now:
            late = np.flatnonzero(block.deadlines <= now).tolist()
            self._refuse_requests(block.select(late), DeadlineExceeded(LATE))
            in_time = block.without(late)
            if in_time is None:
                return
            block = in_time
        for refused in self._scheduler.add_block(block, now=now, busy=self._engine.remaining_seconds):
            self._metrics.refused.add(refused.error.code, by=len(refused.ids))
            block.owner.refuse(refused.ids, refused.error)

    def fail_requests(self, owner: BlockOwner, ids: Sequence[int], error: ServiceError) -> None:
        """Refuse the requests of a block after its submission raised an exception. Some of them may be queued."""
        for id in ids:
            self._scheduler.drop_request(owner, id)
        owner.refuse(ids, error)

    def cancel_request(self, owner: BlockOwner, id: int) -> None:
        """Drop a request of a block. A running request is still answered: the owner ignores answers that nothing waits for."""
        if self._scheduler.drop_request(owner, id):
            self._metrics.cancelled.add("waiting")
            return
        for block, cancelled in self._running.items():
            if block.owner is owner and id in block.ids and id not in cancelled:
                cancelled.add(id)
                self._metrics.cancelled.add("running")

    def cancel_owner(self, owner: BlockOwner) -> None:
        """Drop the blocks of a frontend that has ended."""
        dropped = self._scheduler.drop_owner(owner)
        self._metrics.cancelled.add("waiting", by=sum([block.requests for block in dropped]))

    def cancel(self, ticket: Ticket) -> None:
        """Drop the request of a client that has disconnected. The result of a running batch is discarded when the batch ends."""
        if ticket.ended:
            return
        self._metrics.cancelled.add("running" if any(sequence.launched for sequence in ticket.sequences) else "waiting")
        self._drop(ticket)
        ticket.end()

    def step(self, before_launch: Callable[[Batch], None] = _ignore) -> bool:
        """Launch the next batch if the engine accepts one, and reply to the requests that are complete.

        Calls `before_launch` with each batch. Returns whether a batch was launched.
        """
        launched = self._engine.accepts_batch and self._launch_next(before_launch)
        finished, ready = self._engine.finished(), self._clock()
        for part, result in finished:
            if isinstance(part, QueuedBlock):
                assert isinstance(result, BlockResult)
                self._finish_block(part, result, ready)
            else:
                assert isinstance(result, ChunkResult)
                self._finish_chunk(part.owner, result, ready)
        if self._table.idle or self.sessions.stored is not None:
            self.sessions.expire()
        return launched

    def watch(self, observer: LaunchObserver | None) -> None:
        """Call `observer` before each launch, instead of the previous observer."""
        self._observer = observer

    def has(self, key: ModelKey) -> bool:
        """Return whether a model version has a queued or running sequence or an open session."""
        return self._scheduler.holds(key) or self._engine.runs(key) or self.sessions.holds(key)

    def close(self, key: ModelKey) -> None:
        """Forget a model version that has neither sequences nor sessions."""
        self._states.close(key)

    def _check(self, request: Request, key: ModelKey, again: bool) -> None:
        if not self._engine.serves(key):
            if request.session is not None:
                # The session ended with its version, or stays with another: that matters more than the missing version.
                self.sessions.check_elsewhere(request, again)
            raise _not_served(key)
        if not request.ends_only and (not request.lengths or min(request.lengths) < 1):
            raise InvalidInput(WITHOUT_STEPS, field="inputs")
        if request.deadline <= self._clock():
            raise DeadlineExceeded(LATE)
        if request.session is not None:
            self.sessions.check(request)
        if request.has_states and not self._engine.spec(key).states:
            raise InvalidInput(
                f"{request.model} has no states that a request may bring or ask for: leave them out", field="states"
            )

    def _queue(self, ticket: Ticket, data: bytes | memoryview, again: bool) -> None:
        request = ticket.request
        session = None if request.session is None else self.sessions.session_of(request, again)
        try:
            values, states = self._split_states(ticket, data)
            divisible = self._engine.streams(ticket.key)
            sequences = sequences_of(ticket, values, session, divisible=divisible, initial_states=states)
            ends_only = request.ends_only
            if not ends_only:
                self._scheduler.add(ticket.key, sequences, now=self._clock(), busy=self._engine.remaining_seconds)
        except Exception:
            if session is not None:
                self.sessions.leave(session)
            raise
        ticket.open(sequences)
        if session is not None:
            self.sessions.append(session, sequences[0])
            if ends_only:
                self._end_if_due(session)

    def _split_states(self, ticket: Ticket, data: bytes | memoryview) -> tuple[memoryview, list[State]]:
        """Return the values of a request, and the state that each sequence starts from if it brings them."""
        view, key = memoryview(data), ticket.key
        if not ticket.request.initial:
            return view, []
        size, count = FLOAT_BYTES * sum(self._engine.spec(key).states.values()), len(ticket.request.lengths)
        begin = len(view) - count * size
        return view[:begin], [self._engine.state_from(key, view[begin + size * row :][:size]) for row in range(count)]

    def _launch_next(self, before_launch: Callable[[Batch], None]) -> bool:
        """Launch the next batch. Returns False if no sequence can run now."""
        now = self._clock()
        if now >= self._scheduler.earliest_deadline:
            self._drop_late(now)
        if self._scheduler.memory.lowered:
            self._scheduler.memory.relax(now)
        scheduled = self._scheduler.next_batch()
        if scheduled is None:
            return False
        formed = self._clock()
        self._count_queued(scheduled, formed)
        model, blocks = scheduled.model, scheduled.blocks
        chunks = self._chunks(model, scheduled.parts) if scheduled.parts else []
        if not blocks and not chunks:
            return True
        since = min(map(ARRIVED_OF, blocks), default=math.inf)
        if chunks:
            since = min([since, *[chunk.owner.arrived for chunk in chunks]])
        batch = Batch(model, chunks, since, blocks, formed)
        if self._observer is not None:
            arrivals = [block.arrived for block in blocks for _ in range(block.sequences)]
            self._observer(batch, arrivals + [chunk.owner.arrived for chunk in chunks])
        self._run(batch, before_launch)
        return True

    def _drop_late(self, now: float) -> None:
        """Refuse the requests whose deadline has passed."""
        blocks, sequences = self._scheduler.drop_late(now)
        error = DeadlineExceeded("the deadline passed in the queue: allow more time, or send fewer requests")
        for block in blocks:
            self._refuse_requests(block, error)
        for sequence in sequences:
            if not sequence.ticket.ended:
                self._reject(sequence.ticket, error)

    def _count_queued(self, scheduled: ScheduledBatch[RequestSequence], now: float) -> None:
        """Count how long the sequences that begin now have waited."""
        labels = *scheduled.model.labels, "queue"
        for block in scheduled.blocks:
            self._metrics.stage_seconds.observe_often(now - block.arrived, block.sequences, *labels)
        for part in scheduled.parts:
            if part.first:
                self._metrics.stage_seconds.observe(now - part.sequence.arrived, *labels)

    def _chunks(self, model: ModelKey, parts: Sequence[ScheduledSteps[RequestSequence]]) -> list[Chunk]:
        """Return the chunks of the scheduled steps. Refuses a request whose chunk raises an exception."""
        chunks, failed = [], False
        for part in parts:
            try:
                chunks.append(self._chunk(model, part))
            except Exception as error:
                failed = True
                self._fail(part.sequence.ticket, "batch", error)
        # Another chunk of a failed request must not run: the slot that it would write is free.
        return [chunk for chunk in chunks if not chunk.owner.ticket.ended] if failed else chunks

    def _chunk(self, model: ModelKey, part: ScheduledSteps[RequestSequence]) -> Chunk:
        sequence = part.sequence
        if part.first and part.last and not sequence.stateful:
            # Most sequences run whole and need no state slot.
            sequence.launched = 1
            request = sequence.ticket.request
            return Chunk(sequence.data, part.steps, request.returns, sequence, timed=request.timed)
        return self._states.chunk(model, part)

    def _run(self, batch: Batch, before_launch: Callable[[Batch], None]) -> None:
        """Launch a batch. If it fails, launch its rows one by one and refuse the requests that fail alone."""
        for block in batch.blocks:
            self._running[block] = set()
        before_launch(batch)
        try:
            self._engine.launch(batch)
        except DeviceLost:
            raise
        except Exception as error:
            chunks = [*self._divide(batch.blocks), *batch.chunks]
            if batch.rows > 1:
                if isinstance(error, OutOfMemory):
                    self._scheduler.memory.shrink(batch.model, batch.tokens, self._clock())
                for chunk in chunks:
                    if not chunk.owner.ticket.ended:
                        self._run(Batch(batch.model, [chunk]), before_launch)
                return
            for chunk in chunks:
                if not chunk.owner.ticket.ended:
                    self._refuse(chunk.owner.ticket, self._launch_error(batch.model, error))
            return
        for chunk in batch.chunks:
            if chunk.owner.read_slot is not None:
                self._states.launched(chunk.owner)

    def _divide(self, blocks: Sequence[QueuedBlock]) -> Iterator[Chunk]:
        """Yield the sequences of running blocks as chunks, each with its ticket."""
        for block in blocks:
            cancelled = self._running.pop(block)
            for index, id in enumerate(block.ids):
                for sequence in unpack(block.select([index])) if id not in cancelled else ():
                    steps, sequence.remaining, sequence.launched = sequence.remaining, 0, 1
                    yield Chunk(sequence.data, steps, block.returns, sequence, timed=block.timed)

    def _launch_error(self, model: ModelKey, error: Exception) -> ServiceError:
        """Count a failed launch, and return the error for the client."""
        if isinstance(error, ServiceError):
            self._metrics.refused.add(error.code)
            return error
        self._metrics.failed.add(*model.labels)
        self._errors.log("model raised", error, model=model.name, version=model.version)
        return InferenceFailed("the model raised an exception on this request: the log of the service names it")

    def _finish_block(self, block: QueuedBlock, result: BlockResult, ready: float) -> None:
        del self._running[block]
        try:
            block.owner.answer(block, result, ready)
        except Exception as error:
            block.owner.refuse(block.ids, self._errors.report("answer", error))
            return
        self._metrics.sequences.add(*block.model.labels, by=block.sequences)

    def _finish_chunk(self, sequence: RequestSequence, result: ChunkResult, ready: float) -> None:
        """Handle the end of a chunk; the request is answered with the last chunk of its last sequence."""
        ticket = sequence.ticket
        if ticket.ended:
            return
        try:
            if result.runs and ticket.request.timed:
                ticket.add_run(result.runs[0])
            complete = sequence.add_result(result)
            if complete and ticket.request.returns.state and result.finite:
                assert sequence.slot is not None
                sequence.final_state = self._engine.state_vector(ticket.key, sequence.slot.number)
                self._states.release(sequence)
            if sequence.stateful and not result.finite:
                self._drop(ticket)
                ticket.answer_not_finite(ready)
            elif complete and ticket.sequence_done():
                self._answer(sequence, ready)
        except Exception as error:
            self._fail(ticket, "answer", error)

    def _answer(self, sequence: RequestSequence, ready: float) -> None:
        """Answer a request. sequence: the last sequence of the request; a session's chunk has a single sequence."""
        ticket, session = sequence.ticket, sequence.session
        # The answer first: if it raises an exception, the session keeps its state.
        ticket.answer(ready, sequence.session_steps)
        if session is not None:
            self.sessions.advance(session, sequence)
            self._end_if_due(session)
        self._metrics.sequences.add(*ticket.key.labels, by=len(ticket.request.lengths))

    def _end_if_due(self, session: Session) -> None:
        """Answer the request that only ends a session, once every chunk before it has been answered."""
        if session.chunks and session.chunks[0].ticket.request.ends_only:
            self._answer(session.chunks[0], self._clock())

    def _fail(self, ticket: Ticket, work: str, error: Exception) -> None:
        """Refuse a request that met an unexpected exception. work: one of metrics.ENGINE_WORK."""
        failure = self._errors.report(work, error)
        if not ticket.ended:
            self._refuse(ticket, failure)

    def _reject(self, ticket: Ticket, error: ServiceError) -> None:
        """Refuse a request that did not fail in a batch, and count it."""
        self._metrics.refused.add(error.code)
        self._refuse(ticket, error)

    def _refuse_requests(self, block: QueuedBlock, error: ServiceError) -> None:
        """Refuse the requests of a block that is not queued, and count them."""
        self._metrics.refused.add(error.code, by=block.requests)
        block.owner.refuse(block.ids, error)

    def _refuse(self, ticket: Ticket, error: ServiceError) -> None:
        self._drop(ticket)
        ticket.refuse(error)

    def _drop(self, ticket: Ticket) -> None:
        """Stop the sequences of a request and free their state slots. A session continues as if this chunk had never been sent."""
        self._scheduler.drop(ticket.sequences)
        for sequence in ticket.sequences:
            self._states.release(sequence)
            if sequence.session is not None:
                self.sessions.skip(sequence.session, sequence)


def _not_served(key: ModelKey) -> UnknownModel:
    return UnknownModel(f"the engine does not serve {key.name} version {key.version}", field="model")
