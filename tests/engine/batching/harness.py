"""A batcher over a fake engine and a clock that stands still, and callers who remember what they were told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from service.engine.batch import Batch, Chunk
from service.engine.batching.batcher import Batcher
from service.engine.batching.sessions import Sessions
from service.engine.batching.ticket import Ticket
from service.engine.execution.cost_model import Cost
from service.engine.execution.device import DeviceLost
from service.engine.execution.in_flight import ChunkResult
from service.engine.session_state import State
from service.errors import OutOfMemory, ServiceError
from service.ipc.messages import FEATURES, IDS, ZEROS, Answer, ModelKey, Returns
from service.ipc.session_journal import SessionJournal
from service.log import Log
from service.metrics import Counter, Metrics
from tests.engine.batching.fakes import MODEL, OTHER, PLAIN, ids, limits, request

POISON = 666
ROOM = 3
IDLE_SECONDS = 60.0


class FakeEngine:
    """Adds up the ids of each sequence, and goes on with the sum in its place; a turn with a poisoned one raises."""

    accepts_batch = True
    remaining_seconds = 0.0
    per_row = Cost(1.0, 0.0, 0.001)

    def __init__(self, slots: int = 4) -> None:
        self.ran: list[list[int]] = []
        self.states: dict[ModelKey, list[list[float]]] = {key: [[0.0, 0.0] for _ in range(100)] for key in (MODEL, OTHER)}
        self._slots = slots
        self._done: list[tuple[Chunk, ChunkResult]] = []

    def cost(self, key: ModelKey) -> Cost:
        return self.per_row

    def serves(self, key: ModelKey) -> bool:
        return key in (MODEL, OTHER)

    def newest(self, name: str, version: str) -> ModelKey | None:
        return next((key for key in (MODEL, OTHER) if key.labels == (name, version)), None)

    def runs(self, key: ModelKey) -> bool:
        return False

    def streams(self, key: ModelKey) -> bool:
        return key == MODEL

    def spec(self, key: ModelKey) -> Any:
        return SimpleNamespace(sha256={"weights.safetensors": "abc"})

    def slots(self, key: ModelKey) -> tuple[int, int]:
        return self._slots, 8

    def save(self, key: ModelKey, place: int) -> State:
        return {"sum": torch.tensor(self.states[key][place])}

    def restore(self, key: ModelKey, place: int, state: State) -> None:
        self.states[key][place] = state["sum"].tolist()

    def launch(self, batch: Batch) -> None:
        rows = [np.frombuffer(chunk.data, IDS) for chunk in batch.chunks]
        self.ran.append([int(row[0]) for row in rows])
        states = self.states[batch.model]
        read = [states[chunk.source] for chunk in batch.chunks]
        for chunk, (total, count), row in zip(batch.chunks, read, rows, strict=True):
            # Before a fault, so that a turn which fails leaves behind what it wrote.
            states[chunk.slot] = [total + float(row.sum()), count + len(row)]
        assert states[ZEROS] == [0.0, 0.0]
        if any(POISON in row for row in rows):
            raise ValueError("poisoned")
        self._done += [
            (chunk, encoded(row, total, count, chunk.returns))
            for chunk, (total, count), row in zip(batch.chunks, read, rows, strict=True)
        ]

    def finished(self) -> list[tuple[Chunk, ChunkResult]]:
        done, self._done = self._done, []
        return done


def encoded(row: np.ndarray[tuple[int], np.dtype[np.int32]], total: float, count: float, returns: Returns) -> ChunkResult:
    steps = row.astype(FEATURES)[:, None]
    return ChunkResult(
        scores=np.array([[total + row.sum(), count + len(row)]], FEATURES),
        picks=None,
        embedding=steps.max(0, keepdims=True) if returns.embedding else None,
        sequence=steps if returns.sequence else None,
        steps=len(row),
    )


class EngineOfSteps(FakeEngine):
    """Gives half of each sequence's steps, a pick for each of them and no scores."""

    def launch(self, batch: Batch) -> None:
        for chunk in batch.chunks:
            picks = np.frombuffer(chunk.data, IDS)[::2, None]
            self._done.append((chunk, ChunkResult(None, picks, None, None, steps=len(picks), per_step=True)))


class EngineOfSmallMemory(FakeEngine):
    """Has no room for more than ROOM steps at once."""

    def launch(self, batch: Batch) -> None:
        if batch.tokens > ROOM:
            raise OutOfMemory(f"no memory for {batch.tokens} steps", retry_after=1)
        super().launch(batch)


