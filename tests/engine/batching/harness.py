"""A batcher with a fake engine and a clock that the test moves, clients that keep their replies, and short constructors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from service.engine.batch import Batch
from service.engine.batching.batch_builder import SchedulerLimits
from service.engine.batching.batcher import Batcher
from service.engine.batching.model_queue import QueuedSequence
from service.engine.batching.request_block import QueuedBlock
from service.engine.batching.scheduler import Scheduler
from service.engine.batching.session_state import State
from service.engine.batching.session_table import SessionTable
from service.engine.batching.state_slots import ZERO_SLOT
from service.engine.batching.stored_sessions import StoredSessions
from service.engine.batching.ticket import Ticket
from service.engine.execution.cost_model import Cost
from service.engine.execution.device_engine import DeviceEngine, PreparedModel
from service.engine.execution.in_flight import Array, BlockResult, ChunkResult, EndObserver, FinishedPart
from service.engine.internal_errors import InternalErrors
from service.errors import OutOfMemory, ServiceError
from service.ipc import session_file
from service.ipc.blocks import COUNT, DEADLINE, ID, Columns, split_answers
from service.ipc.messages.inference import FEATURES, IDS, NO_TENANT, Answer, AnswerBlock, LoadedModel, Request, Returns, Share
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


def sequences(*steps: int, deadline: float = NEVER, divisible: bool = False, **options: Any) -> list[QueuedSequence]:
    return [QueuedSequence(count, deadline, divisible=divisible, **options) for count in steps]


def scheduler(cost: Cost = COST, room: int = 1000, **limits: Any) -> Scheduler[QueuedSequence]:
    """limits: other values than in LIMITS."""
    return Scheduler(replace(LIMITS, **limits), lambda _: cost, lambda _: room)


def request(
    lengths: Sequence[int],
    *,
    model: ModelKey = MODEL,
    deadline: float = NEVER,
    starts: bool | None = None,
    ends: bool = False,
    at: int | None = None,
    opens: bool = True,
    **others: Any,
) -> Request:
    """Return a request. starts, ends, at, opens: of its session; others: as in Request."""
    session = {"session_starts": starts, "session_ends": ends, "session_at": at, "opens_session": opens}
    key = {"generation": model.generation, "exactly": True}
    return Request(*model.labels, list(lengths), deadline, sent=0.0, **(key | session | others))


def ids(sequences: Sequence[Sequence[int]]) -> bytes:
    """Return sequences of token ids in the format of the frontend."""
    return b"".join(np.array(sequence, IDS).tobytes() for sequence in sequences)


def block(
    requests: Sequence[tuple[int, float, Sequence[int]]],
    values: bytes = b"",
    *,
    model: ModelKey = MODEL,
    priority: int = 0,
    returns: Returns = PLAIN,
    share: Share = NO_TENANT,
    divisible: bool = False,
    owner: object = None,
) -> QueuedBlock:
    """Return a block. requests: the id, the deadline and the lengths of each; values: their token ids, zeros by default."""
    lengths = [steps for _, _, of_request in requests for steps in of_request]
    columns = Columns(
        np.array([id for id, _, _ in requests], ID).tobytes(),
        np.array([deadline for _, deadline, _ in requests], DEADLINE).tobytes(),
        np.array([len(of_request) for _, _, of_request in requests], COUNT).tobytes(),
        np.array(lengths, COUNT).tobytes(),
        values or bytes(np.dtype(IDS).itemsize * sum(lengths)),
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
    )


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
        self._slots = slots, 8
        self._done: list[FinishedPart] = []

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

    def state_vector(self, key: ModelKey, slot: int) -> bytes:
        return np.array(self.states[key][slot], FEATURES).tobytes()

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
        rows = [np.frombuffer(chunk.data, IDS) for chunk in batch.chunks]
        together = [row for block_rows in in_blocks for row in block_rows] + rows
        self.ran.append([int(row[0]) for row in together])
        states = self.states[batch.model]
        read = [states[chunk.read_slot] for chunk in batch.chunks]
        for chunk, (total, count), row in zip(batch.chunks, read, rows, strict=True):
            # Written before the failure: a batch that fails on a device leaves its writes behind too.
            states[chunk.write_slot] = [total + value_of(row), count + len(row)]
        assert states[ZERO_SLOT] == [0.0, 0.0]
        if any(POISON in row for row in together):
            raise ValueError("poisoned")
        self._done += [
            (block, of_block([result_of(row, 0, 0, block.returns) for row in block_rows]))
            for block, block_rows in zip(batch.blocks, in_blocks, strict=True)
        ]
        self._done += [
            (chunk, result_of(row, total, count, chunk.returns))
            for chunk, (total, count), row in zip(batch.chunks, read, rows, strict=True)
        ]

    def finished(self) -> list[FinishedPart]:
        done, self._done = self._done, []
        return done

    def watch(self, observer: EndObserver | None) -> None:
        self.observer = observer

    def count_memory(self) -> None:
        pass


def result_of(row: np.ndarray[tuple[int], np.dtype[np.int32]], total: float, count: float, returns: Returns) -> ChunkResult:
    steps = row.astype(FEATURES)[:, None]
    sum = total + value_of(row)
    return ChunkResult(
        scores=np.array([[sum, count + len(row)]], FEATURES),
        picks=None,
        embedding=steps.max(0, keepdims=True) if returns.embedding else None,
        sequence=steps if returns.sequence else None,
        steps=len(row),
        finite=math.isfinite(sum),
    )


def value_of(row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
    """Return the sum of ids."""
    return math.inf if OVERFLOW in row else float(row.sum())


def rows_of(block: QueuedBlock) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Return the ids of each sequence of a block."""
    values: np.ndarray[tuple[int], np.dtype[np.int32]] = np.frombuffer(block.columns.values, IDS)
    if len(values) != block.steps:
        raise ValueError("the values do not match the lengths")
    return np.split(values, np.cumsum(block.lengths)[:-1])


