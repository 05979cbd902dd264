"""A batcher with a fake engine and a clock that the test moves, clients that keep their replies, and short constructors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from service.engine.batch import Batch
from service.engine.batching.batcher import Batcher
from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.scheduler import ScheduledBatch, Scheduler
from service.engine.batching.selection import SchedulerLimits
from service.engine.batching.session_state import State
from service.engine.batching.session_table import SessionTable
from service.engine.batching.state_cache import StateCache
from service.engine.batching.state_slots import ZERO_SLOT
from service.engine.batching.stored_sessions import StoredSessions
from service.engine.execution.cost_model import Cost
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import Array, BlockResult, EndObserver, FinishedBatch
from service.engine.execution.served_models import PreparedModel
from service.engine.frontend_channel import answer_message
from service.engine.internal_errors import InternalErrors
from service.errors import OutOfMemory, ServiceError
from service.ipc import session_file
from service.ipc.blocks import COUNT, DEADLINE, ID, Columns, split_answers
from service.ipc.messages.inference import FEATURES, IDS, NO_TENANT, Answer, LoadedModel, Returns, SessionOptions, Share
from service.ipc.messages.models import ModelKey
from service.ipc.session_journal import SessionJournal
from service.log import Log
from service.metrics import Counter, Metrics

MODEL = ModelKey("words", "1")
OTHER = ModelKey("sensors", "1")
PLAIN = Returns()
NEVER = 1e9
COST = Cost(1.0, 0.0, 0.0)
"""Every batch costs the same, so the time budget never limits its steps."""


LIMITS = SchedulerLimits(max_waiting=100, max_batch_sequences=8, max_batch_tokens=100, batch_seconds=100.0)


class FakeStates:
    """The states of a scheduler. free: room for more; in_use: the handles in use; behind: whether a chunk waits for its session."""

    def __init__(self, room: int = 1000, *in_use: int) -> None:
        self.free, self.in_use, self.behind = room, set(in_use), bool(in_use)

    def room(self, model: ModelKey) -> int:
        return self.free

    def any_behind(self, model: ModelKey) -> bool:
        return self.behind

    def busy(self, handles: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.isin(handles, list(self.in_use))


def scheduler(cost: Cost = COST, states: FakeStates | None = None, **limits: Any) -> Scheduler:
    """limits: other values than in LIMITS."""
    return Scheduler(replace(LIMITS, **limits), lambda _: cost, states or FakeStates())


class ScheduledRow(NamedTuple):
    """Steps of a sequence in a batch. number: of the sequence in its request; first, last: whether they are its first and its last."""

    id: int
    number: int
    steps: int
    first: bool
    last: bool


def scheduled_rows(batch: ScheduledBatch | None) -> list[ScheduledRow]:
    """Return the rows of a batch, by their requests' ids."""
    assert batch is not None
    rows = [
        ScheduledRow(block.ids[request], number - block.first_sequences[request], block.lengths[number], True, True)
        for block in batch.blocks
        for number, request in enumerate(block.request_of.tolist())
    ]
    for piece in batch.pieces:
        id, first = piece.block.ids[piece.request], piece.block.first_sequences[piece.request]
        for sequence, done, steps, last in zip(*[column.tolist() for column in piece[2:]], strict=True):
            rows.append(ScheduledRow(id, sequence - first, steps, not done, last))
    return sorted(rows)


def ids(sequences: Sequence[Sequence[int]]) -> bytes:
    """Return sequences of token ids in the format of the frontend."""
    return b"".join(np.array(sequence, IDS).tobytes() for sequence in sequences)


def block(
    requests: Sequence[tuple[int, float, Sequence[int]]],
    values: bytes = b"",
    states: bytes = b"",
    *,
    model: ModelKey = MODEL,
    priority: int = 0,
    returns: Returns = PLAIN,
    share: Share = NO_TENANT,
    divisible: bool = False,
    owner: object = None,
    **others: Any,
) -> QueuedBlock:
    """Return a block. requests: the id, the deadline and the lengths of each; values: others: as in QueuedBlock."""
    lengths = [steps for _, _, of_request in requests for steps in of_request]
    columns = Columns(
        np.array([id for id, _, _ in requests], ID).tobytes(),
        np.array([deadline for _, deadline, _ in requests], DEADLINE).tobytes(),
        np.array([len(of_request) for _, _, of_request in requests], COUNT).tobytes(),
        np.array(lengths, COUNT).tobytes(),
        values or bytes(np.dtype(IDS).itemsize * sum(lengths)),
        states,
    )
    return QueuedBlock(
        model,
        columns,
        steps=sum(lengths),
        shortest=min(lengths, default=0),
        longest=max(lengths, default=0),
        deadline=min(deadline for _, deadline, _ in requests),
        priority=priority,
        returns=returns,
        share=share,
        divisible=divisible,
        owner=owner,
        **others,
    )


