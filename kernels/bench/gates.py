"""What the gates of an SRU or a QRNN are made of, for all steps at once and in float64: nothing in it waits for the step before.

So the reference need not compute it step by step, and what is left of a long row are short sums, which a CPU is quicker at than a
device that is asked for each of them. Layers are those of the bench: without a projection or a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.contract import QRNNWeights, SRUWeights
from kernels.embedding import FIRST

Rows = tuple[Tensor, ...]
"""The data of each row."""


def of_sru(rows: Rows, weights: SRUWeights) -> tuple[Tensor, SRUWeights]:
    """(tokens, 3 or 4 x hidden) blocks, and the weights of a layer over them."""
    data, after = torch.cat(rows), replace(weights, input=None, table=None, skip_from=None, scale=1.0)
    if weights.table is not None:
        return weights.table[data.long()].double(), after
    assert weights.input is not None
    blocks = data.double() @ weights.input.double()
    if weights.skip_from is None:
        return blocks, after
    skip = data[:, weights.skip_from : weights.skip_from + weights.hidden].double() * weights.scale
    return torch.cat((blocks, skip), dim=1), after


def of_qrnn(rows: Rows, weights: QRNNWeights) -> tuple[Tensor, QRNNWeights]:
    """(tokens, blocks x hidden) gates without bias, and the weights of a layer over them."""
    return torch.cat([_window(row, weights) for row in rows]), replace(weights, input=None, tables=None)


def _window(row: Tensor, weights: QRNNWeights) -> Tensor:
    """The sum over the present step and the ones before it; before the first one stand zeros."""
    if weights.tables is not None:
        ids = row.long() + FIRST
        return torch.stack([table[_later(ids, back)].double() for back, table in enumerate(weights.tables)]).sum(0)
    assert weights.input is not None
    return torch.stack([_later(row, back).double() @ taps.double() for back, taps in enumerate(weights.input)]).sum(0)


def _later(row: Tensor, steps: int) -> Tensor:
    """The same row so many steps later, as long as it was."""
    return pad(row, (0, 0) * (row.dim() - 1) + (steps, 0))[: len(row)]


GATES: dict[str, Callable[[Rows, Any], tuple[Tensor, Any]]] = {"sru": of_sru, "qrnn": of_qrnn}
