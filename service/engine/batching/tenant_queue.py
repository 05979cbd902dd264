"""The queued work of one tenant for one model. Requests of blocks are columns: the cost of a batch hardly grows with the queue.

Pure: nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.request_block import SEQUENCES, SIZES, STEPS, QueuedBlock, request_sizes
from service.errors import Overloaded

REQUESTS_AT_ONCE = 128
NUMBER, INDEX, ORDER = range(len(SIZES), len(SIZES) + 3)
COLUMNS = *SIZES, NUMBER, INDEX, ORDER
"""The columns of the table: the sizes of a request, the number of its block, its place in the block, and its place among all arrivals."""
NO_TABLE: tuple[NDArray[np.float64], NDArray[np.int64]] = np.empty(0), np.empty((0, len(COLUMNS)), np.int64)


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

    def covers(self, steps: int, time_left: float, head_start: float) -> bool:
        return steps >= self.steps and time_left < self.needed and head_start <= self.head_start

    def covers_each(self, steps: NDArray[np.int64], time_left: NDArray[np.float64], head_start: float) -> NDArray[np.bool_]:
        """Return which of many requests this rejection covers."""
        covers: NDArray[np.bool_] = (steps >= self.steps) & (time_left < self.needed)
        return covers & (head_start <= self.head_start)


class BlockRequest(NamedTuple):
    """One request of a queued block.

    sequences: their number; steps: of all of them together; longest: of the longest. row: its index in the block.
    queue, place: where it is queued.
    """

    due: float
    order: int
    sequences: int
    steps: int
    longest: int
    block: QueuedBlock
    row: int
    queue: TenantQueue
    place: int


class TenantQueue:
    """The queued sequences of one tenant and model, as numbers, and the requests of its blocks in the order of their due times, and then
    of their arrival.

    count, steps: of its sequences, those in blocks included; begun: how many sequences have begun.
    rejection: the last rejection since the last batch.
    A batch takes requests of many blocks. These blocks stay as they are until `blocks` is called.
    """

    def __init__(self) -> None:
        self.count = self.steps = self.begun = 0
        self.rejection: Rejection | None = None
        self.keep([])

    def keep(self, blocks: Sequence[QueuedBlock]) -> None:
        """Replace all blocks, which the caller counts. blocks: in the order of their arrival."""
        self._blocks: dict[int, QueuedBlock] = {}
        """The blocks with requests in the table, by number, in the order of their arrival."""
        self._left: dict[int, int] = {}
        """How many requests of each of them the table has."""
        self.arrived = list(blocks)
        """Blocks with requests that are not in the table yet. A block that arrives after the others is added here."""
        self._number = 0
        self._due, self._table = NO_TABLE
        self._cut = False
        """Whether a batch has taken some of the requests of a block."""

    @property
    def divisible(self) -> bool:
        """Whether several batches may share the steps of a sequence, which holds for all requests of a model."""
        return next(chain(self._blocks.values(), self.arrived)).divisible

    def blocks(self) -> list[QueuedBlock]:
        """Return the blocks without the requests that batches have taken, in the order of their arrival."""
        if self._cut:
            numbers, places = self._table[:, NUMBER], self._table[:, INDEX]
            left = self._selected(self._by_block(np.lexsort((places, numbers))))
            self.keep([*left, *self.arrived])
        return [*self._blocks.values(), *self.arrived]

    def first(self, most: int) -> NDArray[np.int64]:
        """Return the table of the first requests, (requests, COLUMNS)."""
        self._join()
        return self._table[:most]

    def work(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return when each request is due, in order, and its sequences and steps, (requests, 2)."""
        self._join()
        return self._due, self._table[:, [SEQUENCES, STEPS]]

    def requests(self) -> Iterator[BlockRequest]:
        """Return the requests as they are now."""
        self._join()
        due, table, blocks = self._due, self._table, self._blocks
        # In parts, because a batch usually takes only the first requests.
        for begin in range(0, len(table), REQUESTS_AT_ONCE):
            part = slice(begin, begin + REQUESTS_AT_ONCE)
            rows = zip(due[part].tolist(), table[part].tolist(), strict=True)
            for place, (moment, (sequences, steps, longest, number, index, order)) in enumerate(rows, begin):
                yield BlockRequest(moment, order, sequences, steps, longest, blocks[number], index, self, place)

    def take(self, whole: Sequence[int], divided: Sequence[int] = ()) -> list[QueuedBlock]:
        """Remove the requests at these places, and return the requests of `whole` in blocks."""
        self._join()
        chosen = self._by_block(whole)
        blocks = self._selected(chosen)
        for number, indices in [*chosen.items(), *self._by_block(divided).items()]:
            self._left[number] -= len(indices)
            if not self._left[number]:
                del self._left[number], self._blocks[number]
            else:
                self._cut = True
        taken = [*whole, *divided]
        if max(taken) == len(taken) - 1:
            self._due, self._table = self._due[len(taken) :], self._table[len(taken) :]
        else:
            stays = np.ones(len(self._table), bool)
            stays[taken] = False
            self._due, self._table = self._due[stays], self._table[stays]
        return blocks

    def _by_block(self, places: Sequence[int] | NDArray[Any]) -> dict[int, list[int]]:
        """Return the requests at these places: their places in their block, by its number."""
        chosen: dict[int, list[int]] = {}
        if len(places):
            rows = self._table.take(places, axis=0)
            for number, index in zip(rows[:, NUMBER].tolist(), rows[:, INDEX].tolist(), strict=True):
                chosen.setdefault(number, []).append(index)
        return chosen

    def _selected(self, chosen: dict[int, list[int]]) -> list[QueuedBlock]:
        return [self._blocks[number].select(sorted(indices)) for number, indices in chosen.items()]

    def _join(self) -> None:
        """Put the requests of the blocks that have arrived in their places in the table."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return
        numbers = range(self._number, self._number + len(arrived))
        self._number = numbers.stop
        self._blocks.update(zip(numbers, arrived, strict=True))
        self._left.update({number: block.requests for number, block in zip(numbers, arrived, strict=True)})
        due = np.concatenate([self._due, *[block.due for block in arrived]])
        # Requests that are due at the same time stay in the order of their arrival.
        in_order = due.argsort(kind="stable")
        self._due = due[in_order]
        # `take` copies whole rows, several times as fast as an index.
        self._table = np.concatenate([self._table, _table(arrived, numbers)]).take(in_order, axis=0)


def _table(blocks: Sequence[QueuedBlock], numbers: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows of the requests of some blocks."""
    if all(block.requests == 1 for block in blocks):  # cheaper than the columns of few requests
        pairs = zip(blocks, numbers, strict=True)
        rows = ((block.sequences, block.steps, block.longest, number, 0, block.order) for block, number in pairs)
        return np.array(list(rows), np.int64)
    sizes, requests = request_sizes(blocks), np.array([block.requests for block in blocks])
    first_requests = requests.cumsum() - requests
    table = np.empty((len(sizes), len(COLUMNS)), np.int64)
    table[:, : len(SIZES)] = sizes
    table[:, NUMBER] = np.repeat(numbers, requests)
    table[:, INDEX] = np.arange(len(sizes)) - np.repeat(first_requests, requests)
    table[:, ORDER] = np.concatenate([block.orders for block in blocks])
    return table
