"""The queue in front of one engine: requests in, batches out, one reply per request. Knows nothing of HTTP, gRPC or CUDA.

`step` is one cycle: it drops requests after their deadline, launches the next batch if the engine accepts one, and replies to requests
that are complete. The engine's loop calls it again and again; between two calls, `submit` and `cancel` change the queue.

Every request arrives as a row of a block. It is answered or refused exactly once, unless its client disconnects.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.engine.batch import Batch
from service.engine.batching.arrivals import Arrivals
from service.engine.batching.batch_runs import BatchRuns, LaunchObserver
from service.engine.batching.request_block import BlockOwner, BlockRequest, QueuedBlock, arrival_of, in_order_of_arrival
from service.engine.batching.scheduler import Scheduler
from service.engine.batching.selection import SchedulerLimits
from service.engine.batching.session_table import Session, SessionTable
from service.engine.batching.sessions import Sessions
from service.engine.batching.stored_sessions import StoredSessions
from service.engine.execution.device_engine import DeviceEngine
from service.engine.internal_errors import InternalErrors
from service.errors import DeadlineExceeded, InvalidInput, ServiceError, SessionConflict, UnknownModel
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics

WITHOUT_STEPS = "a request needs at least one sequence, and every sequence at least one step"
LATE = "the deadline had passed when the request reached the engine: allow more time"


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
        self._states = table.states
        self._scheduler = Scheduler(limits, engine.cost, self._states)
        self.sessions = Sessions(engine, table, metrics, clock, self._withdraw_chunks, self._refuse, stored)
        self._arrivals = Arrivals(engine, table, self.sessions, self.submit, self._refuse)
        self._metrics = metrics
        self._clock = clock
        self._runs = BatchRuns(engine, self._scheduler, self._states, self.sessions, metrics, clock, errors)

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

    # Arrivals.

    def submit(self, block: QueuedBlock) -> None:
        """Queue the requests of a block. Those that cannot be queued are refused at once, or wait for the session store."""
        key, now = block.model, self._clock()
        if not self._engine.serves(key):
            self._refuse_not_served(block)
            return
        if block.shortest < 1 and not (block.options.ends and block.sessions):
            self._refuse_all(block, InvalidInput(WITHOUT_STEPS, field="inputs"))
            return
        if block.deadline <= now:
            late = np.flatnonzero(block.deadlines <= now).tolist()
            self._refuse_all(block.select(late), DeadlineExceeded(LATE))
            in_time = block.without(late)
            if in_time is None:
                return
            block = in_time
        if block.sessions or block.has_states:
            error = self._arrivals.refusal(block)
            if error is not None:
                self._refuse_all(block, error)
                return
            attached = self._arrivals.attach(block)
            if attached is None:
                return
            block = attached
        try:
            all_refused = self._scheduler.add_block(block, now=now, busy=self._engine.remaining_seconds)
        except Exception:
            self._drop_queued(block)
            raise
        for refused in all_refused:
            self._metrics.refused.add(refused.error.code, by=len(refused.ids))
            block.owner.refuse(refused.ids, refused.error)
            for id in refused.ids if block.handles is not None else ():
                self.sessions.skip(block, block.ids.index(id), queued=False)

    def cancel(self, owner: BlockOwner, id: int) -> None:
        """Drop the request of a client that has disconnected. The owner ignores answers that nothing waits for."""
        dropped = self._scheduler.drop_request(owner, id)
        if dropped is not None:
            self._metrics.cancelled.add("running" if self._runs.has_begun(*dropped) else "waiting")
            self._runs.leave(*dropped)
        elif self._runs.cancel(owner, id):
            self._metrics.cancelled.add("running")
        elif self._arrivals.cancel(owner, id) or self.sessions.cancel_ends(owner, id):
            self._metrics.cancelled.add("waiting")

    def cancel_owner(self, owner: BlockOwner) -> None:
        """Drop the requests of a frontend that has ended."""
        dropped = in_order_of_arrival(self._scheduler.drop_owner(owner))
        # The chunks of a session leave from the newest to the oldest.
        for request in reversed(dropped):
            self._runs.leave(*request)
        held = self._arrivals.cancel_owner(owner) + self.sessions.cancel_ends(owner)
        self._metrics.cancelled.add("running", by=self._runs.cancel_owner(owner))
        self._metrics.cancelled.add("waiting", by=len(dropped) + held)

    # Batches.

    def step(self, before_launch: Callable[[Batch], None] = lambda _: None) -> bool:
        """Launch the next batch if the engine accepts one, and reply to the requests that are complete.

        Calls `before_launch` with each batch. Returns whether a batch was launched.
        """
        launched = self._engine.accepts_batch and self._launch_next(before_launch)
        finished, ready = self._engine.finished(), self._clock()
        for batch in finished:
            self._runs.finish(batch, ready)
        self.sessions.expire()
        return launched

    def watch(self, observer: LaunchObserver | None) -> None:
        """Call `observer` before each launch, instead of the previous observer."""
        self._runs.observer = observer

    def has(self, key: ModelKey) -> bool:
        """Return whether a model version has a queued or running sequence or an open session."""
        return self._scheduler.holds(key) or self._engine.runs(key) or self.sessions.holds(key)

    def close(self, key: ModelKey) -> None:
        """Forget a model version that has neither sequences nor sessions."""
        self._states.forget(key)

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
        self._runs.start(scheduled, before_launch)
        return True

    def _drop_late(self, now: float) -> None:
        """Refuse the requests whose deadline has passed."""
        error = DeadlineExceeded("the deadline passed in the queue: allow more time, or send fewer requests")
        # The chunks of a session leave from the newest to the oldest.
        for block, index in reversed(in_order_of_arrival(self._scheduler.drop_late(now))):
            self._runs.leave(block, index)
            self._refuse(block, index, error)

    def _drop_queued(self, block: QueuedBlock) -> None:
        """Take back a block that was perhaps queued in part."""
        for index in reversed(range(block.requests)):
            dropped = self._scheduler.drop_request(block.owner, block.ids[index])
            if dropped is not None:
                self._runs.leave(*dropped)
            elif block.handles is not None:
                self.sessions.skip(block, index, queued=False)

    def _withdraw_chunks(self, session: Session, after: int) -> list[BlockRequest]:
        """See `Sessions`."""
        queued = in_order_of_arrival(self._scheduler.drop_chunks(session.key, session.handle, after))
        return sorted([*self._runs.withdraw_chunks(session, after, queued), *queued], key=arrival_of)

    def _refuse_not_served(self, block: QueuedBlock) -> None:
        error = UnknownModel(f"the engine does not serve {block.model.name} version {block.model.version}", field="model")
        for index in range(block.requests):
            try:
                if block.sessions:
                    # The session ended with its version, or stays with another: that matters more than the missing version.
                    self._arrivals.check_elsewhere(block, index)
                raise error
            except ServiceError as refusal:
                self._refuse(block, index, refusal)

    def _refuse_all(self, block: QueuedBlock, error: ServiceError) -> None:
        """Refuse the requests of a block that is not queued, and count them."""
        self._metrics.refused.add(error.code, by=block.requests)
        block.owner.refuse(block.ids, error)

    def _refuse(self, block: QueuedBlock, index: int, error: ServiceError) -> None:
        """Refuse a request, and count it, unless its frontend will send it again for another version of its session's model."""
        if not (isinstance(error, SessionConflict) and error.elsewhere):
            self._metrics.refused.add(error.code)
        block.owner.refuse([block.ids[index]], error)
