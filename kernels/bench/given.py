"""The arguments of a workload: random, from a fixed seed, and how our own backends are called with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.bench.workloads import WANT, WIDTHS, Workload
from kernels.contract import STORAGE, ConvWeights, GRUWeights, LSTMWeights, Outputs, QRNNWeights, Ragged, SRUWeights


@dataclass(frozen=True, slots=True)
class Given:
    """x and weights in the workload's dtype on one device; several weights are layers over the same x, their outputs concatenated."""

    family: str
    want: str
    x: Ragged
    lengths: list[int]
    weights: tuple[Any, ...]

    @property
    def ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    def encoder(self, backend: str) -> Callable[[], Tensor]:
        """A call as users make it: (rows, hidden), or (tokens, hidden) where every step is wanted."""
        encode, want = getattr(import_module(f"kernels.{self.family}"), self.family), Outputs(**{self.want: True})

        def call() -> Tensor:
            outputs = [getattr(encode(self.x, one, want=want, backend=backend), self.want) for one in self.weights]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

        return call


def made_up(workload: Workload, device: torch.device, seed: int = 0) -> Given:
    """Normal values, weights scaled so that gates neither vanish nor saturate."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(STORAGE[workload.dtype])

    lengths = workload.row_lengths()
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    x = Ragged(normal(sum(lengths), workload.inputs), offsets)
    return Given(workload.family, WANT[workload.kind], x, lengths, _WEIGHTS[workload.family](workload, normal))


Normal = Callable[..., Tensor]


def _lstm(workload: Workload, normal: Normal) -> tuple[LSTMWeights, ...]:
    """Of a recurrence, the data are the gate inputs."""
    inputs, hidden = workload.inputs, workload.hidden
    if workload.kind == "recurrence":
        return (LSTMWeights(input=None, recurrent=normal(hidden, 4 * hidden, scale=hidden**-0.5), bias=None),)
    matrices = normal(inputs, 4 * hidden, scale=inputs**-0.5), normal(hidden, 4 * hidden, scale=hidden**-0.5)
    return (LSTMWeights(*matrices, bias=normal(4 * hidden)),)


def _gru(workload: Workload, normal: Normal) -> tuple[GRUWeights, ...]:
    inputs, hidden = workload.inputs, workload.hidden
    matrices = normal(inputs, 3 * hidden, scale=inputs**-0.5), normal(hidden, 3 * hidden, scale=hidden**-0.5)
    return (GRUWeights(*matrices, bias=normal(3 * hidden), recurrent_bias=normal(hidden)),)


def _sru(workload: Workload, normal: Normal) -> tuple[SRUWeights, ...]:
    inputs, hidden = workload.inputs, workload.hidden
    matrix = normal(inputs, 3 * hidden, scale=inputs**-0.5)
    return (SRUWeights(input=matrix, bias=normal(2 * hidden), cell=normal(2 * hidden, scale=0.5), skip_from=0),)


def _qrnn(workload: Workload, normal: Normal) -> tuple[QRNNWeights, ...]:
    inputs, hidden = workload.inputs, workload.hidden
    return (QRNNWeights(normal(2, inputs, 3 * hidden, scale=(2 * inputs) ** -0.5), normal(3 * hidden)),)


def _conv(workload: Workload, normal: Normal) -> tuple[ConvWeights, ...]:
    """A text CNN takes windows that are whole, a dense layer gives a step for every step."""
    widths = WIDTHS[workload.kind]
    inputs, outputs = workload.inputs, workload.hidden // len(widths)

    def one(width: int) -> ConvWeights:
        around = width // 2 if workload.kind == "dense-conv" else 0
        filters = normal(width, inputs, outputs, scale=(width * inputs) ** -0.5)
        return ConvWeights(filters, normal(outputs), left=around, right=around, activation="relu")

    return tuple(one(width) for width in widths)


_WEIGHTS: dict[str, Callable[[Workload, Normal], tuple[Any, ...]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "sru": _sru,
    "qrnn": _qrnn,
    "conv": _conv,
}
