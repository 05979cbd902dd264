"""Lengths of real questions, for ragged workloads."""

from __future__ import annotations

import random

SHORTEST = 3
COUNTS = (
    *(4, 135, 268, 395, 566, 630, 674, 586, 531, 470, 296, 197, 193, 143, 92, 80, 58, 31),
    *(31, 19, 11, 13, 8, 5, 1, 3, 4, 1, 3, 2, 0, 1, 0, 0, 1),
)
"""Numbers of the 5,452 training questions of TREC (Li and Roth 2002) with SHORTEST words and punctuation marks, one more, and so on."""


def lengths(rows: int, seed: int = 0) -> list[int]:
    """Return the middle of each of `rows` equal parts of the distribution, shuffled, so that a small batch is typical as well."""
    all_lengths = [words for words, count in enumerate(COUNTS, SHORTEST) for _ in range(count)]
    drawn = [all_lengths[(2 * row + 1) * len(all_lengths) // (2 * rows)] for row in range(rows)]
    random.Random(seed).shuffle(drawn)
    return drawn
