"""Batches from their launch to the replies to their requests.

What runs of a request as a whole is answered with its block. An Assembly joins the results of other pieces. A batch that fails runs again
request by request, so only the request that caused the failure is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.batching.assembly import NOT_FINITE, Assembly, rows_of
from service.engine.batching.request_block import BlockRequest, QueuedBlock, arrival_of
from service.engine.batching.running_batches import RunningBatch, RunningBatches
from service.engine.batching.scheduler import ScheduledBatch, Scheduler
from service.engine.batching.sessions import Sessions
from service.engine.batching.state_cache import StateCache, StateMoves, close_handles
from service.engine.batching.tenant_queue import NO_HANDLE, Piece
from service.engine.execution.device import DeviceLost
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BlockResult, FinishedBatch
from service.engine.internal_errors import InternalErrors
from service.errors import InferenceFailed, OutOfMemory, ServiceError
from service.ipc.messages.models import ModelKey
from service.metrics import Metrics

ARRIVED_OF = attrgetter("arrived")
LaunchObserver = Callable[[Batch, list[float]], None]
"""Called before each launch with the batch and the arrival time of each row in it."""
BeforeLaunch = Callable[[Batch], None]
Flags = NDArray[np.bool_]


class BatchRuns(RunningBatches):
    """Launches batches, and answers their requests."""

    def __init__(
        self,
        engine: DeviceEngine,
        scheduler: Scheduler,
        states: StateCache,
        sessions: Sessions,
        metrics: Metrics,
        clock: Callable[[], float],
        errors: InternalErrors,
    ) -> None:
        super().__init__(states, sessions)
        self._engine = engine
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._errors = errors
        self.observer: LaunchObserver | None = None

    # Launches.

    def start(self, scheduled: ScheduledBatch, before_launch: BeforeLaunch) -> None:
        """Launch a batch."""
        formed = self._clock()
        labels = *scheduled.model.labels, "queue"
        for block in scheduled.blocks:
            self._metrics.stage_seconds.observe_often(formed - block.arrived, block.sequences, *labels)
        for piece in scheduled.pieces:
            begins = int(np.count_nonzero(piece.done == 0))
            self._metrics.stage_seconds.observe_often(formed - piece.block.arrived, begins, *labels)
        pieces = [(self._assembly(piece), piece) for piece in scheduled.pieces]
        blocks = [*scheduled.blocks, *[assembly.block_of(piece, self._states) for assembly, piece in pieces]]
        self._run(scheduled.model, blocks, pieces, before_launch, formed)

    def _run(
        self,
        model: ModelKey,
        blocks: Sequence[QueuedBlock],
        pieces: Sequence[tuple[Assembly, Piece]],
        before_launch: BeforeLaunch,
        formed: float = math.inf,
    ) -> None:
        """Launch a batch. If it fails, launch its requests one by one, and refuse those that fail alone. pieces: see RunningBatch."""
        piece_rows = sum([len(piece.sequences) for _, piece in pieces])
        try:
            moves = self._states.prepare(model, blocks, piece_rows)
        except DeviceLost:
            raise
        except Exception as error:
            self._run_alone(RunningBatch(Batch(model, blocks), pieces), before_launch, error)
            return
        since = min(map(ARRIVED_OF, blocks)) if formed < math.inf else math.inf
        batch = Batch(model, blocks, since, formed, *(() if moves is None else (moves.reads, moves.writes)))
        running = self._running[batch] = RunningBatch(batch, pieces, moves)
        if self.observer is not None and formed < math.inf:
            self.observer(batch, [block.arrived for block in blocks for _ in range(block.sequences)])
        before_launch(batch)
        try:
            self._engine.launch(batch)
        except DeviceLost:
            raise
        except Exception as error:
            del self._running[batch]
            if moves is not None:
                self._states.abandon(model, moves, np.flatnonzero(moves.handles != NO_HANDLE))
            self._run_alone(running, before_launch, error)
            return
        if moves is not None:
            self._states.advance(model, moves, piece_rows)

    def _run_alone(self, failed: RunningBatch, before_launch: BeforeLaunch, error: Exception) -> None:
        """Run the requests of a failed batch one by one. Refuses a request that has failed alone."""
        batch = failed.batch
        self._end_withdrawn(failed)
        is_one_request = len(batch.blocks) == 1 and batch.blocks[0].requests == 1 and not failed.pieces
        if batch.rows == 1 or (is_one_request and batch.blocks[0].handles is not None):
            self._refuse_failed(failed, error)
            return
        if isinstance(error, OutOfMemory):
            self._scheduler.memory.shrink(batch.model, batch.tokens, self._clock())
        for block in failed.whole:
            gone = failed.withdrawn.get(block, ())
            for index, id in enumerate(block.ids):
                if id not in gone:
                    self._run_request(block.select([index]), before_launch)
                elif block.handles is not None and not block.sessions:
                    close_handles(self._states, block, index)
        for assembly, piece in failed.pieces:
            self._run_sequences(assembly, piece, before_launch)

    def _run_sequences(self, assembly: Assembly, piece: Piece, before_launch: BeforeLaunch) -> None:
        """Run the sequences of a piece one by one, until one fails."""
        for row in range(len(piece.sequences)):
            if not assembly.ended:
                alone = piece.alone(row)
                self._run(piece.block.model, [assembly.block_of(alone, self._states)], [(assembly, alone)], before_launch)

    def _run_request(self, block: QueuedBlock, before_launch: BeforeLaunch) -> None:
        """Run the request of a block alone, without a state each of its sequences."""
        if block.sequences == 1 or block.handles is not None:
            self._run(block.model, [block], [], before_launch)
            return
        count = block.sequences
        piece = Piece(block, 0, np.arange(count), np.zeros(count, np.int64), np.array(block.lengths), np.ones(count, bool))
        self._run_sequences(self._assembly(piece), piece, before_launch)

    def _refuse_failed(self, failed: RunningBatch, error: Exception) -> None:
        """Refuse the only request of a failed batch, unless nothing waits for it."""
        [block] = failed.batch.blocks
        if failed.pieces:
            [(assembly, _)] = failed.pieces
            if not assembly.ended:
                self._fail_assembly(assembly, self._launch_error(block.model, error))
        elif not failed.withdrawn:
            block.owner.refuse(block.ids, self._launch_error(block.model, error))
            self.leave(block, 0)

    def _launch_error(self, model: ModelKey, error: Exception) -> ServiceError:
        """Count a failed launch, and return the error for the client."""
        if isinstance(error, ServiceError):
            self._metrics.refused.add(error.code)
            return error
        self._metrics.failed.add(*model.labels)
        self._errors.log("model raised", error, model=model.name, version=model.version)
        return InferenceFailed("the model raised an exception on this request: the log of the service names it")

    def _assembly(self, piece: Piece) -> Assembly:
        """Return what joins the pieces of a request."""
        key = piece.block, piece.request
        assembly = self._assemblies.get(key)
        if assembly is None:
            assembly = self._assemblies[key] = Assembly(*key)
        return assembly

    # Results.

    def finish(self, finished: FinishedBatch, ready: float) -> None:
        """Reply to the requests that a batch has completed, and keep their states. ready: when its results were."""
        running = self._running.pop(finished.batch)
        self._end_withdrawn(running)
        moves, whole, first = running.moves, len(running.whole), 0
        kept, failed = list[int](), list[BlockRequest]()
        for place, (block, result) in enumerate(zip(finished.batch.blocks, finished.results, strict=True)):
            rows = slice(first, first + block.sequences)
            finite = None if finished.finite is None else finished.finite[rows]
            if place >= whole:
                self._finish_piece(*running.pieces[place - whole], result, finite, ready)
            elif moves is None or block.handles is None:
                self._answer(block, result, ready)
            else:
                withdrawn = running.withdrawn.get(block, ())
                answered, lost = self._finish_stateful(block, result, moves, rows, finite, withdrawn, ready)
                kept += answered
                failed += [(block, index) for index in lost if block.sessions]
            first = rows.stop
        if moves is not None:
            self._keep(running, moves, kept, ready)
            # The chunks of a session leave from the newest to the oldest.
            for block, index in sorted(failed, key=arrival_of, reverse=True):
                self._sessions.skip(block, index)

    def _answer(self, block: QueuedBlock, result: BlockResult, ready: float) -> bool:
        """Answer the requests of a block. Returns false if they were refused instead, because that raised an exception."""
        try:
            block.owner.answer(block, result, ready)
        except Exception as error:
            block.owner.refuse(block.ids, self._errors.report("answer", error))
            return False
        self._metrics.sequences.add(*block.model.labels, by=block.sequences)
        return True

    def _finish_stateful(
        self,
        block: QueuedBlock,
        result: BlockResult,
        moves: StateMoves,
        rows: slice,
        finite: Flags | None,
        withdrawn: Collection[int],
        ready: float,
    ) -> tuple[list[int], list[int]]:
        """Answer the requests of a block with states, but for those that nothing waits for.

        rows: of the block in the batch. Returns the rows whose states are kept, and the requests that left no state.
        """
        good: QueuedBlock | None = block
        gone, failed, answered = [block.ids.index(id) for id in withdrawn], list[int](), list(range(rows.start, rows.stop))
        try:
            if block.sessions:
                result = result._replace(session_steps=moves.steps[rows])
            if block.returns.state:
                result = result._replace(state=self._engine.state_vectors(block.model, moves.writes[rows]))
            if gone or (finite is not None and not finite.all()):
                not_finite = set() if finite is None else set(block.request_of[~finite].tolist())
                failed = sorted(not_finite.difference(gone))
                for index in failed:
                    alone = block.select([index])
                    alone.owner.answer(alone, NOT_FINITE, ready)
                bad = sorted(not_finite.union(gone))
                good, is_good = block.without(bad), ~np.isin(block.request_of, bad)
                result, answered = rows_of(result, is_good), (rows.start + np.flatnonzero(is_good)).tolist()
            if good is None or self._answer(good, result, ready):
                return answered, failed
        except Exception as error:
            block.owner.refuse([id for id in block.ids if id not in withdrawn], self._errors.report("answer", error))
        return [], [index for index in range(block.requests) if index not in gone]

    def _keep(self, running: RunningBatch, moves: StateMoves, kept: list[int], ready: float) -> None:
        """Keep the states that answered requests have written, and drop the others."""
        states, model, rows = self._states, running.batch.model, moves.rows
        every = len(kept) == len(moves.handles[rows])
        good = rows if every else np.array(kept, np.int64)
        if not every:
            states.abandon(model, moves, np.setdiff1d(np.arange(len(moves.handles))[rows], kept))
        states.commit(model, moves, good, ready)
        first = 0
        for block in running.whole:
            if block.handles is not None and block.sessions:
                handles = block.handles.tolist()
                if not every:
                    handles = [handle for row, handle in enumerate(handles, first) if row in kept]
                self._sessions.answered(block, handles)
            elif block.handles is not None:
                for handle in block.handles.tolist():
                    states.close(model, handle)
            first += block.sequences

    def _finish_piece(self, assembly: Assembly, piece: Piece, result: BlockResult, finite: Flags | None, ready: float) -> None:
        """Add a piece to its request, which is answered with its last piece."""
        if assembly.ended:
            return
        whole = assembly.whole
        try:
            if whole.handles is not None and finite is not None and not finite.all():
                self._scheduler.drop_request(whole.owner, whole.ids[0])
                whole.owner.answer(whole, NOT_FINITE, ready)
                self.leave(*assembly.key)
                return
            is_complete = assembly.add(piece, result)
            for sequence in piece.sequences[piece.last].tolist() if not whole.sessions else ():
                self._end_sequence(assembly, sequence)
            if is_complete:
                self._answer_assembly(assembly, ready)
        except Exception as error:
            self._fail_assembly(assembly, self._errors.report("answer", error))

    def _end_sequence(self, assembly: Assembly, sequence: int) -> None:
        """Free the state of a sequence that has ended: other sequences, perhaps of the same request, wait for its slot."""
        handle, model = assembly.handles.pop(sequence, None), assembly.whole.model
        if handle is not None:
            if assembly.whole.returns.state:
                assembly.states[sequence] = self._engine.state_vectors(model, self._states.slots[[handle]])
            self._states.close(model, handle)

    def _fail_assembly(self, assembly: Assembly, error: ServiceError) -> None:
        """Refuse a request that runs in pieces, unless nothing waits for it any more."""
        whole = assembly.whole
        if not assembly.ended:
            self._scheduler.drop_request(whole.owner, whole.ids[0])
            whole.owner.refuse(whole.ids, error)
            self.leave(*assembly.key)

    def _answer_assembly(self, assembly: Assembly, ready: float) -> None:
        """Answer a request, all pieces of which have run."""
        states, whole, result = self._states, assembly.whole, assembly.result()
        model, handles = whole.model, whole.handles
        if handles is not None and whole.sessions:
            steps = np.array([whole.steps + (0 if whole.options.starts else int(states.steps[handles[0]]))])
            result = result._replace(session_steps=steps)
            if whole.returns.state:
                result = result._replace(state=self._engine.state_vectors(model, states.slots[handles]))
        if self._answer(whole, result, ready) and handles is not None and result.session_steps is not None:
            states.finish(model, int(handles[0]), int(result.session_steps[0]), ready)
            self._end_assembly(assembly)
            self._sessions.answered(whole, handles.tolist())
        else:
            self.leave(*assembly.key)
