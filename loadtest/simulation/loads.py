"""What comes, and when: mixtures of lengths at rates that are given, seeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, islice

from kernels.bench.questions import COUNTS, SHORTEST
from loadtest.simulation.ways import Sequence
from loadtest.traffic import ARRIVALS

SHORT_STEPS, LONG_STEPS = 10, 4096
LONG_SHARE = 0.01

Lengths = Callable[[random.Random, int], list[int]]


def _short(source: random.Random, count: int) -> list[int]:
    return [SHORT_STEPS] * count


def _questions(source: random.Random, count: int) -> list[int]:
    return source.choices(range(SHORTEST, SHORTEST + len(COUNTS)), cum_weights=list(accumulate(COUNTS)), k=count)


def _with_long(most: Lengths) -> Lengths:
    """But every hundredth, in the mean, is long."""

    def draw(source: random.Random, count: int) -> list[int]:
        return [LONG_STEPS if source.random() < LONG_SHARE else steps for steps in most(source, count)]

    return draw


LONG_SHARES = {"short": 0.0, "mixed": LONG_SHARE, "questions": 0.0, "questions-mixed": LONG_SHARE}
MIXTURES: dict[str, Lengths] = {
    "short": _short,
    "mixed": _with_long(_short),
    "questions": _questions,
    "questions-mixed": _with_long(_questions),
}


def sequences(mixture: str, rate: float, count: int, arrivals: str = "poisson", seed: int = 0) -> list[Sequence]:
    """So many, `rate` of them a second in the mean."""
    lengths = MIXTURES[mixture](random.Random(f"{mixture} {seed}"), count)
    moments = accumulate(islice(ARRIVALS[arrivals](rate, seed), count))
    return [Sequence(steps, moment) for steps, moment in zip(lengths, moments, strict=True)]


def begun(replicas: int, mean: float, seed: int = 0) -> list[tuple[int, Sequence]]:
    """Long sequences on their way, as a look at a random moment finds them: so many a replica in the mean, each anywhere between its first
    and its last step. With them a run need not last as long as several long sequences before it is typical."""
    source = random.Random(f"begun {seed}")
    found = []
    for place in range(replicas):
        count = int(mean) + (source.random() < mean % 1)
        found += [(place, Sequence(source.randint(1, LONG_STEPS))) for _ in range(count)]
    return found
