"""An open loop on one engine and its queue, in one process, without frontends: used by the scenario `engine`."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.bench import questions
from loadtest.generator.arrivals import poisson
from loadtest.scenarios.engine_host import NO_DEADLINE
from service.engine.batching.batcher import Batcher
from service.engine.batching.request_block import RequestBlock
from service.engine.batching.ticket import Ticket
from service.engine.build import build_batcher
from service.engine.execution.device_engine import DeviceEngine
from service.engine.execution.in_flight import BlockResult
from service.engine.internal_errors import InternalErrors
from service.engine.worker import LAG_SECONDS, MOST_READ
from service.errors import ServiceError
from service.ipc.blocks import COUNT, DEADLINE, ID, Columns
from service.ipc.messages import IDS, Answer, ModelKey, Request
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings

SHORT, LONG, LONG_SHARE = 10, 4096, 0.01
"""Time steps of the short and the long sequences of the mixture, and the share of long sequences."""
FULL, MAX_OPEN = 128, 1024
"""Waiting sequences and open sequences while the capacity is measured: a full batch is always ready."""
MOST_TOGETHER = 64
"""Most requests in a block, unless they are late: see MOST_READ."""
WARM_UP = 0.2
"""Warm-up before the clock starts, as a share of the measured time."""
DRAWN = 1 << 16
"""Lengths that are drawn in advance and used in a cycle."""

REAL, MIXED, HEAVY = "real", "mixed", "256 to 512 steps"
"""Lengths of sequences: as questions, of SHORT and LONG steps, or long."""


@dataclass(frozen=True, slots=True)
class OpenLoopLevel:
    """Results at one arrival rate.

    share: of the capacity; offered, answered: requests a second, the latter with an answer in time; refused: share of the offered
    requests that are refused at once; dropped: share of the accepted requests without an answer in time. Quantiles are of all and
    of short sequences, in milliseconds.
    """

    model: str
    mixture: str
    batching: str
    share: float
    capacity: float
    offered: float
    answered: float
    refused: float
    dropped: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    short_p50_ms: float
    short_p99_ms: float


@dataclass(slots=True)
class Outcome:
    """Results of the requests that were due in the measured time. seconds: the latency of each answer; short: of short sequences.

    answered: answers in time that arrived in the measured time, whenever the request was due. Otherwise as in `OpenLoopLevel`.
    """

    offered: int
    answered: int
    refused: int
    dropped: int
    seconds: NDArray[np.float64]
    short: NDArray[np.float64]


class Ledger:
    """Records the requests of a measurement from `begin` to `end`. `outcome` evaluates them later: the engine runs in the same thread.

    Requests are numbered from 0. allowed: seconds from the due time of a request to its deadline.
    """

    def __init__(self, begin: float, end: float, allowed: float) -> None:
        self.begin = begin
        self.end = end
        self.allowed = allowed
        self.sent = 0
        self.open = 0
        self._due: list[NDArray[np.float64]] = []
        self._steps: list[NDArray[np.int64]] = []
        self._answered: list[tuple[float, Sequence[int]]] = []
        self._refused: list[tuple[bool, Sequence[int]]] = []

    def send(self, due: NDArray[np.float64], steps: NDArray[np.int64]) -> None:
        self.sent += len(due)
        self.open += len(due)
        self._due.append(due)
        self._steps.append(steps)

    def answer(self, ids: Sequence[int], now: float) -> None:
        self.open -= len(ids)
        self._answered.append((now, ids))

    def refuse(self, ids: Sequence[int], *, at_once: bool) -> None:
        self.open -= len(ids)
        self._refused.append((at_once, ids))

    def outcome(self) -> Outcome:
        due, steps = np.concatenate([[], *self._due]), np.concatenate([np.empty(0, np.int64), *self._steps])
        counts = (self.begin <= due) & (due < self.end)
        refused = {
            at_once: _joined([ids for was_at_once, ids in self._refused if was_at_once == at_once]) for at_once in (True, False)
        }
        answered = _joined([ids for _, ids in self._answered])
        answered_at = np.repeat([now for now, _ in self._answered], [len(ids) for _, ids in self._answered])
        seconds = answered_at - due[answered]
        in_time, counted = seconds <= self.allowed, counts[answered]
        return Outcome(
            offered=int(counts.sum()),
            answered=int((in_time & (self.begin <= answered_at) & (answered_at < self.end)).sum()),
            refused=int(counts[refused[True]].sum()),
            dropped=int(counts[refused[False]].sum() + (counted & ~in_time).sum()),
            seconds=seconds[counted],
            short=seconds[counted & (steps[answered] < LONG)],
        )


class EngineLoad:
    """Sends blocks of requests to one model of an engine through its own batcher, as a frontend does. It is the owner of the blocks."""

    def __init__(
        self,
        engine: DeviceEngine,
        model: str,
        mixture: str,
        batching: str,
        deadline_seconds: float = NO_DEADLINE,
        seed: int = 0,
    ) -> None:
        settings = Settings(batching=batching)  # type: ignore[arg-type]
        metrics = Metrics()
        self._batcher: Batcher = build_batcher(settings, engine, metrics, InternalErrors(Log("bench"), metrics))
        self._key = ModelKey(model, "1")
        self._divisible = engine.streams(self._key)
        self._deadline_seconds = deadline_seconds
        self._lengths = np.array(_lengths(mixture, seed))
        vocabulary = engine.spec(self._key).input.vocabulary or 1
        ids = np.random.default_rng(seed).integers(vocabulary, size=LONG).astype(IDS)
        self._ids = memoryview(ids.tobytes())
        self._ledger = Ledger(0.0, 0.0, 0.0)
        self._sending = False
        # As in the service: the collector does not visit long-lived objects again.
        gc.collect()
        gc.freeze()

    def capacity(self, seconds: float) -> float:
        """Return the sequences answered a second while a full batch is always waiting."""
        begin = time.monotonic() + WARM_UP * seconds
        ledger = self._ledger = Ledger(begin, begin + seconds, NO_DEADLINE)
        while (now := time.monotonic()) < ledger.end:
            missing = min(MAX_OPEN - ledger.open, FULL - self._batcher.waiting)
            if missing > 0:
                self._send(np.full(missing, now))
            self._batcher.step()
        self._finish()
        return ledger.outcome().answered / seconds

    def level(self, rate: float, seconds: float, seed: int = 1) -> Outcome:
        """Send requests with Poisson arrivals at this rate. Returns their results."""
        duration = (1 + WARM_UP) * seconds
        arrivals = np.array(list(itertools.takewhile(lambda at: at <= duration, itertools.accumulate(poisson(rate, seed)))))
        began = time.monotonic()
        ledger = self._ledger = Ledger(began + WARM_UP * seconds, began + duration, self._deadline_seconds)
        due, sent = began + arrivals, 0
        while sent < len(due):
            # Requests that are due now enter this batch. Requests that arrive during the batch enter the next batch.
            if due[sent] <= (now := time.monotonic()):
                most = MOST_TOGETHER if now - due[sent] < LAG_SECONDS else MOST_READ
                end = min(sent + most, int(due.searchsorted(now, side="right")))
                self._send(due[sent:end])
                sent = end
            self._batcher.step()
        self._finish()
        return ledger.outcome()

    def answer(self, block: RequestBlock, result: BlockResult, ready: float) -> None:
        self._ledger.answer(np.frombuffer(block.columns.ids, ID), time.monotonic())  # type: ignore[arg-type]

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        self._ledger.refuse(ids, at_once=self._sending)

    def open_ticket(self, id: int, request: Request) -> Ticket:
        def reply(answer: Answer, arrays: list[bytes]) -> None:
            self._ledger.answer([id], time.monotonic())

        return Ticket(request, reply, lambda error: self.refuse([id], error))

    def _send(self, due: NDArray[np.float64]) -> None:
        """Send a request for each of these due times, all in one block."""
        ledger, count = self._ledger, len(due)
        ids = np.arange(ledger.sent, ledger.sent + count)
        steps = self._lengths[ids % DRAWN]
        lengths = steps.tolist()
        deadlines = due + ledger.allowed
        columns = Columns(
            ids.astype(ID).tobytes(),
            deadlines.astype(DEADLINE).tobytes(),
            np.ones(count, COUNT).tobytes(),
            steps.astype(COUNT).tobytes(),
            b"".join([self._ids[: 4 * length] for length in lengths]),
        )
        block = RequestBlock(
            self._key,
            columns,
            steps=sum(lengths),
            shortest=min(lengths),
            longest=max(lengths),
            deadline=float(deadlines[0]),
            divisible=self._divisible,
            owner=self,
        )
        ledger.send(due, steps)
        self._sending = True
        self._batcher.submit_block(block)
        self._sending = False

    def _finish(self) -> None:
        while self._ledger.open or not self._batcher.idle:
            self._batcher.step()


def levels(
    engine: DeviceEngine,
    model: str,
    mixture: str,
    batching: str,
    capacity: float,
    shares: Sequence[float],
    seconds: float,
    deadline_seconds: float = NO_DEADLINE,
) -> Iterator[OpenLoopLevel]:
    """Measure the engine at each share of the capacity in sequence."""
    for share in shares:
        outcome = EngineLoad(engine, model, mixture, batching, deadline_seconds).level(share * capacity, seconds)
        accepted = outcome.offered - outcome.refused
        yield OpenLoopLevel(
            model,
            mixture,
            batching,
            share,
            round(capacity, 1),
            round(outcome.offered / seconds, 1),
            round(outcome.answered / seconds, 1),
            round(outcome.refused / max(1, outcome.offered), 4),
            round(outcome.dropped / max(1, accepted), 4),
            *(_milliseconds(outcome.seconds, quantile) for quantile in (0.5, 0.99, 0.999)),
            *(_milliseconds(outcome.short, quantile) for quantile in (0.5, 0.99)),
        )


def _lengths(mixture: str, seed: int) -> list[int]:
    """Draw the lengths in advance: drawing costs more time than sending."""
    chance = np.random.default_rng(seed)
    if mixture == REAL:
        return questions.lengths(DRAWN, seed)
    if mixture == MIXED:
        return [LONG if value < LONG_SHARE else SHORT for value in chance.random(DRAWN)]
    return [int(steps) for steps in chance.integers(256, 512, size=DRAWN, endpoint=True)]


def _joined(ids: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *[np.asarray(batch, np.int64) for batch in ids]])


def _milliseconds(seconds: NDArray[np.float64], share: float) -> float:
    return round(1e3 * float(np.quantile(seconds, share)), 3) if len(seconds) else float("nan")
