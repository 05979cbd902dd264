"""The arguments of a workload: random, from a fixed seed, and how our own backends are called with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.bench.workloads import FORMS, LONG_MEMORY, PEERS_ALONE, WANT, WIDTHS, Workload
from kernels.contract import STORAGE, ConvWeights, GRUWeights, LSTMWeights, Outputs, QRNNWeights, Ragged, SRUWeights
from kernels.embedding import FIRST


@dataclass(frozen=True, slots=True)
class Given:
    """x and weights in the workload's dtype on one device; several weights are layers over the same x, their outputs concatenated.

    Without weights, the data are there for others than our encoders.
    """

    workload: Workload
    x: Ragged
    lengths: list[int]
    weights: tuple[Any, ...]

    @property
    def want(self) -> str:
        return WANT[self.workload.kind]

    @property
    def ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    def encoder(self, backend: str) -> Callable[[], Tensor]:
        """A call as users make it: (rows, hidden), or (tokens, hidden) where every step is wanted."""
        family, want = self.workload.family, Outputs(**{self.want: True})
        encode = getattr(import_module(f"kernels.{family}"), family)

        def call() -> Tensor:
            outputs = [getattr(encode(self.x, one, want=want, backend=backend), self.want) for one in self.weights]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

        return call


def made_up(workload: Workload, device: torch.device, seed: int = 0) -> Given:
    """Normal values, weights scaled so that gates neither vanish nor saturate; of a folded layer, token ids as likely as each other."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths = workload.row_lengths()
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    normal = _normal(workload, generator)
    if workload.kind == "folded":
        ids = torch.randint(workload.inputs, (sum(lengths),), generator=generator, device=device, dtype=torch.int32)
        return Given(workload, Ragged(ids, offsets), lengths, _weights(workload, normal))
    x = Ragged(normal(sum(lengths), workload.inputs), offsets)
    return Given(workload, x, lengths, () if workload.kind in PEERS_ALONE else _weights(workload, normal))


def another(given: Given, family: str, form: str = "") -> Given:
    """A layer of another family, as large and over the same data."""
    workload = replace(given.workload, family=family, form=form)
    normal = _normal(workload, torch.Generator(given.x.data.device).manual_seed(1))
    return replace(given, workload=workload, weights=_weights(workload, normal))


Normal = Callable[..., Tensor]


def _normal(workload: Workload, generator: torch.Generator) -> Normal:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=generator.device) * scale
        return values.to(STORAGE[workload.dtype])

    return normal


def _weights(workload: Workload, normal: Normal) -> tuple[Any, ...]:
    return _WEIGHTS[workload.family](workload, normal)


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
    """Over token ids, the skip is the fourth block of a table; else it is the data's own columns."""
    inputs, hidden = workload.inputs, workload.hidden
    bias, cell = normal(2 * hidden), normal(2 * hidden, scale=0.5) if workload.form == "v2" else None
    if workload.form == LONG_MEMORY:
        bias[:hidden] += 4
    if workload.kind == "folded":
        return (SRUWeights(input=None, bias=bias, cell=cell, table=normal(inputs, 4 * hidden)),)
    return (SRUWeights(input=normal(inputs, 3 * hidden, scale=inputs**-0.5), bias=bias, cell=cell, skip_from=0),)


def _qrnn(workload: Workload, normal: Normal) -> tuple[QRNNWeights, ...]:
    """Over token ids, the rows of the tables before that of the first id are padding, and zero."""
    inputs, hidden = workload.inputs, workload.hidden
    bias, window = normal(3 * hidden), FORMS["qrnn"].index(workload.form) + 1
    if workload.kind == "folded":
        tables = normal(window, FIRST + inputs, 3 * hidden, scale=window**-0.5)
        tables[:, :FIRST] = 0
        return (QRNNWeights(input=None, bias=bias, tables=tables),)
    return (QRNNWeights(normal(window, inputs, 3 * hidden, scale=(window * inputs) ** -0.5), bias),)


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
