"""A classifier of whole time series, and its training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from training.series_sets import Series
from training.signal_model import SignalModel
from training.steps import max_over_time

ROWS = 100
"""Series of a batch that is only evaluated."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. `noise` is in standard deviations of a channel."""

    encoder: str = "sru"
    hidden: int = 64
    epochs: int = 40
    batch: int = 16
    rate: float = 0.004
    dropout: float = 0.3
    noise: float = 0.2
    smoothing: float = 0.1
    seed: int = 1


@dataclass(frozen=True)
class Batch:
    """rows: (series, longest, channels), with zeros for padding."""

    rows: Tensor
    lengths: Tensor
    labels: Tensor

    @classmethod
    def of(cls, series: list[Series], labels: tuple[str, ...]) -> Batch:
        rows = pad_sequence([torch.from_numpy(one.rows) for one in series], batch_first=True)
        lengths = torch.tensor([len(one.rows) for one in series])
        return cls(rows, lengths, torch.tensor([labels.index(one.label) for one in series]))


class SeriesClassifier(SignalModel):
    """The maximum over the steps of an encoder, and a linear layer."""

    def __init__(self, series: list[Series], labels: tuple[str, ...], settings: Settings) -> None:
        rows = torch.from_numpy(np.concatenate([one.rows for one in series]))
        super().__init__(settings.encoder, rows, settings.hidden, len(labels), causal=False, dropout=settings.dropout)
        self.labels = labels

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return (series, labels) of (series, steps, channels)."""
        vectors = max_over_time(self.encoder.steps(self.below_encoder(inputs, lengths), lengths), lengths)
        scores: Tensor = self.head(self.dropout(vectors))
        return scores

    @torch.no_grad()
    def accuracy(self, series: list[Series]) -> float:
        """Return the percentage of series with the correct label."""
        correct = 0
        for first in range(0, len(series), ROWS):
            batch = Batch.of(series[first : first + ROWS], self.labels)
            correct += int((self(batch.rows, batch.lengths).argmax(1) == batch.labels).sum())
        return 100 * correct / len(series)


def fit(series: list[Series], labels: tuple[str, ...], settings: Settings) -> tuple[SeriesClassifier, float]:
    """Return the model after the last epoch, and the seconds that its training took."""
    torch.manual_seed(settings.seed)
    model = SeriesClassifier(series, labels, settings).train()
    deviations = settings.noise * model.norm[3].sqrt()
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], settings.rate, fused=True)
    steps = settings.epochs * math.ceil(len(series) / settings.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    start = time.monotonic()
    for _ in range(settings.epochs):
        for rows in torch.split(torch.randperm(len(series)), settings.batch):
            batch = Batch.of([series[index] for index in rows.tolist()], labels)
            scores = model(batch.rows + deviations * torch.randn(batch.rows.shape), batch.lengths)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(scores, batch.labels, label_smoothing=settings.smoothing))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval(), time.monotonic() - start