class LostEngine(FakeEngine):
    """Its device does not answer any more."""

    def launch(self, batch: Batch) -> None:
        raise DeviceLost("the device is lost")


class AsynchronousEngine(FakeEngine):
    """Answers a turn when it is told that the device has done it, and takes so many at a time."""

    def __init__(self, slots: int = 4, in_flight: int = 1) -> None:
        super().__init__(slots)
        self._most_in_flight = in_flight
        self._in_flight: list[list[tuple[Chunk, ChunkResult]]] = []
        self._ready: list[tuple[Chunk, ChunkResult]] = []

    @property
    def accepts_batch(self) -> bool:  # type: ignore[override]
        return len(self._in_flight) < self._most_in_flight

    def launch(self, batch: Batch) -> None:
        super().launch(batch)
        self._in_flight.append(super().finished())

    def finished(self) -> list[tuple[Chunk, ChunkResult]]:
        ready, self._ready = self._ready, []
        return ready

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._ready)

    def end(self) -> None:
        """The device has done the turn that was launched first."""
        if self._in_flight:
            self._ready += self._in_flight.pop(0)


@dataclass
class Caller:
    """Who sent one request, and everything that he was told."""

    sequences: Sequence[Sequence[int]]
    answers: list[tuple[Answer, bytes]] = field(default_factory=list)
    errors: list[ServiceError] = field(default_factory=list)
    ticket: Ticket | None = None
    gone: bool = False

    @property
    def told(self) -> int:
        return len(self.answers) + len(self.errors)

    @property
    def sums(self) -> list[float]:
        """The one answer's first score of each sequence."""
        [(answer, data)] = self.answers
        scores = np.frombuffer(data, FEATURES, int(np.prod(answer.scores))).reshape(answer.scores)
        return [float(score) for score in scores[:, 0]]

    @property
    def expected(self) -> list[float]:
        return [float(sum(one)) for one in self.sequences]


class House:
    """A batcher over a fake engine and a clock that stands still."""

    def __init__(
        self,
        *,
        max_waiting: int = 100,
        max_batch_sequences: int = 8,
        max_batch_tokens: int = 100,
        engine: FakeEngine | None = None,
        max_sessions: int = 3,
        journal: SessionJournal | None = None,
        batch_seconds: float = 100.0,
    ) -> None:
        self.now = 0.0
        self.engine = engine or FakeEngine()
        self.metrics = Metrics()
        self.journal = journal or SessionJournal(2 * max_sessions)
        sessions = Sessions(max_sessions, IDLE_SECONDS, self.journal, self.metrics)
        limited = limits(max_waiting, max_batch_sequences, max_batch_tokens, batch_seconds)
        self.batcher = Batcher(limited, self.engine, sessions, self.metrics, lambda: self.now, Log("engine"))
        self.callers: list[Caller] = []

    def call(
        self,
        *sequences: Sequence[int],
        model: ModelKey = MODEL,
        allowed: float = 1e9,
        priority: int = 0,
        returns: Returns = PLAIN,
        lengths: Sequence[int] = (),
        session: str | None = None,
        starts: bool | None = None,
        ends: bool = False,
        exactly: bool = True,
        again: bool = False,
    ) -> Caller:
        """One request over these sequences; `lengths` are those that it states, their own when left out."""
        caller = Caller(sequences)
        self.callers.append(caller)
        asked = request(
            lengths or [len(one) for one in sequences],
            model=model,
            deadline=self.now + allowed,
            priority=priority,
            returns=returns,
            session=session,
            starts=starts,
            ends=ends,
            exactly=exactly,
        )
        caller.ticket = self.batcher.submit(
            asked,
            ids(sequences),
            lambda answer, arrays: caller.answers.append((answer, b"".join(arrays))),
            caller.errors.append,
            again=again,
        )
        return caller

    def hang_up(self, caller: Caller) -> None:
        assert caller.ticket is not None
        caller.gone = caller.gone or not caller.told
        self.batcher.cancel(caller.ticket)

    def run(self) -> None:
        """Turns until nothing waits; each takes at least one sequence, or finds them too late."""
        while not self.batcher.idle:
            assert self.batcher.step() or self.batcher.idle
        assert not self.batcher.step()

    def during_the_turn(self, act: Callable[[], object]) -> None:
        """One turn, with something that happens when its chunks have left the queue."""

        def before_launch(batch: Batch) -> None:
            act()

        self.batcher.step(before_launch)


def total(counter: Counter) -> int:
    return round(sum(values[0] for values in counter.values.values()))


def counted(counter: Counter) -> dict[str, float]:
    """A counter of one label, by its value."""
    return {label: values[0] for (label,), values in counter.values.items()}
