"""Windows over time in a ragged batch: each row's own steps and its own padding, never a neighbour's."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Ragged


def windows(
    x: Ragged, width: int, *, left: int = 0, right: int = 0, dilation: int = 1, stride: int = 1, context: Tensor | None = None
) -> Tensor:
    """(windows, width, inputs): the steps under each position of a filter, earliest first, row after row.

    left, right: zero steps around each row; context: (rows, left, inputs) what stands in place of the zeros on the left.
    """
    padded, begins, lengths = _padded(x, left, right, context)
    counts = ((lengths - (width - 1) * dilation - 1).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    row = torch.arange(x.rows, device=x.data.device).repeat_interleave(counts)
    position = torch.arange(int(counts.sum()), device=x.data.device) - (counts.cumsum(0) - counts)[row]
    first = begins[row] + position * stride
    taps = torch.arange(width, device=x.data.device) * dilation
    return padded[first[:, None] + taps]


def left_context(x: Ragged, left: int, context: Tensor | None) -> Tensor:
    """(rows, left, inputs): the last steps of each row and of what stood before it, for the row's next chunk."""
    padded, begins, lengths = _padded(x, left, 0, context)
    last = (begins + lengths)[:, None] - left + torch.arange(left, device=x.data.device)
    return padded[last]


def _padded(x: Ragged, left: int, right: int, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The batch with each row's padding in place, where each row begins in it, and its steps, padding included."""
    steps = torch.diff(x.offsets).long()
    lengths = steps + left + right
    begins = lengths.cumsum(0) - lengths
    padded = x.data.new_zeros(int(lengths.sum()), *x.data.shape[1:])
    row = torch.arange(x.rows, device=x.data.device).repeat_interleave(steps)
    within = torch.arange(len(row), device=x.data.device) - x.offsets[:-1].long()[row]
    padded[begins[row] + left + within] = x.data
    if context is not None:
        padded[begins[:, None] + torch.arange(left, device=x.data.device)] = context.to(x.data.dtype)
    return padded, begins, lengths
