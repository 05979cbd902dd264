"""How the framework backends go through a ragged batch: step by step over the rows that still have steps, never over padding.

Rows are taken longest first, so that the running rows are always the first ones and every step is one contiguous slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, arithmetic


@dataclass(frozen=True, slots=True)
class Order:
    """rows: (rows,) the rows, longest first; tokens: (tokens,) where the k-th token of the walk comes from; lengths: (rows,)
    in the order of the walk; steps: the walk's slices, `(begin, end)` being one step of the first end - begin rows."""

    rows: Tensor
    tokens: Tensor
    lengths: Tensor
    steps: list[tuple[int, int]]

    def sorted(self, state: Tensor | None, width: int) -> Tensor:
        """(rows, width) float32 in the order of the walk; zeros when there is no state. The caller's array is not touched."""
        if state is None:
            return self.rows.new_zeros(len(self.rows), width, dtype=torch.float32)
        return state.float().index_select(0, self.rows)

    def rows_back(self, values: Tensor) -> Tensor:
        """Values by row, in the order in which the rows came."""
        return torch.empty_like(values).index_copy_(0, self.rows, values)

    def tokens_back(self, values: Tensor) -> Tensor:
        """Values by token, in the order in which the tokens came."""
        return torch.empty_like(values).index_copy_(0, self.tokens, values)


def longest_first(x: Ragged) -> Order:
    """Sorted on the host, as the steps of the walk are launched from there."""
    offsets = x.offsets.cpu().long()
    lengths = torch.diff(offsets)
    rows = torch.argsort(lengths, descending=True, stable=True)
    longest = int(lengths.max()) if x.rows else 0
    running = (lengths[rows][None, :] > torch.arange(longest)[:, None]).nonzero()
    tokens = offsets[rows[running[:, 1]]] + running[:, 0]
    ends = torch.bincount(running[:, 0], minlength=longest).cumsum(0).tolist()
    device = x.data.device
    return Order(rows.to(device), tokens.to(device), lengths[rows].to(device), list(zip([0, *ends], ends, strict=False)))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight + bias`` in the arithmetic of the device, out in float32. x: (n, inputs); weight: (inputs, m); bias: (m,) or (n, m)."""
    dtype = arithmetic(weight.dtype, x.device)
    if bias is None:
        return torch.mm(x.to(dtype), weight.to(dtype)).float()
    if dtype == torch.float32:
        return torch.addmm(bias.float(), x.float(), weight.float())
    return torch.mm(x.to(dtype), weight.to(dtype)).float().add_(bias)


class Harvest:
    """What is wanted of the hidden vectors, gathered on the way."""

    def __init__(self, order: Order, width: int, want: Outputs) -> None:
        self._order = order
        self._want = want
        zeros = order.rows.new_zeros(len(order.rows), width, dtype=torch.float32)
        self._steps = zeros.new_empty(len(order.tokens), width) if want.steps else None
        self._sum = zeros.clone() if want.mean else None
        self._max = torch.full_like(zeros, -torch.inf) if want.max else None

    def take(self, begin: int, end: int, hidden: Tensor) -> None:
        """hidden: (end - begin, width), one step of the running rows."""
        if self._steps is not None:
            self._steps[begin:end] = hidden
        if self._sum is not None:
            self._sum[: end - begin] += hidden
        if self._max is not None:
            running = self._max[: end - begin]
            torch.maximum(running, hidden, out=running)

    def encoded(self, last: Tensor, state: Any) -> Encoded:
        """last: (rows, width) in the order of the walk; state: what goes on, in the order in which the rows came."""
        order, lengths = self._order, self._order.lengths[:, None]
        return Encoded(
            state=state,
            steps=None if self._steps is None else order.tokens_back(self._steps),
            last=order.rows_back(last) if self._want.last else None,
            mean=None if self._sum is None else order.rows_back(self._sum / lengths.clamp(min=1)),
            max=None if self._max is None else order.rows_back(self._max.where(lengths > 0, 0.0)),
        )
