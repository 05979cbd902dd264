"""How the framework backends go through a ragged batch: step by step over the rows that still have steps, never over padding.

Rows are taken longest first, so that the running rows are always the first ones and every step is one contiguous slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, Ragged, arithmetic, begins


@dataclass(frozen=True, slots=True)
class Order:
    """rows: (rows,) the rows, longest first; tokens: (tokens,) where the k-th token of the walk comes from; lengths: (rows,) in the
    order of the walk; running: how many rows run in each step, which are the first ones."""

    rows: Tensor
    tokens: Tensor
    lengths: Tensor
    running: list[int]

    def by_step(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Step by step the part of each array of values by token, in the order of the walk."""
        return zip(*(torch.split(value, self.running) for value in values), strict=True)

    def by_row(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Step by step the part of each array of values by row, in the order of the walk, that belongs to the running rows."""
        rows = self.rows.shape[0]
        for running in self.running:
            if running < rows:
                rows, values = running, tuple(value[:running] for value in values)
            yield values

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
    lengths = x.lengths
    rows = np.argsort(-lengths, kind="stable")
    step, row = (lengths[rows] > np.arange(lengths.max(initial=0))[:, None]).nonzero()
    by_row, by_token, sorted_lengths = (
        torch.from_numpy(one).to(x.data.device) for one in (rows, begins(lengths)[rows[row]] + step, lengths[rows])
    )
    return Order(by_row, by_token, sorted_lengths, np.bincount(step).tolist())


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
        self._step_places = None if self._steps is None else order.by_step(self._steps)
        self._sum_places = None if self._sum is None else order.by_row(self._sum)
        self._max_places = None if self._max is None else order.by_row(self._max)

    def take(self, hidden: Tensor) -> None:
        """hidden: (running rows, width), those of the next step."""
        if self._step_places is not None:
            next(self._step_places)[0].copy_(hidden)
        if self._sum_places is not None:
            next(self._sum_places)[0].add_(hidden)
        if self._max_places is not None:
            (highest,) = next(self._max_places)
            torch.maximum(highest, hidden, out=highest)

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