Ids = np.ndarray[tuple[int], np.dtype[np.int32]]
POISON = 666
OVERFLOW = 777
"""Id that leads to a state that is not finite."""
ROOM = 3
IDLE_SECONDS = 60.0


class FakeEngine(DeviceEngine):
    """An engine whose state is the sum and the number of a sequence's ids. A batch that contains POISON raises. OVERFLOW is infinite."""

    accepts_batch = True
    remaining_seconds = 0.0
    running: tuple[float, float] | None = None
    device = torch.device("cpu")
    busy_seconds = 0.0
    per_row = Cost(1.0, 0.0, 0.001)

    def __init__(self, slots: int = 4) -> None:
        self.ran: list[list[int]] = []
        """The first id of each chunk, by batch."""
        self.served = [MODEL, OTHER]
        self.states: dict[ModelKey, list[list[float]]] = {key: [[0.0, 0.0] for _ in range(100)] for key in self.served}
        self.observer: EndObserver | None = None
        self._slots = slots, 24
        self._done: list[FinishedBatch] = []

    def loaded(self) -> list[LoadedModel]:
        return [LoadedModel(*key.labels, str(self.device), [], generation=key.generation) for key in self.served]

    def serves(self, key: ModelKey) -> bool:
        return key in self.served

    def newest(self, name: str, version: str) -> ModelKey | None:
        return next((key for key in self.served if key.labels == (name, version)), None)

    def spec(self, key: ModelKey) -> Any:
        return SimpleNamespace(sha256={"weights.safetensors": "abc"}, states={"sum": 2})

    def streams(self, key: ModelKey) -> bool:
        return key == MODEL

    def whole_only(self, key: ModelKey) -> tuple[str, ...]:
        return ("layers.0 (lstm)",)

    def open(self, key: ModelKey, prepared: PreparedModel) -> None:
        self.served.append(key)

    def close(self, key: ModelKey) -> None:
        self.served.remove(key)

    def slots(self, key: ModelKey) -> tuple[int, int]:
        return self._slots

    def save(self, key: ModelKey, slot: int) -> State:
        return {"sum": torch.tensor(self.states[key][slot])}

    def restore(self, key: ModelKey, slot: int, state: State) -> None:
        self.states[key][slot] = state["sum"].tolist()

    def state_vectors(self, key: ModelKey, slots: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> bytes:
        return np.array([self.states[key][slot] for slot in slots], FEATURES).tobytes()

    def state_from(self, key: ModelKey, vector: bytes | memoryview) -> State:
        return {"sum": torch.tensor(np.frombuffer(vector, FEATURES).tolist())}

    def known_answer(self, key: ModelKey) -> list[Array]:
        return [np.zeros(1, FEATURES)]

    def runs(self, key: ModelKey) -> bool:
        return False

    def cost(self, key: ModelKey) -> Cost:
        return self.per_row

    def predicted_seconds(self, batch: Batch) -> float:
        return self.cost(batch.model).of(batch.longest, batch.tokens)

    def launch(self, batch: Batch) -> None:
        in_blocks = [rows_of(block) for block in batch.blocks]
        rows = [row for block_rows in in_blocks for row in block_rows]
        self.ran.append([int(row[0]) for row in rows])
        states, totals = self.states[batch.model], [(0.0, 0.0)] * len(rows)
        if batch.read_slots is not None and batch.write_slots is not None:
            totals = [(states[slot][0], states[slot][1]) for slot in batch.read_slots]
            for slot, (total, count), row in zip(batch.write_slots, totals, rows, strict=True):
                # Written before the failure: a batch that fails on a device leaves its writes behind too.
                states[slot] = [total + value_of(row), count + len(row)]
        assert states[ZERO_SLOT] == [0.0, 0.0]
        if any(POISON in row for row in rows):
            raise ValueError("poisoned")
        self.end(batch, [self.run(row, *total) for row, total in zip(rows, totals, strict=True)])

    def run(self, row: Ids, total: float, count: float) -> BlockResult:
        """Return the result of one sequence that continues from a state, with every output."""
        steps, sum = row.astype(FEATURES)[:, None], total + value_of(row)
        scores = np.array([[sum, count + len(row)]], FEATURES)
        return BlockResult(scores, None, steps.max(0, keepdims=True), steps, np.array([len(row)], COUNT).tobytes())

    def end(self, batch: Batch, rows: list[BlockResult]) -> None:
        """Finish a batch with the results of its rows."""
        first, results = 0, []
        for block in batch.blocks:
            results.append(of_block(block, rows[first : first + block.sequences]))
            first += block.sequences
        finite = np.array([row.scores is None or bool(np.isfinite(row.scores).all()) for row in rows])
        self._done.append(FinishedBatch(batch, results, None if batch.whole or finite.all() else finite))

    def finished(self) -> list[FinishedBatch]:
        done, self._done = self._done, []
        return done

    def watch(self, observer: EndObserver | None) -> None:
        self.observer = observer

    def count_memory(self) -> None:
        pass

    count_ended = count_memory


def value_of(row: Ids) -> float:
    """Return the sum of ids."""
    return math.inf if OVERFLOW in row else float(row.sum())


def rows_of(block: QueuedBlock) -> list[Ids]:
    """Return the ids of each sequence of a block."""
    values: Ids = np.frombuffer(block.columns.values, IDS)
    if len(values) != block.steps:
        raise ValueError("the values do not match the lengths")
    return np.split(values, np.cumsum(block.lengths)[:-1])


def of_block(block: QueuedBlock, rows: list[BlockResult]) -> BlockResult:
    """Return the result of a block of sequences with these results."""

    def joined(name: str, *, returned: bool = True) -> Any:
        arrays = [getattr(row, name) for row in rows]
        return None if arrays[0] is None or not returned else np.concatenate(arrays)

    return BlockResult(
        joined("scores"),
        joined("picks"),
        joined("embedding", returned=block.returns.embedding),
        joined("sequence", returned=block.returns.sequence),
        b"".join([bytes(row.steps) for row in rows]),
        rows[0].per_step,
    )


class EngineOfSteps(FakeEngine):
    """Returns every second step of each sequence, with a pick per step and no scores."""

    def run(self, row: Ids, total: float, count: float) -> BlockResult:
        steps = np.array([len(row[::2])], COUNT).tobytes()
        return BlockResult(None, row[::2, None], None, None, steps, per_step=True)


class EngineOfSmallMemory(FakeEngine):
    """Has memory for batches of up to ROOM steps."""

    failures = 0

    def launch(self, batch: Batch) -> None:
        if batch.tokens > ROOM:
            self.failures += 1
            raise OutOfMemory(f"no memory for {batch.tokens} steps", retry_after=1)
        super().launch(batch)


class AsynchronousEngine(FakeEngine):
    """Finishes a batch when the test calls `end_batch`, with up to `in_flight` batches at once."""

    def __init__(self, slots: int = 4, in_flight: int = 1) -> None:
        super().__init__(slots)
        self._most_in_flight = in_flight
        self._launched: list[list[FinishedBatch]] = []
        self._ready: list[FinishedBatch] = []

    @property
    def accepts_batch(self) -> bool:  # type: ignore[override]
        return len(self._launched) < self._most_in_flight

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        self._launched.append(super().finished())

    def finished(self) -> list[FinishedBatch]:
        ready, self._ready = self._ready, []
        return ready

    @property
    def busy(self) -> bool:
        return bool(self._launched or self._ready)

    def end_batch(self) -> None:
        """Finish the oldest batch in flight."""
        if self._launched:
            self._ready += self._launched.pop(0)


@dataclass
class FakeClient:
    """A client with one request, and all replies to it."""

    sequences: Sequence[Sequence[int]]
    answers: list[tuple[Answer, bytes]] = field(default_factory=list)
    errors: list[ServiceError] = field(default_factory=list)
    disconnected: bool = False

    @property
    def replies(self) -> int:
        return len(self.answers) + len(self.errors)

    @property
    def sums(self) -> list[float]:
        """The first score of each sequence in the only answer."""
        [(answer, data)] = self.answers
        scores = np.frombuffer(data, FEATURES, int(np.prod(answer.scores))).reshape(answer.scores)
        return [float(score) for score in scores[:, 0]]

    @property
    def expected(self) -> list[float]:
        return [float(sum(sequence)) for sequence in self.sequences]


class FakeFrontend:
    """The owner of blocks: passes their replies to the clients."""

    def __init__(self) -> None:
        self.clients: dict[int, FakeClient] = {}

    def add(self, client: FakeClient) -> int:
        """Return the id of a new request."""
        self.clients[len(self.clients)] = client
        return len(self.clients) - 1

    def answer(self, block: QueuedBlock, result: BlockResult, ready: float) -> None:
        message, columns = answer_message(block, result, ready)
        for id, answer, data in split_answers(message, b"".join(columns)):
            if not self.clients[id].disconnected:
                self.clients[id].answers.append((answer, bytes(data)))

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        for id in ids:
            self.clients[id].errors.append(error)


class BatcherHarness:
    """A batcher with a fake engine and a clock that the test moves."""

    def __init__(
        self,
        *,
        engine: FakeEngine | None = None,
        max_sessions: int = 3,
        journal: SessionJournal | None = None,
        checkpoint_chunks: int = 0,
        **limits: Any,
    ) -> None:
        """checkpoint_chunks: chunks between two saves, 0 for an engine without a session store. limits: other values than in LIMITS."""
        self.now = 0.0
        self.engine = engine or FakeEngine()
        self.metrics = Metrics()
        self.journal = journal or SessionJournal(2 * max_sessions)
        self.states = StateCache(self.engine, self.metrics)
        sessions = SessionTable(max_sessions, IDLE_SECONDS, self.journal, self.metrics, self.states)
        scheduler_limits = replace(LIMITS, **limits)
        errors = InternalErrors(Log("engine"), self.metrics, lambda: self.now)
        self.stored = None
        if checkpoint_chunks:
            self.stored = StoredSessions(
                sessions, lambda: self.now, max_waiting=scheduler_limits.max_waiting, checkpoint_chunks=checkpoint_chunks
            )
        self.batcher = Batcher(scheduler_limits, self.engine, sessions, self.metrics, lambda: self.now, errors, self.stored)
        self.clients: list[FakeClient] = []
        self.frontend = FakeFrontend()

    def call(
        self,
        *sequences: Sequence[int],
        allowed: float = 1e9,
        lengths: Sequence[int] = (),
        session: str | None = None,
        at: int | None = None,
        model: ModelKey = MODEL,
        initial: bytes = b"",
        starts: bool | None = None,
        **options: Any,
    ) -> FakeClient:
        """Submit a request with these sequences. lengths: the claimed lengths; options: as in SessionOptions or `block`."""
        client = FakeClient(sequences)
        self.clients.append(client)
        of_session = {name: options.pop(name) for name in SessionOptions.__struct_fields__ if name in options}
        requests = [(self.frontend.add(client), self.now + allowed, lengths or [len(sequence) for sequence in sequences])]
        made = block(
            requests,
            ids(sequences),
            initial,
            model=model,
            divisible=self.engine.streams(model),
            owner=self.frontend,
            sessions=[] if session is None else [session],
            at=[] if at is None else [at],
            options=SessionOptions(starts, **of_session),
            **options,
        )
        self.batcher.submit(made)
        return client

    def disconnect(self, client: FakeClient) -> None:
        client.disconnected = client.disconnected or not client.replies
        [id] = [id for id, other in self.frontend.clients.items() if other is client]
        self.batcher.cancel(self.frontend, id)

    def import_state(self, session: str, exported: bytes) -> None:
        """Open a session with an exported file, as a frontend does."""
        file = session_file.read(exported)
        self.batcher.sessions.import_state(session, file.origin, file.tensors, file.data)

    def run(self) -> None:
        """Run batches until no sequence waits. Each step launches a batch or empties the queue of late sequences."""
        while not self.batcher.idle:
            assert self.batcher.step() or self.batcher.idle
        assert not self.batcher.step()

    def during_batch(self, act: Callable[[], object]) -> None:
        """Run a batch, and call `act` when its chunks have left the queue."""

        def before_launch(batch: Batch) -> None:
            act()

        self.batcher.step(before_launch)


def total(counter: Counter) -> int:
    return round(sum(values[0] for values in counter.values.values()))


def counted(counter: Counter) -> dict[str, float]:
    """Return the values of a counter with one label."""
    return {label: values[0] for (label,), values in counter.values.items()}
