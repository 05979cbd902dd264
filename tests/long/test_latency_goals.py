"""Long sequences do not delay short ones, and static batching is far behind: the goals of the scheduler, on a virtual clock.

The scheduler of the service and static batching answer the same seeded arrivals. A batch takes exactly its predicted time, is chosen when
the device is free, and is answered when it ends. Time outside of the engine is not simulated.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import NamedTuple, Protocol

import numpy as np

from loadtest.generator.arrivals import poisson
from service.engine.batching.model_queue import QueuedSequence
from service.engine.batching.scheduler import Scheduler
from service.engine.execution.cost_model import Cost
from service.settings import Settings
from tests.engine.batching.harness import MODEL, limits

BUDGET_SECONDS = 0.0005
LOAD, LONG_SHARE = 0.7, 0.01
"""Share of the capacity at which latencies are compared, and share of long sequences in the mixture."""
COST = Cost(26.2e-6, 0.596e-6, 0.0128e-6)
"""Batches of an LSTM with 512 units on an NVIDIA H200."""
SHORT, LONG = 10, 4096
"""Time steps of a short and of a long sequence."""
SLOTS = 256
"""Sequences that have begun and not ended, as in the default settings."""
COUNT = 20_000
"""Sequences of a run."""
FROM, TO = 0.1, 0.8
"""Shares of a run between which arrivals count: before, queues are too short; after, the last sequences have the device alone."""
CAPACITY_ALONE, CAPACITY_MIXED, CAPACITY_STATIC = 1_635_000, 486_000, 26_500
"""Sequences per second that the device can answer: the scheduler only short ones and the mixture, static batching the mixture."""


class SimulatedSequence(QueuedSequence):
    """One sequence from its arrival to its answer."""

    __slots__ = ("answered", "came", "steps")

    def __init__(self, steps: int, came: float) -> None:
        super().__init__(steps, math.inf)
        self.steps = steps
        self.came = came
        self.answered = math.nan


class Batch(NamedTuple):
    """A batch on the device. longest, tokens: padding included; done: sequences that end with it."""

    longest: int
    tokens: int
    done: list[SimulatedSequence]


class Policy(Protocol):
    """A queue in front of the device."""

    def add(self, sequence: SimulatedSequence) -> None: ...

    def next_batch(self) -> Batch | None: ...


class Continuous:
    """The scheduler of the service."""

    def __init__(self, budget_seconds: float) -> None:
        settings = Settings()
        sizes = limits(1 << 40, settings.max_batch_sequences, settings.max_batch_tokens, budget_seconds)
        self._scheduler: Scheduler[SimulatedSequence] = Scheduler(
            sizes, lambda _: COST, lambda _: SLOTS - self._scheduler.begun
        )

    def add(self, sequence: SimulatedSequence) -> None:
        self._scheduler.add(MODEL, [sequence], now=sequence.came)

    def next_batch(self) -> Batch | None:
        scheduled = self._scheduler.next_batch()
        if scheduled is None:
            return None
        steps = [part.steps for part in scheduled.parts]
        return Batch(max(steps), sum(steps), [part.sequence for part in scheduled.parts if part.last])


class Static:
    """Runs the sequences that wait when the device is free, each sequence whole and padded to the longest."""

    def __init__(self) -> None:
        self._max_rows = Settings().max_batch_sequences
        self._queue: deque[SimulatedSequence] = deque()

    def add(self, sequence: SimulatedSequence) -> None:
        self._queue.append(sequence)

    def next_batch(self) -> Batch | None:
        taken = [self._queue.popleft() for _ in range(min(self._max_rows, len(self._queue)))]
        lengths = [sequence.steps for sequence in taken]
        return Batch(max(lengths), max(lengths) * len(lengths), taken) if taken else None


def arrivals(rate: float, long_share: float, seed: int = 0) -> list[SimulatedSequence]:
    """Return COUNT sequences that arrive at a mean rate of `rate` a second, of which a share is long."""
    chance = random.Random(seed)
    moments = accumulate(islice(poisson(rate, seed), COUNT))
    return [SimulatedSequence(LONG if chance.random() < long_share else SHORT, moment) for moment in moments]


def answer(policy: Policy, sequences: Sequence[SimulatedSequence]) -> None:
    """Answer every sequence."""
    now, admitted = 0.0, 0
    while True:
        while admitted < len(sequences) and sequences[admitted].came <= now:
            policy.add(sequences[admitted])
            admitted += 1
        batch = policy.next_batch()
        if batch is not None:
            now += COST.of(batch.longest, batch.tokens)
            for sequence in batch.done:
                assert math.isnan(sequence.answered), "a sequence is answered once"
                sequence.answered = now
        elif admitted < len(sequences):
            now = sequences[admitted].came
        else:
            return


def p99_of_short(policy: Policy, rate: float, long_share: float) -> float:
    """Return the 99th percentile of the latency of short sequences in seconds."""
    sequences = arrivals(rate, long_share)
    answer(policy, sequences)
    span = sequences[-1].came
    counted = [each for each in sequences if each.steps == SHORT and FROM <= each.came / span <= TO]
    return float(np.percentile([each.answered - each.came for each in counted], 99))


def test_short_sequences_meet_their_latency_goals() -> None:
    p99_alone = p99_of_short(Continuous(BUDGET_SECONDS), LOAD * CAPACITY_ALONE, 0.0)
    p99_mixed = p99_of_short(Continuous(BUDGET_SECONDS), LOAD * CAPACITY_MIXED, LONG_SHARE)
    assert p99_mixed <= p99_alone + 1.5 * BUDGET_SECONDS


def test_static_batching_takes_five_times_as_long() -> None:
    policies = (Continuous(BUDGET_SECONDS), Static())
    ours, static = (p99_of_short(policy, LOAD * CAPACITY_STATIC, LONG_SHARE) for policy in policies)
    assert static >= 5 * ours
