"""A request that does not run as a whole, until all of its pieces have run. Knows neither a queue nor a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.state_cache import StateCache
from service.engine.batching.tenant_queue import Piece
from service.engine.execution.in_flight import BlockResult
from service.ipc.blocks import COUNT
from service.ipc.messages.inference import MAX_RUNS, BatchRun

PER_SEQUENCE = ("scores", "picks", "embedding", "sequence")


NOT_FINITE = BlockResult(None, None, None, None, b"", is_finite=False)
"""The result of requests with states that led to values that are not finite."""


class Assembly:
    """Joins the results of the pieces of one request.

    key: the block of the request in the queue, and its place there. whole: the request alone.
    handles: the state handles of its sequences that have not ended, by their place in the block of the queue.
    states: the states after those that have, if the request asks for them.
    ended: whether it was answered or refused, or nothing waits for it.
    """

    def __init__(self, block: QueuedBlock, request: int) -> None:
        self.key = block, request
        self.whole = block.select([request])
        self._sequences = range(block.first_sequences[request], block.first_sequences[request + 1])
        self.handles = {} if block.handles is None else {row: int(block.handles[row]) for row in self._sequences}
        self.states: dict[int, bytes] = {}
        self.ended = False
        self._results: dict[int, list[BlockResult]] = {row: [] for row in self._sequences}
        self._incomplete = len(self._sequences)
        self._runs: list[BatchRun] = []

    def block_of(self, piece: Piece, states: StateCache) -> QueuedBlock:
        """Return a piece as a block, with the state handle of its sequence: its own, or a new one if other pieces follow."""
        block = piece.block.piece(piece.request, piece.sequence, piece.done, piece.steps)
        handle = self.handles.get(piece.sequence)
        if handle is None and not (piece.done == 0 and piece.last):
            handle = self.handles[piece.sequence] = states.open()
        if handle is not None:
            block.handles = np.array([handle])
        return block

    def add(self, sequence: int, result: BlockResult, *, last: bool) -> bool:
        """Add the result of a piece. Returns whether the request is complete. The pieces of a sequence end in their order."""
        self._results[sequence].append(result)
        self._incomplete -= last
        if result.runs and (not self._runs or self._runs[-1] is not result.runs[0]):
            # Beyond MAX_RUNS, each replaces the last.
            self._runs[MAX_RUNS - 1 :] = result.runs
        return not self._incomplete

    def result(self) -> BlockResult:
        """Return the result of the whole request, which is complete."""
        steps = [sum(int(np.frombuffer(piece.steps, COUNT)[0]) for piece in pieces) for pieces in self._results.values()]
        arrays = {name: self._joined(name) for name in PER_SEQUENCE}
        per_step = self._results[self._sequences[0]][-1].per_step
        state = b"".join([self.states[row] for row in self._sequences if self.states])
        return BlockResult(**arrays, steps=np.array(steps, COUNT).tobytes(), per_step=per_step, runs=self._runs, state=state)

    def _joined(self, name: str) -> Any:
        """Join the arrays of a kind: every piece's if they have a line per step, else the last piece's of each sequence."""
        last = self._results[self._sequences[0]][-1]
        if getattr(last, name) is None:
            return None
        per_step = name == "sequence" or (last.per_step and name != "embedding")
        return np.concatenate(
            [getattr(piece, name) for pieces in self._results.values() for piece in (pieces if per_step else pieces[-1:])]
        )


def result_without_steps(session_steps: int) -> BlockResult:
    """Return the result of a request that only ends a session, which has had so many steps."""
    return BlockResult(None, None, None, None, b"", session_steps=np.array([session_steps]))


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
