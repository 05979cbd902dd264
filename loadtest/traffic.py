"""What callers send, and when: inputs as long as real questions, and arrivals that do not wait for answers. All of it seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from kernels.bench.questions import COUNTS, SHORTEST

BURST = 20
"""Requests of one burst, in the mean."""


class Traffic:
    """Inputs for one model, which is described as GET /models describes it; `words` are a text model's vocabulary.

    A text model whose words are not known is sent token ids.
    """

    def __init__(self, model: Mapping[str, Any], words: Sequence[str] = (), seed: int = 0) -> None:
        self._name = model["name"]
        self._version = model["version"]
        self._input = model["input"]
        self._shortest: int = model["min_steps"]
        self._longest: int = model["input"]["max_steps"]
        self._words = words
        self._random = random.Random(seed)
        self._totals = list(accumulate(COUNTS))

    def __str__(self) -> str:
        if self._words:
            return "texts"
        return f"rows of {self._input['features']} numbers" if self._input["kind"] == "features" else "token ids"

    def steps(self) -> int:
        """How long one question is, within what the model takes."""
        drawn = self._random.choices(range(SHORTEST, SHORTEST + len(COUNTS)), cum_weights=self._totals)[0]
        return max(self._shortest, min(drawn, self._longest))

    def input(self, steps: int | None = None) -> str | list[int] | list[list[float]]:
        """One sequence, as long as one question unless `steps` says otherwise."""
        steps = self.steps() if steps is None else steps
        if self._input["kind"] == "features":
            return [[round(self._random.gauss(0, 1), 3) for _ in range(self._input["features"])] for _ in range(steps)]
        if self._words:
            return " ".join(self._random.choices(self._words, k=steps))
        return [self._random.randrange(self._input["vocabulary"]) for _ in range(steps)]

    def body(self, inputs: int = 1) -> dict[str, Any]:
        """The body of one POST /infer."""
        return {"model": self._name, "version": self._version, "inputs": [self.input() for _ in range(inputs)]}


def words(tokenizer: str) -> list[str]:
    """The words of a `tokenizer.json` that are one token each, in a fixed order."""
    read: Tokenizer = Tokenizer.from_str(tokenizer)
    vocabulary = sorted(read.get_vocab(with_added_tokens=False).items())
    unknown = json.loads(tokenizer)["model"].get("unk_token")
    return [word for word, id in vocabulary if word != unknown and read.encode(word).ids == [id]]


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Seconds between arrivals of callers who know nothing of each other, `rate` of them a second."""
    source = random.Random(seed)
    while True:
        yield source.expovariate(rate)


def bursty(rate: float, seed: int = 0) -> Iterator[float]:
    """As `poisson`, but in bursts of one instant each, of BURST in the mean; the mean rate is the same."""
    source = random.Random(seed)
    while True:
        yield source.expovariate(rate / BURST)
        while source.random() > 1 / BURST:
            yield 0.0


ARRIVALS = {"poisson": poisson, "bursty": bursty}
