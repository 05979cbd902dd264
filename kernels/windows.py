"""Windows over time in a ragged batch: each row's own steps and its own padding, never a neighbour's."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Ragged, whole_windows


def windows(
    x: Ragged, width: int, *, left: int = 0, right: int = 0, dilation: int = 1, stride: int = 1, context: Tensor | None = None
) -> Tensor:
    """(windows, width, inputs): the steps under each position of a filter, earliest first, row after row.

    left, right: zero steps around each row; context: (rows, left, inputs) what stands in place of the zeros on the left.
    """
    padded, begins, lengths = _padded(x, left, right, context)
    counts = whole_windows(lengths, (width - 1) * dilation + 1, stride)
    row = torch.arange(x.rows, device=x.data.device).repeat_interleave(counts)
    position = torch.arange(int(counts.sum()), device=x.data.device) - (counts.cumsum(0) - counts)[row]
    first = begins[row] + position * stride
    taps = torch.arange(width, device=x.data.device) * dilation
    return padded[first[:, None] + taps]


def left_context(x: Ragged, left: int, context: Tensor | None) -> Tensor:
    """(rows, left, inputs): the last steps of each row and of what stood before it, for the row's next chunk."""
    # Only what is kept is read: a layer that goes on to nobody pays next to nothing for it.
    before = x.data.new_zeros(x.rows, left, *x.data.shape[1:]) if context is None else context.to(x.data.dtype)
    if not len(x.data):
        return before.clone()
    steps = torch.diff(x.offsets).long()[:, None]
    position = steps - left + torch.arange(left, device=x.data.device)  # negative where it lies before the chunk
    own = x.data[(x.offsets[:-1].long()[:, None] + position).clamp(0, len(x.data) - 1)]
    earlier = before[torch.arange(x.rows, device=x.data.device)[:, None], (position + left).clamp(max=left - 1)]
    ours = (position >= 0).reshape(*position.shape, *[1] * (own.dim() - 2))
    return torch.where(ours, own, earlier)


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
