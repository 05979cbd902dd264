"""Long sequences do not delay short ones: the goal of the scheduler, on a virtual clock.

The scheduler of the service answers seeded arrivals. A batch takes exactly its predicted time, is chosen when the device is free, and is
answered when it ends. Time outside of the engine is not simulated.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np

from loadtest.generator.arrivals import poisson
from service.engine.batching.scheduler import Scheduler
from service.engine.batching.selection import SchedulerLimits
from service.engine.execution.cost_model import Cost
from service.settings import Settings
from tests.engine.batching.harness import FakeStates, block, scheduled_rows

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
CAPACITY_ALONE, CAPACITY_MIXED = 1_635_000, 486_000
"""Sequences per second that the device can answer: only short ones, and the mixture."""


@dataclass
class SimulatedSequence:
    """One sequence from its arrival to its answer."""

    steps: int
    came: float
    answered: float = math.nan


def arrivals(rate: float, long_share: float, seed: int = 0) -> list[SimulatedSequence]:
    """Return COUNT sequences that arrive at a mean rate of `rate` a second. A share of them is long."""
    chance = random.Random(seed)
    moments = accumulate(islice(poisson(rate, seed), COUNT))
    return [SimulatedSequence(LONG if chance.random() < long_share else SHORT, moment) for moment in moments]


def p99_of_short(rate: float, long_share: float) -> float:
    """Answer every sequence, and return the 99th percentile of the latency of short sequences in seconds."""
    settings, states = Settings(), FakeStates(SLOTS)
    sizes = SchedulerLimits(1 << 40, settings.max_batch_sequences, settings.max_batch_tokens, BUDGET_SECONDS)
    scheduler = Scheduler(sizes, lambda _: COST, states)
    sequences, now, admitted = arrivals(rate, long_share), 0.0, 0
    while (batch := scheduler.next_batch()) is not None or admitted < COUNT:
        if batch is None:
            now = sequences[admitted].came
        else:
            now += COST.of(batch.longest, batch.tokens)
            for sequence in [sequences[row.id] for row in scheduled_rows(batch) if row.last]:
                assert math.isnan(sequence.answered), "a sequence is answered once"
                sequence.answered = now
        while admitted < COUNT and sequences[admitted].came <= now:
            arrived = block([(admitted, math.inf, [sequences[admitted].steps])], divisible=True)
            assert not scheduler.add_block(arrived, now=sequences[admitted].came)
            admitted += 1
        states.free = SLOTS - scheduler.begun
    span = sequences[-1].came
    counted = [each for each in sequences if each.steps == SHORT and FROM <= each.came / span <= TO]
    return float(np.percentile([each.answered - each.came for each in counted], 99))


def test_short_sequences_meet_their_latency_goals() -> None:
    p99_alone, p99_mixed = p99_of_short(LOAD * CAPACITY_ALONE, 0.0), p99_of_short(LOAD * CAPACITY_MIXED, LONG_SHARE)
    assert p99_mixed <= p99_alone + 1.5 * BUDGET_SECONDS
