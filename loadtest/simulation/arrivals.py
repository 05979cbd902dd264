"""Seeded arrivals of sequences: mixtures of lengths, at a given rate."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, islice

from kernels.bench.questions import COUNTS, SHORTEST
from loadtest.generator.arrivals import ARRIVALS
from loadtest.simulation.policies import SimulatedSequence

SHORT_STEPS, LONG_STEPS = 10, 4096
LONG_SHARE = 0.01

Lengths = Callable[[random.Random, int], list[int]]


def _short(source: random.Random, count: int) -> list[int]:
    return [SHORT_STEPS] * count


def _questions(source: random.Random, count: int) -> list[int]:
    return source.choices(range(SHORTEST, SHORTEST + len(COUNTS)), cum_weights=list(accumulate(COUNTS)), k=count)


def _with_long(lengths: Lengths) -> Lengths:
    """Make a share of LONG_SHARE of the sequences long."""

    def draw(source: random.Random, count: int) -> list[int]:
        return [LONG_STEPS if source.random() < LONG_SHARE else steps for steps in lengths(source, count)]

    return draw


LONG_SHARES = {"short": 0.0, "mixed": LONG_SHARE, "questions": 0.0, "questions-mixed": LONG_SHARE}
MIXTURES: dict[str, Lengths] = {
    "short": _short,
    "mixed": _with_long(_short),
    "questions": _questions,
    "questions-mixed": _with_long(_questions),
}


def sequences(mixture: str, rate: float, count: int, arrivals: str = "poisson", seed: int = 0) -> list[SimulatedSequence]:
    """Return `count` sequences that arrive at a mean rate of `rate` a second."""
    lengths = MIXTURES[mixture](random.Random(f"{mixture} {seed}"), count)
    moments = accumulate(islice(ARRIVALS[arrivals](rate, seed), count))
    return [SimulatedSequence(steps, moment) for steps, moment in zip(lengths, moments, strict=True)]


def started(replicas: int, mean: float, seed: int = 0) -> list[tuple[int, SimulatedSequence]]:
    """Return long sequences in progress, `mean` for each replica, each at a random step, with the index of their replica.

    With them, a run is typical from its beginning; otherwise it would first have to last as long as several long sequences.
    """
    source = random.Random(f"begun {seed}")
    in_progress = []
    for index in range(replicas):
        count = int(mean) + (source.random() < mean % 1)
        in_progress += [(index, SimulatedSequence(source.randint(1, LONG_STEPS))) for _ in range(count)]
    return in_progress
