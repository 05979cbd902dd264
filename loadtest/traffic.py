"""Seeded traffic: inputs with the lengths of real questions."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from kernels.bench.questions import COUNTS, SHORTEST


class Traffic:
    """Inputs for one model, given its description from GET /models. `words` are the vocabulary of a text model.

    A text model without `words` gets token ids.
    """

    def __init__(self, model: Mapping[str, Any], words: Sequence[str] = (), seed: int = 0) -> None:
        self.name = model["name"]
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
        """Draw the length of a question, clamped to the limits of the model."""
        drawn = self._random.choices(range(SHORTEST, SHORTEST + len(COUNTS)), cum_weights=self._totals)[0]
        return max(self._shortest, min(drawn, self._longest))

    def input(self, steps: int | None = None) -> str | list[int] | list[list[float]]:
        """Return one sequence of `steps` steps, or with the length of a question."""
        steps = self.steps() if steps is None else steps
        if self._input["kind"] == "features":
            return [[round(self._random.gauss(0, 1), 3) for _ in range(self._input["features"])] for _ in range(steps)]
        if self._words:
            return " ".join(self._random.choices(self._words, k=steps))
        return [self._random.randrange(self._input["vocabulary"]) for _ in range(steps)]

    def body(self, inputs: int = 1) -> dict[str, Any]:
        """Return the body of one POST /infer."""
        return {"model": self.name, "version": self._version, "inputs": [self.input() for _ in range(inputs)]}


def words(tokenizer: str) -> list[str]:
    """Return the words of a `tokenizer.json` that are one token each, in a fixed order."""
    read: Tokenizer = Tokenizer.from_str(tokenizer)
    vocabulary = sorted(read.get_vocab(with_added_tokens=False).items())
    unknown = json.loads(tokenizer)["model"].get("unk_token")
    return [word for word, id in vocabulary if word != unknown and read.encode(word).ids == [id]]
