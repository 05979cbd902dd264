"""The parts of a set of examples, and the division of a set that has no parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, TypeVar

TENTHS, SPLIT_SEED = 10, 0

T = TypeVar("T")


class MissingData(Exception):
    """The examples of a set cannot be read or made. The message says what is missing and where it comes from."""


@dataclass(frozen=True)
class Parts:
    """The examples of a set; `development` is empty where no epoch is selected."""

    train: list[Any]
    development: list[Any]
    test: list[Any]

    def sample(self, size: int) -> Parts:
        """Return at most `size` examples of each part, spread over the part."""
        return Parts(*(spread(part, size) for part in (self.train, self.development, self.test)))


def spread(examples: list[T], size: int) -> list[T]:
    return examples[:: max(1, -(-len(examples) // size))]


def hold_out(examples: list[T]) -> tuple[list[T], list[T]]:
    """Return nine tenths of the examples, and one tenth. The division is the same for every seed of a training."""
    shuffled = list(examples)
    random.Random(SPLIT_SEED).shuffle(shuffled)
    end = len(shuffled) // TENTHS
    return shuffled[end:], shuffled[:end]


def in_order(labels: set[str]) -> tuple[str, ...]:
    """Return labels in the order of numbers or of the alphabet."""
    return tuple(sorted(labels, key=int if all(map(str.isdecimal, labels)) else str))
