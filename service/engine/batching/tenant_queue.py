"""The queued work of one tenant for one model, as columns: the cost of a batch hardly grows with the queue.

Pure: nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.request_block import QueuedBlock
from service.errors import Overloaded
from service.ipc.blocks import COUNT

COLUMNS = LEFT, DONE, NUMBER, SEQUENCE, REQUEST, ORDER, HANDLE = range(7)
"""The columns of the table, a row for each sequence: its steps that are left, and those that have run; the number of its block, and its
place there; the place of its request there, and among all arrivals; its state handle, or NO_HANDLE."""
NO_HANDLE = -1
NO_ROWS: NDArray[np.int64] = np.empty((0, len(COLUMNS)), np.int64)
NO_TIMES: NDArray[np.float64] = np.empty(0)
MOST_COMPARED = 64
"""Blocks that are compared one by one. A longer queue is put in order as a table."""
FIRST_DUE, LAST_DUE = attrgetter("first_due"), attrgetter("last_due")


class Rejection(NamedTuple):
    """A request that was rejected because it would have missed its deadline.

    A request with at least as many steps, less time than `needed` and no higher priority would miss its deadline too.
    """

    steps: int
    needed: float
    head_start: float
    message: str
    retry_after: int

    def error(self) -> Overloaded:
        return Overloaded(self.message, retry_after=self.retry_after)

    def covers(self, steps: Any, time_left: Any, head_start: float) -> Any:
        """Return whether this rejection holds for a request, or for each of many requests."""
        return (steps >= self.steps) & (time_left < self.needed) & (head_start <= self.head_start)


class Piece(NamedTuple):
    """Steps of sequences of one request that run in a batch without the rest of the request.

    sequences: (sequences,) their places in the block; done: their steps before these; steps: how many run; last: whether none follow.
    """

    block: QueuedBlock
    request: int
    sequences: NDArray[np.int64]
    done: NDArray[np.int64]
    steps: NDArray[np.int64]
    last: NDArray[np.bool_]

    def alone(self, row: int) -> Piece:
        """Return the steps of a single sequence."""
        part = slice(row, row + 1)
        return self._replace(sequences=self.sequences[part], done=self.done[part], steps=self.steps[part], last=self.last[part])


class TenantQueue:
    """The queued sequences of one tenant and model, in the order of their due times, and then of their arrival.

    count, steps: of its sequences, and of the steps that are left; begun: how many sequences have run in part.
    """

    def __init__(self) -> None:
        self.count = self.steps = self.begun = 0
        self._clear([])

    def _clear(self, blocks: list[QueuedBlock]) -> None:
        """Have whole blocks in the order of their arrival, and nothing in the table."""
        self.arrived = blocks
        """Blocks with sequences that are not in the table yet. A block that arrives after the others is added here."""
        self._blocks: dict[int, QueuedBlock] = {}
        """The blocks with sequences in the table, by number, in the order of their arrival."""
        self._left: dict[int, int] = {}
        """How many sequences of each of them the table has."""
        self._number = 0
        self._due = self._deadlines = NO_TIMES
        self._table = NO_ROWS
        self._cut = False
        """Whether a batch has taken some of the sequences of a block."""

    def whole_blocks(self) -> list[QueuedBlock] | None:
        """Return all blocks in the order of their arrival, None if a batch has taken a part of one."""
        return None if self._cut else [*self._blocks.values(), *self.arrived]

    def first_blocks(self, rows: int) -> list[QueuedBlock]:
        """Return whole blocks with this many sequences together if all others are due after them, else none.

        A block with more sequences than that, all due at the same time, is divided.
        """
        blocks = self.whole_blocks()
        if blocks is None or len(blocks) > MOST_COMPARED:
            return []
        in_order, number, left = sorted(blocks, key=FIRST_DUE), 0, rows
        while left > 0:
            left -= in_order[number].sequences
            number += 1
        first, divided = in_order[:number], in_order[number - 1]
        if left < 0:
            requests = divided.requests_with(divided.sequences + left)
            if not requests or divided.first_due < divided.last_due:
                return []
            first[-1], rest = divided.select(range(requests)), divided.select(range(requests, divided.requests))
            place = blocks.index(divided)
            blocks[place : place + 1] = first[-1], rest
            in_order.insert(number, rest)
        if number < len(in_order) and not all(_is_before(block, in_order[number].first_due) for block in first):
            return []
        if left < 0:
            self._clear(blocks)
        return first

    def take_blocks(self, blocks: Sequence[QueuedBlock]) -> None:
        """Remove some of the whole blocks. The others leave the table: the next batch may take them whole too."""
        taken = set(blocks)
        self._clear([block for block in self.whole_blocks() or () if block not in taken])

    def table(self) -> NDArray[np.int64]:
        """Return the sequences in their order, (sequences, COLUMNS)."""
        self._join()
        return self._table

    def due(self) -> NDArray[np.float64]:
        """Return when each sequence is due, in order."""
        self._join()
        return self._due

    def take(self, places: NDArray[np.int64], steps: NDArray[np.int64]) -> tuple[list[QueuedBlock], list[Piece]]:
        """Remove these steps of the sequences at these places. Returns the requests that run as a whole, in blocks, and the other steps.

        places: ascending; steps: of each of them.
        """
        rows = self._table.take(places, axis=0)
        last = steps == rows[:, LEFT]
        whole = last & (rows[:, DONE] == 0)
        blocks: list[QueuedBlock] = []
        for number, of_block in _runs_of(rows[:, NUMBER]).items():
            block, of_requests = self._blocks[number], rows[of_block, REQUEST]
            if len(of_requests) == block.sequences and whole[of_block].all():
                blocks.append(block)
                continue
            taken = np.bincount(of_requests[whole[of_block]], minlength=block.requests)
            is_complete = taken == block.counts
            whole[of_block] &= is_complete[of_requests]
            if is_complete.any():
                blocks.append(block.select(np.flatnonzero(is_complete).tolist()))
        pieces = [] if whole.all() else self._pieces(rows[~whole], steps[~whole], last[~whole])
        if not last.all():
            continued = places[~last]
            self._table[continued, LEFT] -= steps[~last]
            self._table[continued, DONE] += steps[~last]
            self._cut = True
        self._remove(places[last], rows[last, NUMBER])
        return blocks, pieces

    def _pieces(self, rows: NDArray[np.int64], steps: NDArray[np.int64], last: NDArray[np.bool_]) -> list[Piece]:
        """Return these steps of sequences by request."""
        pieces = []
        for of_request in _runs_of(rows[:, ORDER]).values():
            own = rows[of_request]
            _, _, number, _, request, *_ = own[0].tolist()
            pieces.append(
                Piece(self._blocks[number], request, own[:, SEQUENCE], own[:, DONE], steps[of_request], last[of_request])
            )
        return pieces

    def drop(self, matches: NDArray[np.bool_]) -> list[tuple[QueuedBlock, list[int]]]:
        """Remove the matching sequences. Returns the blocks with their requests that lost sequences. matches: by place in the table."""
        places = np.flatnonzero(matches)
        rows = self._table.take(places, axis=0)
        dropped = [
            (self._blocks[number], sorted(set(rows[of_block, REQUEST].tolist())))
            for number, of_block in _runs_of(rows[:, NUMBER]).items()
        ]
        self._remove(places, rows[:, NUMBER])
        return dropped

    def deadlines(self) -> NDArray[np.float64]:
        """Return the deadline of each sequence, in order."""
        self._join()
        return self._deadlines

    def of_blocks(self, numbers: Sequence[int]) -> NDArray[np.bool_]:
        """Return which sequences belong to these blocks."""
        return np.isin(self.table()[:, NUMBER], numbers)

    def blocks(self) -> dict[int, QueuedBlock]:
        """Return the blocks with sequences in the table, by number."""
        self._join()
        return self._blocks

    def _remove(self, places: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Remove the sequences at these places, which are ascending. numbers: of their blocks."""
        if not len(places):
            return
        for number, of_block in _runs_of(numbers).items():
            self._left[number] -= len(numbers[of_block])
            if not self._left[number]:
                del self._left[number], self._blocks[number]
            else:
                self._cut = True
        if places[-1] == len(places) - 1:
            stays: slice | NDArray[np.bool_] = slice(len(places), None)
        else:
            stays = np.ones(len(self._table), bool)
            stays[places] = False
        self._due, self._deadlines, self._table = self._due[stays], self._deadlines[stays], self._table[stays]
        self._cut &= bool(self._blocks)

    def _join(self) -> None:
        """Put the sequences of the blocks that have arrived in their places in the table."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return
        numbers = range(self._number, self._number + len(arrived))
        self._number = numbers.stop
        self._blocks.update(zip(numbers, arrived, strict=True))
        self._left.update({number: block.sequences for number, block in zip(numbers, arrived, strict=True)})
        requests, rows = _rows(arrived, numbers)
        due = np.concatenate([self._due, np.concatenate([block.due for block in arrived])[requests]])
        deadlines = np.concatenate([block.deadlines for block in arrived])[requests]
        # Sequences that are due at the same time stay in the order of their arrival.
        in_order = due.argsort(kind="stable")
        self._due, self._deadlines = due[in_order], np.concatenate([self._deadlines, deadlines])[in_order]
        # `take` copies whole rows, several times as fast as an index.
        self._table = np.concatenate([self._table, rows]).take(in_order, axis=0)


def _is_before(block: QueuedBlock, due: float) -> bool:
    """Return whether all requests of a block are due before another block that arrived later, or was sorted behind it, is due."""
    return block.last_due < due or block.first_due == block.last_due == due


def _runs_of(numbers: NDArray[np.int64]) -> dict[int, slice | NDArray[np.int64]]:
    """Return which rows have each number, such as that of their block. Most rows with a number follow each other."""
    if not len(numbers):
        return {}
    firsts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
    found = numbers[firsts].tolist()
    if len(set(found)) == len(found):
        return {number: slice(*ends) for number, ends in zip(found, pairwise([*firsts, len(numbers)]), strict=True)}
    return {number: np.flatnonzero(numbers == number) for number in dict.fromkeys(found)}


def _rows(blocks: Sequence[QueuedBlock], numbers: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return of each sequence of some blocks the place of its request among all of their requests, and its row in the table."""
    counts = np.frombuffer(b"".join([block.columns.counts for block in blocks]), COUNT)
    lengths = np.frombuffer(b"".join([block.columns.lengths for block in blocks]), COUNT)
    requests = np.repeat(np.arange(len(counts)), counts)
    sequences_of, requests_of = [block.sequences for block in blocks], [block.requests for block in blocks]
    first_sequences, first_requests = np.cumsum([0, *sequences_of])[:-1], np.cumsum([0, *requests_of])[:-1]
    rows = np.empty((len(lengths), len(COLUMNS)), np.int64)
    rows[:, LEFT], rows[:, DONE] = lengths, 0
    rows[:, NUMBER] = np.repeat(numbers, sequences_of)
    rows[:, SEQUENCE] = np.arange(len(lengths)) - np.repeat(first_sequences, sequences_of)
    rows[:, REQUEST] = requests - np.repeat(first_requests, sequences_of)
    rows[:, ORDER] = np.concatenate([block.orders for block in blocks])[requests]
    rows[:, HANDLE] = NO_HANDLE
    for first, block in zip(first_sequences.tolist(), blocks, strict=True):
        if block.handles is not None:
            rows[first : first + block.sequences, HANDLE] = block.handles
    return requests, rows
