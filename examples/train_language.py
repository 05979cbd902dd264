"""Train a language model over bytes, and write it as a model folder with a card.

The data is any set of lines in the format of `training/step_sets.py`; `make_sets.py` makes two. The model takes the bytes of a line after a
line feed, and answers with the probability of every next byte. It is causal: `generate.py` and `evaluate.py` send a session one byte at a
time.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor
from training.batches import Row
from training.recipe import main
from training.service import Advance, Service, ignore
from training.step_recipe import BYTES, Settings, StepRecipe, families

from service.modeling.spec.heads import Head, NextHead

BOUNDARY = ord("\n")
"""The byte before and after every line."""
LEAST = 1e-30
"""The least probability, where the service rounds to 0."""


class LanguageRecipe(StepRecipe):
    """An answer is the logarithm of the probability of each byte of a line, and of its end."""

    task, kind, default_set, causal = "language", "text", "facts", True
    settings = families(dropout=0.0, epochs=2)
    description = "The next byte of a text"

    def prepare(self, examples: list[str], settings: Settings) -> tuple[Head, int, None]:
        return NextHead(kind="next", top=BYTES), BYTES, None

    def rows(self, examples: list[str], head: Head, tokenizer: Any) -> list[Row]:
        """Return the rows: each byte is the target of the previous byte, and a line feed begins and ends a line."""
        lines = [torch.tensor(ids(example)) for example in examples]
        return [Row(line[:-1], line[1:]) for line in lines]

    def answer(self, scores: Tensor, example: str, head: Head) -> list[float]:
        targets = torch.tensor(ids(example)[1:])
        return scores.log_softmax(1).gather(1, targets[:, None])[:, 0].tolist()

    def ask(self, service: Service, model: str, examples: list[str], advance: Advance = ignore) -> list[list[float]]:
        """Send every line through a session, one byte in a chunk."""
        streams = [[[byte] for byte in ids(example)[:-1]] for example in examples]
        answers = service.streams(model, streams, advance)
        return [
            [logarithm(output, byte) for output, byte in zip(outputs, ids(example)[1:], strict=True)]
            for outputs, example in zip(answers, examples, strict=True)
        ]

    def quality(self, examples: list[str], answers: list[list[float]]) -> dict[str, float]:
        """Return the perplexity of a byte: the exponential of the mean of the negative logarithms."""
        logarithms = [value for answer in answers for value in answer]
        return {"perplexity": math.exp(-sum(logarithms) / len(logarithms))}


def ids(line: str) -> list[int]:
    return [BOUNDARY, *line.encode(), BOUNDARY]


def logarithm(output: Any, byte: int) -> float:
    return math.log(max(output["scores"][output["ids"].index(byte)], LEAST))


if __name__ == "__main__":
    sys.exit(main(LanguageRecipe(), __doc__))
