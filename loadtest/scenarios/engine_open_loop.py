"""An open loop on one engine and its queue, in one process, without frontends: used by the scenario `engine`."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kernels.bench import questions
from loadtest.generator.arrivals import poisson
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
class Ledger:
    """Counts of the requests that are due between `begin` and `end`. answers, short: seconds of each answer, and of short sequences.

    answered: answers in time that arrive between `begin` and `end`, whenever the request was due.
    """

    begin: float
    end: float
    answers: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    offered: int = 0
    refused: int = 0
    dropped: int = 0
    answered: int = 0
    open: int = 0
    sending: bool = False

    def counts(self, due: float) -> bool:
        return self.begin <= due < self.end

    def answer(self, due: float, steps: int, deadline: float, now: float) -> None:
        self.open -= 1
        self.answered += self.counts(now) and now <= deadline
        if self.counts(due):
            self.dropped += now > deadline
            self.answers.append(now - due)
            if steps < LONG:
                self.short.append(now - due)

    def refuse(self, due: float) -> None:
        self.open -= 1
        if self.counts(due):
            self.refused += self.sending
            self.dropped += not self.sending


class SentRequest(NamedTuple):
    """A request of one sequence. due, deadline: on the clock of time.monotonic."""

    due: float
    steps: int
    deadline: float


class EngineLoad:
    """Sends blocks of requests to one model of an engine through its own batcher, as a frontend does. It is the owner of the blocks."""

    def __init__(
        self, engine: DeviceEngine, model: str, mixture: str, batching: str, deadline_seconds: float = 1e6, seed: int = 0
    ) -> None:
        settings = Settings(batching=batching)  # type: ignore[arg-type]
        metrics = Metrics()
        self._batcher: Batcher = build_batcher(settings, engine, metrics, InternalErrors(Log("bench"), metrics))
        self._key = ModelKey(model, "1")
        self._divisible = engine.streams(self._key)
        self._deadline_seconds = deadline_seconds
        self._steps = itertools.cycle(_lengths(mixture, seed))
        vocabulary = engine.spec(self._key).input.vocabulary or 1
        ids = np.random.default_rng(seed).integers(vocabulary, size=LONG).astype(IDS)
        self._ids = memoryview(ids.tobytes())
        self._sent: dict[int, SentRequest] = {}
        self._last_id = 0
        self._ledger = Ledger(0.0, 0.0)
        # As in the service: the collector does not visit long-lived objects again.
        gc.collect()
        gc.freeze()

    def capacity(self, seconds: float) -> float:
        """Return the sequences answered a second while a full batch is always waiting."""
        begin = time.monotonic() + WARM_UP * seconds
        ledger = self._ledger = Ledger(begin, begin + seconds)
        while (now := time.monotonic()) < ledger.end:
            missing = min(MAX_OPEN - ledger.open, FULL - self._batcher.waiting)
            if missing > 0:
                self._send([now] * missing, 1e9)
            self._batcher.step()
        self._finish()
        return ledger.answered / seconds

    def level(self, rate: float, seconds: float, seed: int = 1) -> Ledger:
        """Send requests with Poisson arrivals at this rate. Returns their counts."""
        began = time.monotonic()
        ledger = self._ledger = Ledger(began + WARM_UP * seconds, began + (1 + WARM_UP) * seconds)
        arrivals = itertools.takewhile(lambda due: due <= ledger.end, itertools.accumulate(poisson(rate, seed), initial=began))
        next(arrivals)
        due = next(arrivals, None)
        while due is not None:
            # Requests that are due now enter this batch. Requests that arrive during the batch enter the next batch.
            together: list[float] = []
            while due is not None and due <= (now := time.monotonic()):
                if len(together) >= (MOST_TOGETHER if now - due < LAG_SECONDS else MOST_READ):
                    break
                together.append(due)
                due = next(arrivals, None)
            if together:
                self._send(together, self._deadline_seconds)
            self._batcher.step()
        self._finish()
        return ledger

    def answer(self, block: RequestBlock, result: BlockResult, ready: float) -> None:
        now = time.monotonic()
        for id in block.ids:
            self._ledger.answer(*self._sent.pop(id), now)

    def refuse(self, ids: Sequence[int], error: ServiceError) -> None:
        for id in ids:
            self._ledger.refuse(self._sent.pop(id).due)

    def open_ticket(self, id: int, request: Request) -> Ticket:
        def reply(answer: Answer, arrays: list[bytes]) -> None:
            self._ledger.answer(*self._sent.pop(id), time.monotonic())

        return Ticket(request, reply, lambda error: self.refuse([id], error))

    def _send(self, due: Sequence[float], allowed: float) -> None:
        """Send a request for each of these due times, all in one block."""
        steps = [next(self._steps) for _ in due]
        deadlines = [at + allowed for at in due]
        ids = range(self._last_id + 1, self._last_id + 1 + len(due))
        self._last_id += len(due)
        self._sent.update(zip(ids, map(SentRequest, due, steps, deadlines), strict=True))
        columns = Columns(
            np.array(ids, ID).tobytes(),
            np.array(deadlines, DEADLINE).tobytes(),
            np.ones(len(due), COUNT).tobytes(),
            np.array(steps, COUNT).tobytes(),
            b"".join([self._ids[: 4 * count] for count in steps]),
        )
        block = RequestBlock(
            self._key,
            columns,
            steps=sum(steps),
            shortest=min(steps),
            longest=max(steps),
            deadline=min(deadlines),
            divisible=self._divisible,
            owner=self,
        )
        ledger = self._ledger
        ledger.open += len(due)
        ledger.offered += sum([ledger.counts(at) for at in due])
        ledger.sending = True
        self._batcher.submit_block(block)
        ledger.sending = False

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
    deadline_seconds: float = 1e6,
) -> Iterator[OpenLoopLevel]:
    """Measure the engine at each share of the capacity in sequence."""
    for share in shares:
        ledger = EngineLoad(engine, model, mixture, batching, deadline_seconds).level(share * capacity, seconds)
        accepted = ledger.offered - ledger.refused
        yield OpenLoopLevel(
            model,
            mixture,
            batching,
            share,
            round(capacity, 1),
            round(ledger.offered / seconds, 1),
            round(ledger.answered / seconds, 1),
            round(ledger.refused / max(1, ledger.offered), 4),
            round(ledger.dropped / max(1, accepted), 4),
            *(_milliseconds(ledger.answers, quantile) for quantile in (0.5, 0.99, 0.999)),
            *(_milliseconds(ledger.short, quantile) for quantile in (0.5, 0.99)),
        )


def _lengths(mixture: str, seed: int) -> list[int]:
    """Draw the lengths in advance: drawing costs more time than sending."""
    chance = np.random.default_rng(seed)
    if mixture == REAL:
        return questions.lengths(DRAWN, seed)
    if mixture == MIXED:
        return [LONG if value < LONG_SHARE else SHORT for value in chance.random(DRAWN)]
    return [int(steps) for steps in chance.integers(256, 512, size=DRAWN, endpoint=True)]


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * float(np.quantile(seconds, share)), 3) if seconds else float("nan")
