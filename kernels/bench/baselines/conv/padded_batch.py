"""Padded batches for the strategies of a convolution, and the pooling of their windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from kernels.bench.agreement import ExpectedAnswer
from kernels.bench.baselines.baseline import TimedCall, pad
from kernels.bench.case import BenchCase
from kernels.conv.types import ConvWeights

TAIL = 8
"""Steps of zeros after the last row: strategies also compute windows across the ends of rows, and discard them."""

Windows = Callable[[], Tensor]
"""Returns (rows, steps, outputs) with the bias: a window for each step, or only the whole windows."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Padded rows. flat: (rows x steps + TAIL, inputs), including the zeros before and after each row."""

    flat: Tensor
    rows: int
    steps: int

    @property
    def count(self) -> int:
        return self.rows * self.steps

    @property
    def data(self) -> Tensor:
        """The rows as (rows, steps, inputs)."""
        return self.flat[: self.count].view(self.rows, self.steps, -1)

    def whole(self, layer: ConvWeights) -> int:
        """Return the number of windows that end within a padded row."""
        return self.steps - layer.reach + 1

    def by_row(self, windows: Tensor) -> Tensor:
        """Reshape (at least count, outputs) to (rows, steps, outputs)."""
        return windows[: self.count].view(self.rows, self.steps, -1)


Strategy = Callable[[PaddedBatch, ConvWeights], Windows]
"""Prepares its layout of data and filters, and returns the function to be timed."""


def batch_of(case: BenchCase) -> PaddedBatch:
    """Return the padded batch. All layers of a workload have the same padding."""
    layers: tuple[ConvWeights, ...] = case.weights
    assert all((layer.stride, layer.dilation) == (1, 1) for layer in layers)
    around = layers[0].left, layers[0].right
    longest = max(layer.reach for layer in layers) - sum(around)
    data = padded(pad(case, at_least=longest).transpose(0, 1), (0, 0, *around))
    rows, steps, inputs = data.shape
    return PaddedBatch(padded(data.reshape(-1, inputs), (0, 0, 0, TAIL)), rows, steps)


def convolved(
    case: BenchCase, strategy: Strategy, expected: ExpectedAnswer | None = None, extra: Mapping[str, float] | None = None
) -> TimedCall:
    """Add a ReLU, and the maximum over time for each width of a text CNN."""
    batch, layers = batch_of(case), case.weights
    runs = [strategy(batch, layer) for layer in layers]
    if case.want == "steps":
        (run,), inside = runs, until(case, case.lengths, max(case.lengths))
        return TimedCall(lambda: run().relu_(), lambda answer: answer[:, : inside.shape[1]][inside], expected, extra or {})
    pools = [_pooled(case, layer, run, batch.whole(layer)) for layer, run in zip(layers, runs, strict=True)]
    return TimedCall(lambda: torch.cat([pool() for pool in pools], dim=1), expected=expected, extra=extra or {})


def _pooled(case: BenchCase, layer: ConvWeights, run: Windows, longest: int) -> Callable[[], Tensor]:
    """Zero the windows that reach into the padding, so that they do not change the maximum after a ReLU."""
    if not case.ragged:
        return lambda: run().relu_()[:, :longest].amax(1)
    inside = until(case, whole_windows(case, layer), longest)[..., None]
    return lambda: (run().relu_()[:, :longest] * inside).amax(1)


def whole_windows(case: BenchCase, layer: ConvWeights) -> list[int]:
    """Return the windows of each row, for a layer without padding."""
    counts: list[int] = layer.steps(np.array(case.lengths)).tolist()
    return counts


def until(case: BenchCase, counts: list[int], longest: int) -> Tensor:
    """Return a mask (rows, longest) of the first `counts` positions of each row."""
    device = case.x.data.device
    return torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None]


def memory_growth(case: BenchCase, copied: int) -> float:
    """Return the bytes that a strategy copies, relative to the unpadded data."""
    return copied / case.x.data.nbytes
