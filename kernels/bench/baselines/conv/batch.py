"""A padded batch as the strategies of a convolution read it, and what becomes of the windows that they multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from kernels.bench.agreement import Expected
from kernels.bench.baselines.baseline import Call, pad
from kernels.bench.given import Given
from kernels.contract import ConvWeights

TAIL = 8
"""Steps of zeros after the last row, as windows are also taken over the ends of rows, where nobody looks at them."""

Windows = Callable[[], Tensor]
"""(rows, steps, outputs): one for each step at which a window begins, or for those alone at which one is whole; with the bias."""


@dataclass(frozen=True, slots=True)
class Batch:
    """flat: (rows x steps + TAIL, inputs), the zeros before and after each row as well."""

    flat: Tensor
    rows: int
    steps: int

    @property
    def count(self) -> int:
        return self.rows * self.steps

    @property
    def data(self) -> Tensor:
        """(rows, steps, inputs)"""
        return self.flat[: self.count].view(self.rows, self.steps, -1)

    def whole(self, layer: ConvWeights) -> int:
        """Windows of a row that do not reach over its end."""
        return self.steps - layer.reach + 1

    def by_row(self, windows: Tensor) -> Tensor:
        """(at least count, outputs) to (rows, steps, outputs)."""
        return windows[: self.count].view(self.rows, self.steps, -1)


Strategy = Callable[[Batch, ConvWeights], Windows]
"""Lays out its own data and filters, and gives what is timed."""


def batch_of(given: Given) -> Batch:
    """Layers of a workload look as far beyond a row's ends as each other."""
    layers: tuple[ConvWeights, ...] = given.weights
    assert all((layer.stride, layer.dilation) == (1, 1) for layer in layers)
    around = layers[0].left, layers[0].right
    longest = max(layer.reach for layer in layers) - sum(around)
    data = padded(pad(given, at_least=longest).transpose(0, 1), (0, 0, *around))
    rows, steps, inputs = data.shape
    return Batch(padded(data.reshape(-1, inputs), (0, 0, 0, TAIL)), rows, steps)


def convolved(
    given: Given, strategy: Strategy, right: Expected | None = None, extra: Mapping[str, float] | None = None
) -> Call:
    """ReLU, then every step of a dense layer, or the maximum over time of each width of a text CNN."""
    batch, layers = batch_of(given), given.weights
    runs = [strategy(batch, layer) for layer in layers]
    if given.want == "steps":
        (run,), own = runs, until(given, given.lengths, max(given.lengths))
        return Call(lambda: run().relu_(), lambda answer: answer[:, : own.shape[1]][own], right, extra or {})
    pools = [_pooled(given, layer, run, batch.whole(layer)) for layer, run in zip(layers, runs, strict=True)]
    return Call(lambda: torch.cat([pool() for pool in pools], dim=1), right=right, extra=extra or {})


def _pooled(given: Given, layer: ConvWeights, run: Windows, longest: int) -> Callable[[], Tensor]:
    """Windows that reach into the padding must not win the maximum; after a ReLU nothing is below zero."""
    if not given.ragged:
        return lambda: run().relu_()[:, :longest].amax(1)
    own = until(given, whole_windows(given, layer), longest)[..., None]
    return lambda: (run().relu_()[:, :longest] * own).amax(1)


def whole_windows(given: Given, layer: ConvWeights) -> list[int]:
    """Of each row, for a layer that looks at nothing beyond its ends."""
    counts: list[int] = layer.steps(np.array(given.lengths)).tolist()
    return counts


def until(given: Given, counts: list[int], longest: int) -> Tensor:
    """(rows, longest): whether a position is one of the first so many of its row."""
    device = given.x.data.device
    return torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None]


def grown(given: Given, laid_out: int) -> float:
    """How many times the bytes of the data as they come, unpadded, a strategy lays out anew."""
    return laid_out / given.x.data.nbytes
