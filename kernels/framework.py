"""Shared by the framework backends: a loop over the time steps of a ragged batch that never computes padding.

Rows run longest first, so that the rows that still have steps always come first and every step is one contiguous slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged, compute_dtype, start_offsets


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The order in which a loop over time steps takes rows and tokens.

    rows: (rows,) the batch's rows, longest first, or None for the order of the batch; tokens: (tokens,) the batch's tokens, step by step,
    or None for the order of the batch; lengths: (rows,), longest first; running: the number of rows that have each step.
    """

    rows: Tensor | None
    tokens: Tensor | None
    lengths: Tensor
    running: list[int]

    def by_step(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield, for each step, its slice of each array of token values in step order."""
        return zip(*(torch.split(value, self.running) for value in values), strict=True)

    def by_row(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield, for each step, the running rows' slice of each array of row values in step order."""
        rows = self.lengths.shape[0]
        for running in self.running:
            if running < rows:
                rows, values = running, tuple(value[:running] for value in values)
            yield values

    def sort_rows(self, state: Tensor | None, width: int) -> Tensor:
        """Return a copy of a state, (rows, width) float32, in step order; zeros when there is no state."""
        if state is None:
            return self.lengths.new_zeros(len(self.lengths), width, dtype=torch.float32)
        if self.rows is None:
            return state.to(torch.float32, copy=True)
        return state.float().index_select(0, self.rows)

    def sort_tokens(self, values: Tensor) -> Tensor:
        """Return token values in step order, for reading only: they may share the memory of `values`."""
        return values[: sum(self.running)] if self.tokens is None else values.index_select(0, self.tokens)

    def unsort_rows(self, values: Tensor) -> Tensor:
        """Return row values in the order of the batch."""
        return values if self.rows is None else torch.empty_like(values).index_copy_(0, self.rows, values)

    def unsort_tokens(self, values: Tensor) -> Tensor:
        """Return token values in the order of the batch."""
        return values if self.tokens is None else torch.empty_like(values).index_copy_(0, self.tokens, values)


def order_by_length(x: Ragged) -> StepOrder:
    """Return the step order of a batch. It is computed on the host, which launches the steps."""
    lengths = x.lengths
    if lengths.size and lengths.min() == lengths.max() == 1:
        # Mostly the next step of many sessions: reordering would double its time.
        return StepOrder(None, None, torch.from_numpy(lengths).to(x.data.device), [len(lengths)])
    rows = np.argsort(-lengths, kind="stable")
    step, row = (lengths[rows] > np.arange(lengths.max(initial=0))[:, None]).nonzero()
    by_row, by_token, sorted_lengths = (
        torch.from_numpy(array).to(x.data.device) for array in (rows, start_offsets(lengths)[rows[row]] + step, lengths[rows])
    )
    return StepOrder(by_row, by_token, sorted_lengths, np.bincount(step).tolist())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight + bias`` as float32, computed in the device's compute dtype.

    x: (n, inputs); weight: (inputs, m); bias: (m,) or (n, m), or None.
    """
    dtype = compute_dtype(weight.dtype, x.device)
    if bias is None:
        return torch.mm(x.to(dtype), weight.to(dtype)).float()
    if dtype == torch.float32:
        return torch.addmm(bias.float(), x.float(), weight.float())
    return torch.mm(x.to(dtype), weight.to(dtype)).float().add_(bias)


class StepOutputs:
    """Collects the requested outputs from the hidden vectors of each step."""

    def __init__(self, order: StepOrder, width: int, want: Outputs) -> None:
        self._order = order
        self._want = want
        zeros = order.lengths.new_zeros(len(order.lengths), width, dtype=torch.float32)
        self._steps = zeros.new_empty(sum(order.running), width) if want.steps else None
        self._sum = zeros.clone() if want.mean else None
        self._max = torch.full_like(zeros, -torch.inf) if want.max else None
        self._step_slices = None if self._steps is None else order.by_step(self._steps)
        self._sum_slices = None if self._sum is None else order.by_row(self._sum)
        self._max_slices = None if self._max is None else order.by_row(self._max)

    def add(self, hidden: Tensor) -> None:
        """Add the next step's hidden vectors, (running rows, width)."""
        if self._step_slices is not None:
            next(self._step_slices)[0].copy_(hidden)
        if self._sum_slices is not None:
            next(self._sum_slices)[0].add_(hidden)
        if self._max_slices is not None:
            (highest,) = next(self._max_slices)
            torch.maximum(highest, hidden, out=highest)

    def encoded(self, last: Tensor, state: Any) -> Encoded:
        """Return the outputs. last: (rows, width) in step order; state: the state after the batch, in the order of the batch."""
        order, lengths = self._order, self._order.lengths[:, None]
        return Encoded(
            state=state,
            steps=None if self._steps is None else order.unsort_tokens(self._steps),
            last=order.unsort_rows(last) if self._want.last else None,
            mean=None if self._sum is None else order.unsort_rows(self._sum / lengths.clamp(min=1)),
            max=None if self._max is None else order.unsort_rows(self._max.where(lengths > 0, 0.0)),
        )
