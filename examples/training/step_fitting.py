"""The training loop of models with an output per step: Adam, and early stopping on a development part."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from training.step_model import StepModel

NO_TARGET = -100
"""The target of padding, which a loss ignores."""
GROUP = 8
"""Batches whose rows are sorted by length together."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. `width` is the embedding's, `hidden` the units per direction or filters.

    The learning rate falls linearly to zero over `epochs`. A training ends earlier when `patience` epochs have brought no lower loss on
    the development part; the model of the best epoch is kept. Words that occur less than `minimum_count` times are unknown.
    """

    encoder: str
    width: int = 64
    hidden: int = 128
    epochs: int = 4
    batch: int = 32
    rate: float = 0.003
    dropout: float = 0.2
    minimum_count: int = 2
    patience: int = 2
    seed: int = 1


@dataclass(frozen=True)
class Row:
    """A sequence of token ids, and the targets that the model has to predict."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class StepBatch:
    """Padded rows. inputs: (rows, longest); lengths: (rows,); targets: (rows, longest), or the shape that a special loss needs."""

    inputs: Tensor
    lengths: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> StepBatch:
        return StepBatch(self.inputs.to(device), self.lengths.to(device), self.targets.to(device))


Loss = Callable[[Tensor, StepBatch], Tensor]
"""Returns the mean loss of the scores of a batch, (rows, steps, outputs)."""


@dataclass(frozen=True)
class Fitted:
    """A trained model. development: the loss on the development part after epoch `epoch`."""

    model: StepModel
    epoch: int
    development: float
    seconds: float


def fit(model: StepModel, train: list[Row], development: list[Row], loss: Loss, settings: Settings) -> Fitted:
    """Train a model that is on its device, and return it on the CPU."""
    shuffler = random.Random(settings.seed)
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], settings.rate)
    updates = settings.epochs * math.ceil(len(train) / settings.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    best, epoch_of_best, lowest = model, 0, math.inf
    start = time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        model.train()
        for batch in shuffled_batches(train, settings.batch, shuffler):
            learn(model, batch.to(model.device), loss, optimizer)
            schedule.step()
        reached = mean_loss(model.eval(), development, loss, settings.batch)
        if reached < lowest:
            best, epoch_of_best, lowest = copy.deepcopy(model), epoch, reached
        elif epoch - epoch_of_best >= settings.patience:
            break
    return Fitted(best.cpu().eval(), epoch_of_best, lowest, time.monotonic() - start)


def learn(model: StepModel, batch: StepBatch, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss(model(batch.inputs, batch.lengths), batch))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def mean_loss(model: StepModel, rows: list[Row], loss: Loss, size: int) -> float:
    """Return the mean of the loss over the targets of the rows."""
    total, targets = 0.0, 0
    for batch in (each.to(model.device) for each in batches(rows, size)):
        count = int((batch.targets != NO_TARGET).sum())
        total += count * float(loss(model(batch.inputs, batch.lengths), batch))
        targets += count
    return total / targets


def step_loss(scores: Tensor, batch: StepBatch) -> Tensor:
    """Return the mean cross entropy over the steps."""
    return nn.functional.cross_entropy(scores.transpose(1, 2), batch.targets, ignore_index=NO_TARGET)


def batches(rows: list[Row], size: int) -> Iterator[StepBatch]:
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        yield StepBatch(
            pad_sequence([row.inputs for row in chosen], batch_first=True),
            torch.tensor([len(row.inputs) for row in chosen]),
            pad_sequence([row.targets for row in chosen], batch_first=True, padding_value=NO_TARGET),
        )


def shuffled_batches(rows: list[Row], size: int, shuffler: random.Random) -> list[StepBatch]:
    """Return batches with every row once, in random order. Rows of similar length share a batch, which keeps padding small."""
    shuffled = shuffler.sample(rows, len(rows))
    groups = (shuffled[start : start + GROUP * size] for start in range(0, len(rows), GROUP * size))
    batch_list = [batch for group in groups for batch in batches(sorted(group, key=lambda row: len(row.inputs)), size)]
    shuffler.shuffle(batch_list)
    return batch_list
