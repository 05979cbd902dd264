"""The training loop of the text classifiers: adversarial training, and early stopping on a development part."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from training.classifier import Classifier
from training.vocabulary import UNKNOWN, PaddedBatch, TokenisedText, shuffled_batches


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. For a CNN, `hidden` is the number of filters of each width.

    A training ends after `epochs`, or earlier when `patience` epochs have brought no better accuracy on the development part; the model
    of the best epoch is then kept. With a patience of 0, no part is held out, and the model of the last epoch is kept. `static` keeps
    the embedding unchanged, which makes sense with pretrained vectors.
    """

    encoder: str
    width: int = 300
    hidden: int = 128
    epochs: int = 8
    batch: int = 25
    rate: float = 0.002
    dropout: float = 0.5
    word_dropout: float = 0.1
    smoothing: float = 0.1
    push: float = 4.0
    minimum_count: int = 2
    static: bool = False
    patience: int = 3
    seed: int = 1


@dataclass(frozen=True)
class Epoch:
    """The result of an epoch. seconds: since the start of the training. development_percent: None without a development part."""

    seconds: float
    development_percent: float | None


@dataclass(frozen=True)
class Fitted:
    """A trained model. development: the percentage on the development part after epoch `epoch`, None without one. curve: all epochs."""

    model: Classifier
    epoch: int
    development: float | None
    seconds: float
    curve: tuple[Epoch, ...] = ()


def cross_entropy(model: Classifier, batch: PaddedBatch, smoothing: float) -> Tensor:
    return nn.functional.cross_entropy(model(batch.tokens, batch.lengths), batch.labels, label_smoothing=smoothing)


Loss = Callable[[Classifier, PaddedBatch, float], Tensor]
"""Returns the mean loss of a model on a batch. The number is the label smoothing."""


def fit(
    train: list[TokenisedText],
    development: list[TokenisedText],
    labels: tuple[str, ...],
    vectors: Tensor,
    settings: Settings,
    device: torch.device | None = None,
) -> Fitted:
    """Train a new model. vectors: (vocabulary, width), with NaN in the rows that start from random values."""
    torch.manual_seed(settings.seed)
    model = Classifier(settings.encoder, len(vectors), settings.width, settings.hidden, labels, settings.dropout)
    start_from(model.embedding.weight, vectors)
    return improve(model, train, development, settings, device)


def improve(
    model: Classifier,
    train: list[TokenisedText],
    development: list[TokenisedText],
    settings: Settings,
    device: torch.device | None = None,
    loss: Loss = cross_entropy,
) -> Fitted:
    """Train a model from its present weights. loss: to minimise."""
    shuffler = random.Random(settings.seed)
    model.embedding.weight.requires_grad_(not settings.static)
    model.to(device or torch.device("cpu")).train()
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], settings.rate, fused=True)
    steps = settings.epochs * math.ceil(len(train) / settings.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    best: Fitted | None = None
    curve: list[Epoch] = []
    start = time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        for batch in shuffled_batches(train, settings.batch, shuffler):
            step(model, with_word_dropout(batch, settings.word_dropout).to(model.device), optimizer, settings, loss)
            schedule.step()
        reached = model.eval().accuracy(development) if development else None
        curve.append(Epoch(time.monotonic() - start, reached))
        model.train()
        if best is None or reached is None or best.development is None or reached > best.development:
            best = Fitted(copy.deepcopy(model) if development else model, epoch, reached, 0.0)
        elif epoch - best.epoch >= settings.patience:
            break
    assert best is not None
    return replace(best, model=best.model.cpu().eval(), seconds=time.monotonic() - start, curve=tuple(curve))


@torch.no_grad()
def start_from(weight: Tensor, vectors: Tensor) -> None:
    """Copy the vectors that are not NaN."""
    weight.copy_(torch.where(vectors.isnan(), weight, vectors))


def step(model: Classifier, batch: PaddedBatch, optimizer: torch.optim.Optimizer, settings: Settings, loss: Loss) -> None:
    """Train on the batch and, unless embeddings are static, on the same batch with embeddings that are moved towards a higher loss."""
    optimizer.zero_grad()
    torch.autograd.backward(loss(model, batch, settings.smoothing))
    if settings.push and not settings.static:
        with pushed(model.embedding.weight, settings.push):
            torch.autograd.backward(loss(model, batch, settings.smoothing))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@contextmanager
def pushed(weight: Tensor, distance: float) -> Iterator[None]:
    """Within the context, move `weight` by `distance` along its gradient: adversarial training (Miyato et al., 2017)."""
    assert weight.grad is not None
    before = weight.detach().clone()
    weight.data.add_(weight.grad / weight.grad.norm().clamp_min(1e-9), alpha=distance)
    yield
    weight.data.copy_(before)


def with_word_dropout(batch: PaddedBatch, share: float) -> PaddedBatch:
    """Replace some words by the unknown token, so that its embedding is trained."""
    return replace(batch, tokens=batch.tokens.masked_fill(torch.rand(batch.tokens.shape) < share, UNKNOWN))
