"""A request that does not run as a whole, until all of its pieces have run. Knows neither a queue nor a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.state_cache import StateCache
from service.engine.batching.tenant_queue import NO_HANDLE, Piece
from service.engine.execution.in_flight import BlockResult
from service.ipc.blocks import COUNT
from service.ipc.messages.inference import MAX_RUNS, BatchRun

PER_SEQUENCE = ("scores", "picks", "embedding", "sequence")
EMPTY = BlockResult(None, None, None, None, b"")
NOT_FINITE = EMPTY._replace(is_finite=False)
"""The result of requests with states that led to values that are not finite."""


class Assembly:
    """Joins the results of the pieces of one request.

    key: the block of the request in the queue, and its place there. whole: the request alone.
    handles: the state handles of its sequences that have not ended, by their place in the block of the queue.
    states: the states after the sequences that have ended, if the request asks for them.
    ended: whether it was answered or refused, or nothing waits for it.
    """

    def __init__(self, block: QueuedBlock, request: int) -> None:
        self.key = block, request
        self.whole = block.select([request])
        sequences = range(block.first_sequences[request], block.first_sequences[request + 1])
        self._first = sequences.start
        self.handles = {} if block.handles is None else {row: int(block.handles[row]) for row in sequences}
        self.states: dict[int, bytes] = {}
        self.ended = False
        self._results: list[tuple[Piece, BlockResult]] = []
        self._incomplete = len(sequences)
        self._runs: list[BatchRun] = []

    def block_of(self, piece: Piece, states: StateCache) -> QueuedBlock:
        """Return a piece as a block, with the state handles of its sequences, which are new where other pieces follow.

        A sequence that runs whole may have no handle.
        """
        sequences, done = piece.sequences.tolist(), piece.done.tolist()
        block = piece.block.piece(piece.request, sequences, done, piece.steps)
        for sequence, before, is_last in zip(sequences, done, piece.last.tolist(), strict=True):
            if sequence not in self.handles and (before or not is_last):
                self.handles[sequence] = states.open()
        handles = [self.handles.get(sequence, NO_HANDLE) for sequence in sequences]
        if any(handle != NO_HANDLE for handle in handles):
            block.handles = np.array(handles)
        return block

    def add(self, piece: Piece, result: BlockResult) -> bool:
        """Add the result of a piece. Returns whether the request is complete. The pieces of a sequence end in their order."""
        self._results.append((piece, result))
        self._incomplete -= int(np.count_nonzero(piece.last))
        if result.runs and (not self._runs or self._runs[-1] is not result.runs[0]):
            # Beyond MAX_RUNS, each replaces the last.
            self._runs[MAX_RUNS - 1 :] = result.runs
        return not self._incomplete

    def result(self) -> BlockResult:
        """Return the result of the whole request, which is complete."""
        steps = np.concatenate([np.frombuffer(result.steps, COUNT) for _, result in self._results])
        sequences = np.concatenate([piece.sequences for piece, _ in self._results])
        last = np.concatenate([piece.last for piece, _ in self._results])
        of_steps = np.repeat(sequences, steps).argsort(kind="stable")
        of_last = np.flatnonzero(last)[sequences[last].argsort()]
        per_step = self._results[0][1].per_step
        arrays: dict[str, Any] = {}
        for name in PER_SEQUENCE:
            parts = [getattr(result, name) for _, result in self._results]
            if parts[0] is not None:
                lines = of_steps if name == "sequence" or (per_step and name != "embedding") else of_last
                arrays[name] = np.concatenate(parts).take(lines, axis=0)
        total = np.zeros(self.whole.sequences, COUNT)
        np.add.at(total, sequences - self._first, steps)
        state = b"".join([self.states[row] for row in sorted(self.states)])
        return EMPTY._replace(**arrays, steps=total.tobytes(), per_step=per_step, runs=self._runs, state=state)


def result_without_steps(session_steps: int) -> BlockResult:
    """Return the result of a request that only ends a session, which has had so many steps."""
    return EMPTY._replace(session_steps=np.array([session_steps]))


def rows_of(result: BlockResult, rows: Any) -> BlockResult:
    """Return the result of some sequences of a block. rows: (sequences,) bool."""
    steps = np.frombuffer(result.steps, COUNT)
    of_steps = np.repeat(rows, steps)

    def part(name: str) -> Any:
        array = getattr(result, name)
        if array is None:
            return None
        return array[of_steps if name == "sequence" or (result.per_step and name != "embedding") else rows]

    arrays = {name: part(name) for name in PER_SEQUENCE}
    session_steps = None if result.session_steps is None else result.session_steps[rows]
    state = np.frombuffer(result.state, np.uint8).reshape(len(rows), -1)[rows].tobytes()
    return result._replace(**arrays, steps=steps[rows].tobytes(), session_steps=session_steps, state=state)
