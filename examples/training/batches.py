"""Rows of a training part as padded batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

NO_TARGET = -100
"""The target of padding, which cross entropy ignores."""
GROUP = 8
"""Batches whose rows are sorted by length together."""


@dataclass(frozen=True)
class Row:
    """A sequence of token ids or of vectors, and the targets that the model has to predict."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Batch:
    """Padded rows. inputs: (rows, longest) or (rows, longest, columns); lengths: (rows,); targets: (rows, most targets of a row)."""

    inputs: Tensor
    lengths: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.inputs.to(device), self.lengths.to(device), self.targets.to(device))


def batches(rows: list[Row], size: int) -> Iterator[Batch]:
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        yield Batch(
            pad_sequence([row.inputs for row in chosen], batch_first=True),
            torch.tensor([len(row.inputs) for row in chosen]),
            pad_sequence([row.targets for row in chosen], batch_first=True, padding_value=NO_TARGET),
        )


def shuffled_batches(rows: list[Row], size: int, shuffler: random.Random) -> list[Batch]:
    """Return batches with every row once, in random order. Rows of similar length share a batch, which keeps padding small."""
    shuffled = shuffler.sample(rows, len(rows))
    groups = (shuffled[start : start + GROUP * size] for start in range(0, len(rows), GROUP * size))
    found = [batch for group in groups for batch in batches(sorted(group, key=lambda row: len(row.inputs)), size)]
    shuffler.shuffle(found)
    return found
