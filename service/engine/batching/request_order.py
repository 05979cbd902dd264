"""The queued requests of blocks in columns, in the order in which they run: the cost of a batch hardly grows with the queue.

Pure: nothing here knows a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.batching.request_block import SEQUENCES, SIZES, STEPS, QueuedBlock, Row, request_sizes
from service.ipc.messages.inference import Share

REQUESTS_AT_ONCE = 128
NUMBER, INDEX, ORDER = range(len(SIZES), len(SIZES) + 3)
COLUMNS = *SIZES, NUMBER, INDEX, ORDER
"""The columns of the table: the sizes of a request, the number of its block, its place in the block, and its place among all arrivals."""
NO_TABLE: tuple[NDArray[np.float64], NDArray[np.int64]] = np.empty(0), np.empty((0, len(COLUMNS)), np.int64)


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """One request of a queued block. queue, place: where it is queued."""

    queue: RequestOrder
    place: int
    block: QueuedBlock
    index: int

    @property
    def row(self) -> Row:
        return self.block.rows[self.index]

    @property
    def due(self) -> float:
        return float(self.block.due[self.index])

    @property
    def order(self) -> int:
        return int(self.block.orders[self.index])

    @property
    def share(self) -> Share:
        return self.block.share


class RequestOrder:
    """The requests of one tenant's blocks for one model, in the order of their due times, and then of their arrival.

    A batch takes requests of many blocks. These blocks stay as they are until `blocks` is called.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._blocks: dict[int, QueuedBlock] = {}
        """The blocks with requests in the table, by number, in the order of their arrival."""
        self._left: dict[int, int] = {}
        """How many requests of each of them the table has."""
        self._arrived: list[QueuedBlock] = []
        """Blocks with requests that are not in the table yet."""
        self._number = 0
        self._due, self._table = NO_TABLE
        self._cut = False
        """Whether a batch has taken some of the requests of a block."""

    @property
    def divisible(self) -> bool:
        """Whether several batches may share the steps of a sequence, which holds for all requests of a model."""
        return next(chain(self._blocks.values(), self._arrived)).divisible

    def add(self, block: QueuedBlock) -> None:
        """Add a block that has arrived after the others."""
        self._arrived.append(block)

    def keep(self, blocks: Sequence[QueuedBlock]) -> None:
        """Replace all blocks. blocks: in the order of their arrival."""
        self._clear()
        self._arrived.extend(blocks)

    def blocks(self) -> list[QueuedBlock]:
        """Return the blocks without the requests that batches have taken, in the order of their arrival."""
        if self._cut:
            numbers, places = self._table[:, NUMBER], self._table[:, INDEX]
            left = self._selected(self._by_block(np.lexsort((places, numbers))))
            self.keep([*left, *self._arrived])
        return [*self._blocks.values(), *self._arrived]

    def first(self, most: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return when the first requests are due, and their table, (requests, COLUMNS)."""
        self._join()
        return self._due[:most], self._table[:most]

    def request(self, place: int) -> BlockRequest:
        """Return the request at a place of the table."""
        number, index = self._table[place, [NUMBER, INDEX]].tolist()
        return BlockRequest(self, place, self._blocks[number], index)

    def work(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return when each request is due, in order, and its sequences and steps, (requests, 2)."""
        self._join()
        return self._due, self._table[:, [SEQUENCES, STEPS]]

    def requests(self) -> Iterator[BlockRequest]:
        """Return the requests as they are now."""
        self._join()
        table, blocks = self._table, self._blocks
        # In parts, because a batch usually takes only the first requests.
        for begin in range(0, len(table), REQUESTS_AT_ONCE):
            part = table[begin : begin + REQUESTS_AT_ONCE, [NUMBER, INDEX]].tolist()
            for place, (number, index) in enumerate(part, begin):
                yield BlockRequest(self, place, blocks[number], index)

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
        arrived, self._arrived = self._arrived, []
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
