"""Gate inputs of an SRU or a QRNN for all steps at once, in float64: they do not depend on the previous step.

The reference then only computes the short sums of the recurrence, for which a CPU is faster than a launch for each step. Layers are as
in the bench, without a projection or a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.embedding import FIRST
from kernels.qrnn.types import QRNNWeights
from kernels.sru.types import SRUWeights

Rows = tuple[Tensor, ...]
"""The data of each row."""


def of_sru(rows: Rows, weights: SRUWeights) -> tuple[Tensor, SRUWeights]:
    """Return the blocks (tokens, 3 or 4 x hidden), and the weights of a layer over them."""
    data, over_gates = torch.cat(rows), replace(weights, input=None, table=None, skip_from=None, scale=1.0)
    if weights.table is not None:
        return weights.table[data.long()].double(), over_gates
    assert weights.input is not None
    blocks = data.double() @ weights.input.double()
    if weights.skip_from is None:
        return blocks, over_gates
    skip = data[:, weights.skip_from : weights.skip_from + weights.hidden].double() * weights.scale
    return torch.cat((blocks, skip), dim=1), over_gates


def of_qrnn(rows: Rows, weights: QRNNWeights) -> tuple[Tensor, QRNNWeights]:
    """Return the gates (tokens, blocks x hidden) without bias, and the weights of a layer over them."""
    return torch.cat([_window(row, weights) for row in rows]), replace(weights, input=None, tables=None)


def _window(row: Tensor, weights: QRNNWeights) -> Tensor:
    """Return the sum over each step and the previous steps of its window, with zeros before the row."""
    if weights.tables is not None:
        ids = row.long() + FIRST
        return torch.stack([table[_shifted(ids, back)].double() for back, table in enumerate(weights.tables)]).sum(0)
    assert weights.input is not None
    return torch.stack([_shifted(row, back).double() @ taps.double() for back, taps in enumerate(weights.input)]).sum(0)


def _shifted(row: Tensor, steps: int) -> Tensor:
    """Return the row shifted by `steps` steps, with its old length."""
    return pad(row, (0, 0) * (row.dim() - 1) + (steps, 0))[: len(row)]


GATES: dict[type[Any], Callable[[Rows, Any], tuple[Tensor, Any]]] = {SRUWeights: of_sru, QRNNWeights: of_qrnn}
"""By the class of the weights."""
