"""One engine with its queue under arrivals that wait for nothing: how late answers are at rates from a tenth of what it can do to ten
times as much. Used by `bench_engine`; the engine's doors and processes are not in it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kernels.bench import questions
from loadtest.traffic import poisson
from service.engine.batching.batcher import Batcher
from service.engine.build import build_batcher
from service.engine.execution.device_engine import DeviceEngine
from service.engine.worker import FRAMES_PER_BATCH
from service.errors import ServiceError
from service.ipc.messages import IDS, Answer, ModelKey, Request
from service.log import Log
from service.metrics import Metrics
from service.settings import Settings

SHORT, LONG, LONG_SHARE = 10, 4096, 0.01
"""Steps of the sequences of the mixture, and how many of them are long."""
FULL, MOST_OPEN = 128, 1024
"""Sequences that wait, and that are open at most, when the capacity is measured: there is always a full turn."""
WARM_UP = 0.2
"""Share of a stretch that is run before the clock starts."""
DRAWN = 1 << 16
"""Lengths, used over and over."""


REAL, MIXED, HEAVY = "real", "mixed", "256 to 512 steps"
"""How long sequences are: as questions, of SHORT and LONG steps, or long."""


@dataclass(frozen=True, slots=True)
class Level:
    """One stretch of load. share: of the capacity; offered, answered: a second, the latter those whose answer was in time; refused: of
    those offered, at once; dropped: of those accepted, without an answer in time; milliseconds by quantile of all and of short ones."""

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
    """What came of the requests that were due in one stretch of time: seconds of each answer, and of the short ones. answered: how many
    answers that were in time came within the stretch, whenever they were asked for."""

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

    def answer(self, due: float, steps: int, deadline: float, answer: Answer, arrays: list[bytes]) -> None:
        now = time.monotonic()
        self.open -= 1
        self.answered += self.counts(now) and now <= deadline
        if self.counts(due):
            self.dropped += now > deadline
            self.answers.append(now - due)
            if steps < LONG:
                self.short.append(now - due)

    def refuse(self, due: float, error: ServiceError) -> None:
        self.open -= 1
        if self.counts(due):
            self.refused += self.sending
            self.dropped += not self.sending


class Driver:
    """Sends to one model of an engine, through a queue of its own. deadline_seconds: of every request."""

    def __init__(
        self, engine: DeviceEngine, model: str, mixture: str, batching: str, deadline_seconds: float = 1e6, seed: int = 0
    ) -> None:
        settings = Settings(batching=batching)  # type: ignore[arg-type]
        self._batcher: Batcher = build_batcher(settings, engine, Metrics(), Log("bench"))
        self._key = ModelKey(model, "1")
        self._deadline_seconds = deadline_seconds
        self._steps = itertools.cycle(_lengths(mixture, seed))
        vocabulary = engine.spec(self._key).input.vocabulary or 1
        ids = np.random.default_rng(seed).integers(vocabulary, size=LONG).astype(IDS)
        self._ids = memoryview(ids.tobytes())
        # As in the service: what is there by now lives on, and is not looked at again and again.
        gc.collect()
        gc.freeze()

    def capacity(self, seconds: float) -> float:
        """Sequences a second, when there are always some that wait."""
        begin = time.monotonic() + WARM_UP * seconds
        ledger = Ledger(begin, begin + seconds)
        while (now := time.monotonic()) < ledger.end:
            while ledger.open < MOST_OPEN and self._batcher.waiting < FULL:
                self._send(ledger, now, 1e9)
            self._batcher.step()
        self._finish(ledger)
        return ledger.answered / seconds

    def level(self, rate: float, seconds: float, seed: int = 1) -> Ledger:
        """What came of requests that arrive at this rate."""
        began = time.monotonic()
        ledger = Ledger(began + WARM_UP * seconds, began + (1 + WARM_UP) * seconds)
        arrivals = _arrivals(rate, began, ledger.end, seed)
        due = next(arrivals, None)
        while due is not None:
            # Those that are due by now, and then a turn: who comes while the engine is busy is in the next one.
            for _ in range(FRAMES_PER_BATCH):
                if due is None or due > time.monotonic():
                    break
                self._send(ledger, due, self._deadline_seconds)
                due = next(arrivals, None)
            self._batcher.step()
        self._finish(ledger)
        return ledger

    def _send(self, ledger: Ledger, due: float, allowed: float) -> None:
        steps = next(self._steps)
        request = Request(self._key.name, self._key.version, [steps], due + allowed, due)
        ledger.open += 1
        ledger.offered += ledger.counts(due)
        reply, refuse = partial(ledger.answer, due, steps, due + allowed), partial(ledger.refuse, due)
        ledger.sending = True
        self._batcher.submit(request, self._ids[: steps * 4], reply, refuse)  # type: ignore[arg-type]
        ledger.sending = False

    def _finish(self, ledger: Ledger) -> None:
        while ledger.open or not self._batcher.idle:
            self._batcher.step()


def measured(
    engine: DeviceEngine,
    model: str,
    mixture: str,
    batching: str,
    capacity: float,
    shares: Sequence[float],
    seconds: float,
    deadline_seconds: float = 1e6,
) -> Iterator[Level]:
    """A stretch at each share of the capacity, one after the other."""
    for share in shares:
        ledger = Driver(engine, model, mixture, batching, deadline_seconds).level(share * capacity, seconds)
        accepted = ledger.offered - ledger.refused
        yield Level(
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
    """Drawn beforehand: that would take longer than to send them."""
    chance = np.random.default_rng(seed)
    if mixture == REAL:
        return questions.lengths(DRAWN, seed)
    if mixture == MIXED:
        return [LONG if one < LONG_SHARE else SHORT for one in chance.random(DRAWN)]
    return [int(one) for one in chance.integers(256, 512, size=DRAWN, endpoint=True)]


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * float(np.quantile(seconds, share)), 3) if seconds else float("nan")


def _arrivals(rate: float, begin: float, end: float, seed: int) -> Iterator[float]:
    at = begin
    for gap in poisson(rate, seed):
        at += gap
        if at > end:
            return
        yield at
