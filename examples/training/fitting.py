"""The training loop of all recipes: Adam with a rate that falls to zero, and early stopping on a development part."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from training.model import Model
from training.terminal import bar

Chunk = TypeVar("Chunk")


@dataclass(frozen=True)
class Fitted:
    """The epoch whose weights the model has, its score on the development part (None without one), and the seconds of training."""

    epoch: int
    score: float | None
    seconds: float


def fit(
    model: Model,
    epochs: int,
    rate: float,
    batches: Callable[[int], list[Chunk]],
    backward: Callable[[Chunk], Tensor],
    *,
    score: Callable[[], float] | None = None,
    patience: int = 0,
    every_batch: bool = True,
) -> Fitted:
    """Train a model in place.

    batches: the batches of an epoch, of its number from 0. backward: adds the gradients of a batch to the parameters and returns the
    loss. score: of the model on the development part, the higher the better. With it, training ends when `patience` epochs have brought
    no better score, and the model gets the weights of the best epoch. every_batch: the rate falls after every batch, or every epoch.
    """
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], rate, fused=True)
    schedule: torch.optim.lr_scheduler.LinearLR | None = None
    best, weights = Fitted(0, None, 0.0), model.state_dict()
    start = time.monotonic()
    with bar("training", epochs) as progress:
        for epoch in range(epochs):
            model.train()
            chunks = batches(epoch)
            if schedule is None:
                schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * (len(chunks) if every_batch else 1))
            for chunk in chunks:
                optimizer.zero_grad()
                loss = backward(chunk)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if every_batch:
                    schedule.step()
                reached = "" if best.score is None else f", development {abs(best.score):.4g}"
                progress(1 / len(chunks), f"loss {float(loss):.4f}{reached}")
            if not every_batch:
                schedule.step()
            model.eval()
            latest = score() if score else None
            if latest is None:
                best = Fitted(epoch + 1, None, 0.0)
            elif best.score is None or latest > best.score:
                best, weights = Fitted(epoch + 1, latest, 0.0), copy.deepcopy(model.state_dict())
            elif epoch + 1 - best.epoch >= patience:
                break
    if score:
        model.load_state_dict(weights)
    return Fitted(best.epoch, best.score, time.monotonic() - start)
