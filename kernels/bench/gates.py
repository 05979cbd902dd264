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

from kernels.embedding import tap_rows
from kernels.qrnn.types import QRNNWeights
from kernels.ragged import Ragged
from kernels.sru.types import SRUWeights
from kernels.windows import windows


def of_sru(x: Ragged, weights: SRUWeights) -> tuple[Tensor, SRUWeights]:
    """Return the blocks (tokens, 3 or 4 x hidden), and the weights of a layer over them."""
    data, over_gates = x.data, replace(weights, input=None, table=None, skip_from=None, scale=1.0)
    if weights.table is not None:
        return weights.table[data.long()].double(), over_gates
    assert weights.input is not None
    blocks = data.double() @ weights.input.double()
    if weights.skip_from is None:
        return blocks, over_gates
    skip = data[:, weights.skip_from : weights.skip_from + weights.hidden].double() * weights.scale
    return torch.cat((blocks, skip), dim=1), over_gates


def of_qrnn(x: Ragged, weights: QRNNWeights) -> tuple[Tensor, QRNNWeights]:
    """Return the gates (tokens, blocks x hidden) without bias, and the weights of a layer over them."""
    window, over_gates = weights.window, replace(weights, input=None, tables=None)
    if weights.tables is not None:
        rows = windows(tap_rows(x), window, left=window - 1).flip(1)
        return weights.tables[torch.arange(window, device=rows.device), rows].double().sum(1), over_gates
    assert weights.input is not None
    steps = windows(x, window, left=window - 1).flip(1)
    return steps.flatten(1).double() @ weights.input.flatten(0, 1).double(), over_gates


GATES: dict[type[Any], Callable[[Ragged, Any], tuple[Tensor, Any]]] = {SRUWeights: of_sru, QRNNWeights: of_qrnn}
"""By the class of the weights."""
