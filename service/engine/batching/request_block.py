"""Requests that arrived together from one frontend, in columns: while they run as a whole, no request is an object.

A block has requests of one model, tenant and priority that return the same outputs. The chunks of sessions are blocks too: each is a row
with a state handle. The columns are the bytes in which the frontend sent them. Pure: nothing here knows a device, a socket or a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from service.engine.batching.due import HEAD_START_SECONDS, allowance
from service.engine.execution.cost_model import Cost
from service.errors import ServiceError
from service.ipc.blocks import COUNT, COUNT_BYTES, DEADLINE, ID, ID_BYTES, Buffer, Columns
from service.ipc.messages.inference import ANY_SESSION, NO_TENANT, BlockKey, RequestBlock, Returns, SessionOptions, Share
from service.ipc.messages.models import ModelKey

PLAIN = Returns()
SIZES = SEQUENCES, STEPS, LONGEST = range(3)
"""The columns of `request_sizes`: of each request the number of its sequences, the steps of all of them together, and of the longest."""


class BlockOwner(Protocol):
    """Receives the replies to the requests of a block: their frontend."""

    def answer(self, block: QueuedBlock, result: Any, ready: float) -> None:
        """Answer all requests of a block. result: a BlockResult; ready: when it was."""

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        """Refuse requests."""


class QueuedBlock(Struct, eq=False, dict=True, weakref=True):
    """Requests, with the totals that the scheduler needs.

    steps: of all sequences together; shortest, longest: steps of one sequence; deadline: the earliest.
    divisible: whether several batches may share the steps of a sequence.
    owner: a BlockOwner, through which the batcher answers and refuses the requests.
    timed: whether the answers tell how their batches ran.
    sessions, at, options: as in RequestBlock.
    handles: (sequences,) the state handles of the sequences; None if no sequence continues from a state or leaves one behind.
    arrived, order: when the block was queued, and how many requests arrived before its first request.
    """

    model: ModelKey
    columns: Columns
    steps: int
    shortest: int
    longest: int
    deadline: float
    priority: int = 0
    returns: Returns = PLAIN
    share: Share = NO_TENANT
    divisible: bool = True
    owner: Any = None
    timed: bool = False
    sessions: Sequence[str] = ()
    at: Sequence[int] = ()
    options: SessionOptions = ANY_SESSION
    handles: NDArray[np.int64] | None = None
    arrived: float = 0.0
    order: int = 0

    def __post_init__(self) -> None:
        self.requests = len(self.columns.ids) // ID_BYTES
        self.sequences = len(self.columns.lengths) // COUNT_BYTES
        self.head_start = self.priority * HEAD_START_SECONDS
        self._orders: NDArray[np.int64] | None = None
        self._cost: Cost | None = None

    @classmethod
    def read(cls, key: BlockKey, message: RequestBlock, data: Buffer, owner: BlockOwner, *, divisible: bool) -> QueuedBlock:
        """Return the block of a message. key: that of the message; data: the columns that follow it."""
        columns = Columns.read(data, message.requests, message.sequences, message.state_bytes)
        work = message.steps, message.shortest, message.longest, message.deadline, key.priority, key.returns
        others = key.share, divisible, owner, message.timed, message.sessions, message.at, key.options or ANY_SESSION
        return cls(*(key.model, columns, *work, *others))  # by place: keywords would cost several times as much

    def arrive(self, now: float, order: int, cost: Cost | None) -> None:
        """Note the arrival. cost: of the model's batches, None for a block that has not arrived."""
        self.arrived, self.order, self._cost = now, order, cost
        self._orders = None

    @property
    def orders(self) -> NDArray[np.int64]:
        """Return how many requests arrived before each request, (requests,). Requests that are due at the same time run in this order."""
        if self._orders is None:
            self._orders = np.arange(self.order, self.order + self.requests)
        return self._orders

    @property
    def has_states(self) -> bool:
        """Whether the requests bring states or ask for them."""
        return self.returns.state or len(self.columns.states) > 0

    @cached_property
    def ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.columns.ids, ID).tolist()
        return ids

    @cached_property
    def lengths(self) -> list[int]:
        """Return the steps of each sequence."""
        lengths: list[int] = np.frombuffer(self.columns.lengths, COUNT).tolist()
        return lengths

    @cached_property
    def deadlines(self) -> NDArray[np.float64]:
        return np.frombuffer(self.columns.deadlines, DEADLINE)

    @cached_property
    def due(self) -> NDArray[np.float64]:
        start = self.arrived - self.head_start
        assert self._cost is not None, "the block has arrived"
        if self.requests == 1:
            return np.array([start + allowance(self._cost, self.longest, self.deadline - self.arrived)])
        return start + allowance(self._cost, self.sizes[:, LONGEST], self.deadlines - self.arrived)

    @cached_property
    def first_due(self) -> float:
        """Return when the first of the requests is due."""
        return float(self.due[0] if self.requests == 1 else self.due.min())

    @cached_property
    def last_due(self) -> float:
        return float(self.due[0] if self.requests == 1 else self.due.max())

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """Return how many sequences each request has."""
        return np.frombuffer(self.columns.counts, COUNT)

    @cached_property
    def request_of(self) -> NDArray[np.int64]:
        """Return the request of each sequence, (sequences,)."""
        return np.repeat(np.arange(self.requests), self.counts)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Return the sizes of the requests, (requests, SIZES)."""
        lengths = np.frombuffer(self.columns.lengths, COUNT)
        sizes = np.empty((self.requests, len(SIZES)), np.int64)
        sizes[:, SEQUENCES] = self.counts
        if self.sequences == self.requests:
            sizes[:, STEPS:] = lengths[:, None]
            return sizes
        first = self.counts.cumsum() - self.counts
        for column, total in ((STEPS, np.add), (LONGEST, np.maximum)):
            sizes[:, column] = total.reduceat(lengths, first)
        return sizes

    @cached_property
    def first_sequences(self) -> Sequence[int]:
        """Return the first sequence of each request, and at the end the number of sequences."""
        if self.sequences == self.requests:
            return range(self.requests + 1)
        return list(accumulate(self.counts.tolist(), initial=0))

    def requests_with(self, sequences: int) -> int:
        """Return how many requests, the first of the block, have this many sequences together; 0 if no number of them has."""
        first = self.first_sequences
        return first.index(sequences) if sequences in first else 0

    @cached_property
    def _first_steps(self) -> list[int]:
        """Return the first step of each sequence, and at the end the number of steps."""
        return list(accumulate(self.lengths, initial=0))

    def select(self, indices: Sequence[int]) -> QueuedBlock:
        """Return a block of some of the requests. indices: ascending, at least one."""
        if len(indices) == self.requests:
            return self
        # Most requests that are taken together follow each other, so each column is copied in few parts.
        requests = _runs(indices)
        sequences = [(self.first_sequences[first], self.first_sequences[end]) for first, end in requests]
        steps = [(self._first_steps[first], self._first_steps[end]) for first, end in sequences]
        columns = self.columns
        block = self._with(
            Columns(
                _parts(columns.ids, requests, self.requests),
                _parts(columns.deadlines, requests, self.requests),
                _parts(columns.counts, requests, self.requests),
                _parts(columns.lengths, sequences, self.sequences),
                _parts(columns.values, steps, self.steps),
                _parts(columns.states, sequences, self.sequences),
            ),
            sessions=[self.sessions[index] for index in indices] if self.sessions else (),
            at=[self.at[index] for index in indices] if self.at else (),
            handles=None if self.handles is None else np.concatenate([self.handles[first:end] for first, end in sequences]),
        )
        block.arrive(self.arrived, int(self.orders[indices[0]]), self._cost)
        block._orders = self.orders[indices]
        return block

    def without(self, indices: Sequence[int]) -> QueuedBlock | None:
        """Return a block of the other requests, None if there are none."""
        if not indices:
            return self
        if len(indices) == self.requests:
            return None
        gone = set(indices)
        return self.select([index for index in range(self.requests) if index not in gone])

    def piece(self, request: int, sequences: Sequence[int], done: Sequence[int], steps: NDArray[np.int64]) -> QueuedBlock:
        """Return a block of some steps of sequences of one request. done: of each, the steps before them."""
        begins, columns = [self._first_steps[sequence] for sequence in sequences], self.columns
        values = [
            (begin + before, begin + before + count) for begin, before, count in zip(begins, done, steps.tolist(), strict=True)
        ]
        return self._with(
            Columns(
                _parts(columns.ids, [(request, request + 1)], self.requests),
                _parts(columns.deadlines, [(request, request + 1)], self.requests),
                np.full(1, len(steps), COUNT).tobytes(),
                steps.astype(COUNT).tobytes(),
                _parts(columns.values, values, self.steps),
            ),
            sessions=(),
            at=(),
            handles=None,
        )

    def _with(self, columns: Columns, **of_requests: Any) -> QueuedBlock:
        """Return a block of some of the work of this block. of_requests: what differs by request."""
        lengths = np.frombuffer(columns.lengths, COUNT).tolist()
        totals = {"steps": sum(lengths), "shortest": min(lengths), "longest": max(lengths)}
        deadline = min(np.frombuffer(columns.deadlines, DEADLINE).tolist())
        block = replace(self, columns=columns, deadline=deadline, **totals, **of_requests)
        block.lengths = lengths
        return block


BlockRequest = tuple[QueuedBlock, int]
"""A request of a block, by its place there."""


def arrival_of(request: BlockRequest) -> int:
    """Return how many requests arrived before a request."""
    return int(request[0].orders[request[1]])


def in_order_of_arrival(requests: Iterable[tuple[QueuedBlock, Sequence[int]]]) -> list[BlockRequest]:
    """Return the requests at these places of blocks, one by one."""
    return sorted([(block, index) for block, indices in requests for index in indices], key=arrival_of)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the end of each run of consecutive indices. indices: ascending, at least one."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return [(indices[0], indices[-1] + 1)]
    gaps = [place for place in range(1, len(indices)) if indices[place] != indices[place - 1] + 1]
    return [(indices[first], indices[end - 1] + 1) for first, end in pairwise([0, *gaps, len(indices)])]


def _parts(column: Buffer, runs: Sequence[tuple[int, int]], count: int) -> bytes:
    """Return the items of a column in some runs. count: items in the column."""
    if not count:
        return b""
    view, size = memoryview(column), len(column) // count
    return b"".join([view[size * first : size * end] for first, end in runs])
