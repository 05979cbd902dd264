"""Trains a model that hears a keyword, and scores it on development streams to choose the threshold of an event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from training.frames import FRAME_SECONDS, known_at
from training.keyword_data import Batch, Corpus, Windows, varied
from training.signal_model import SignalModel
from training.spotting import NOTHING, Detector, Score, compare

Scores = dict[float, Score]
"""Scores by threshold."""
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)
FALSE_ALARMS_AN_HOUR = 0.5
"""The threshold allows at most this rate on the babble of the development part."""
MIXED: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this processor multiplies matrices of bfloat16, which is faster. The weights and the recurrence stay float32."""
AT_ONCE = 20
"""Development streams."""


@dataclass(frozen=True)
class Settings:
    """The settings of a training; every field is a flag. The training part has `streams` of a minute with the keyword and `babble` without
    it, which are cut into windows of `window` frames. Each `every` epochs, one epoch has all windows. The others have `share` of them,
    mostly those with large losses. At the start, recurrent layers remember 1 to `memory` frames. For convolutions, `hidden` is the number
    of filters."""

    encoder: str = "sru"
    hidden: int = 96
    epochs: int = 32
    every: int = 16
    share: float = 0.3
    batch: int = 16
    rate: float = 0.003
    loudness: float = 1.0
    warp: float = 0.05
    tilt: float = 0.5
    front: int = 5
    memory: float = 60.0
    streams: int = 300
    babble: int = 240
    window: int = 400
    seed: int = 1


@dataclass(frozen=True)
class Trained:
    """development: the scores on the development streams with keywords, and on the babble."""

    model: SignalModel
    seconds: float
    development: list[Scores]


def train(settings: Settings, training: Sequence[Corpus], development: Sequence[Corpus]) -> Trained:
    """Return the model after the last epoch: the rate falls to almost zero, so no epoch has to be chosen."""
    torch.manual_seed(settings.seed)
    start = time.monotonic()
    windows = Windows(training, settings.window)
    sample = windows.frames[:, ::100].flatten(0, 1).float()
    model = SignalModel(settings.encoder, sample, settings.hidden, 2, causal=True, front=settings.front).train()
    model.encoder.remember(settings.memory)
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], settings.rate, fused=True)
    shares = [settings.share if epoch % settings.every else 1.0 for epoch in range(settings.epochs)]
    left = sum(shares)
    for share in shares:
        optimizer.param_groups[0]["lr"] = settings.rate * left / sum(shares)
        for batch in windows.epoch(settings.batch, share):
            frames = varied(batch.frames, settings.loudness, settings.warp, settings.tilt)
            windows.losses[batch.numbers] = learn(model, replace(batch, frames=frames), optimizer)
        left -= share
    seconds = time.monotonic() - start
    return Trained(model.eval(), seconds, list(map(partial(scores, model), development)))


def learn(model: SignalModel, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the loss of each window."""
    with torch.autocast("cpu", torch.bfloat16, enabled=MIXED):
        outputs = model(batch.frames, torch.full((len(batch.frames),), batch.frames.shape[1])).float()
    losses = batch.weights * nn.functional.cross_entropy(outputs.transpose(1, 2), batch.labels, reduction="none")
    optimizer.zero_grad()
    torch.autograd.backward(losses.sum() / batch.weights.sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return losses.detach().sum(1)


@torch.no_grad()
def scores(model: SignalModel, part: Corpus) -> Scores:
    """Return the scores of a part by threshold, as the model in PyTorch alone has them."""
    totals = dict.fromkeys(THRESHOLDS, NOTHING)
    for first in range(0, len(part.frames), AT_ONCE):
        rows = torch.from_numpy(part.frames[first : first + AT_ONCE]).float()
        outputs = model(rows, torch.full((len(rows),), rows.shape[1]))
        for probabilities, ends in zip(outputs.softmax(-1)[..., 1].tolist(), part.ends[first:], strict=False):
            for threshold in THRESHOLDS:
                events = [known_at(frame) for frame in Detector(threshold).add(probabilities)]
                totals[threshold] += compare(ends, events, len(probabilities) * FRAME_SECONDS)
    return totals


def best(spoken: Scores, babble: Scores) -> float:
    """Return the threshold with the fewest misses among those with few (or the fewest) false alarms in babble; if equal, the highest."""

    def faults(threshold: float) -> tuple[float, int, float]:
        alarms = max(FALSE_ALARMS_AN_HOUR, babble[threshold].false_alarms_an_hour)
        return alarms, spoken[threshold].misses, -threshold

    return min(THRESHOLDS, key=faults)