def of_block(results: list[ChunkResult]) -> BlockResult:
    """Return the result of a block of sequences with these results."""

    def joined(name: str) -> Any:
        arrays = [getattr(result, name) for result in results]
        return None if arrays[0] is None else np.concatenate(arrays)

    steps = np.array([result.steps for result in results], COUNT).tobytes()
    return BlockResult(joined("scores"), joined("picks"), joined("embedding"), joined("sequence"), steps, results[0].per_step)


class EngineOfSteps(FakeEngine):
    """Returns every second step of each sequence, with a pick per step and no scores."""

    def launch(self, batch: Batch) -> None:
        def every_second(row: np.ndarray[tuple[int], np.dtype[np.int32]]) -> ChunkResult:
            return ChunkResult(None, row[::2, None], None, None, steps=len(row[::2]), per_step=True)

        self._done += [(block, of_block([every_second(row) for row in rows_of(block)])) for block in batch.blocks]
        self._done += [(chunk, every_second(np.frombuffer(chunk.data, IDS))) for chunk in batch.chunks]


class EngineOfSmallMemory(FakeEngine):
    """Has memory for batches of up to ROOM steps."""

    failures = 0

    def launch(self, batch: Batch) -> None:
        if batch.tokens > ROOM:
            self.failures += 1
            raise OutOfMemory(f"no memory for {batch.tokens} steps", retry_after=1)
        super().launch(batch)


class AsynchronousEngine(FakeEngine):
    """Finishes a batch when the test calls `end`, with up to `in_flight` batches at once."""

    def __init__(self, slots: int = 4, in_flight: int = 1) -> None:
        super().__init__(slots)
        self._most_in_flight = in_flight
        self._launched_parts: list[list[FinishedPart]] = []
        self._ready: list[FinishedPart] = []

    @property
    def accepts_batch(self) -> bool:  # type: ignore[override]
        return len(self._launched_parts) < self._most_in_flight

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        self._launched_parts.append(super().finished())

    def finished(self) -> list[FinishedPart]:
        ready, self._ready = self._ready, []
        return ready

    @property
    def busy(self) -> bool:
        return bool(self._launched_parts or self._ready)

    def end(self) -> None:
        """Finish the oldest batch in flight."""
        if self._launched_parts:
            self._ready += self._launched_parts.pop(0)


@dataclass
class FakeClient:
    """A client with one request, and all replies to it."""

    sequences: Sequence[Sequence[int]]
    answers: list[tuple[Answer, bytes]] = field(default_factory=list)
    errors: list[ServiceError] = field(default_factory=list)
    ticket: Ticket | None = None
    disconnected: bool = False

    def receive_answer(self, answer: Answer, arrays: list[bytes]) -> None:
        self.answers.append((answer, b"".join(arrays)))

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
        arrays = [array for array in result[:4] if array is not None]
        scores, picks, embedding, sequence = [() if array is None else array.shape for array in result[:4]]
        answer = AnswerBlock(block.requests, block.sequences, scores, picks, embedding, sequence, result.per_step, ready)
        data = b"".join((block.columns.ids, block.columns.counts, result.steps, *[array.tobytes() for array in arrays]))
        for id, of_request, values in split_answers(answer, data):
            if not self.clients[id].disconnected:
                self.clients[id].answers.append((of_request, bytes(values)))

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        for id in ids:
            self.clients[id].errors.append(error)

    def open_ticket(self, id: int, request: Request) -> Ticket:
        client = self.clients[id]
        client.ticket = Ticket(request, client.receive_answer, client.errors.append)
        return client.ticket


class BatcherHarness:
    """A batcher with a fake engine and a clock that the test moves.

    in_blocks: whether requests without a session arrive in blocks, as from a frontend, or one by one with a ticket.
    """

    in_blocks = True

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
        sessions = SessionTable(max_sessions, IDLE_SECONDS, self.journal, self.metrics)
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
        again: bool = False,
        **options: Any,
    ) -> FakeClient:
        """Submit a request with these sequences. lengths: the claimed lengths; options: as in `request` or `block`."""
        client = FakeClient(sequences)
        self.clients.append(client)
        lengths, data = lengths or [len(sequence) for sequence in sequences], ids(sequences)
        if self.in_blocks and session is None:
            requests = [(self.frontend.add(client), self.now + allowed, lengths)]
            options["divisible"] = self.engine.streams(options.get("model", MODEL))
            self.batcher.submit_block(block(requests, data, owner=self.frontend, **options))
            return client
        sent = request(lengths, deadline=self.now + allowed, session=session, **options)
        client.ticket = self.batcher.submit(sent, data, client.receive_answer, client.errors.append, again=again)
        return client

    def disconnect(self, client: FakeClient) -> None:
        client.disconnected = client.disconnected or not client.replies
        if client.ticket is not None:
            self.batcher.cancel(client.ticket)
        else:
            [id] = [id for id, other in self.frontend.clients.items() if other is client]
            self.batcher.cancel_request(self.frontend, id)

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
