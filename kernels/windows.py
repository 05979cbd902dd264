"""Windows over time in a ragged batch: each row has its own padding, and no window reaches into another row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.ragged import Ragged, Sizes, count_windows, start_offsets


def windows(
    x: Ragged,
    width: int,
    *,
    left: int | Sizes = 0,
    right: int | Sizes = 0,
    dilation: int = 1,
    stride: int = 1,
    context: Tensor | None = None,
) -> Tensor:
    """Return the steps that a filter covers at each of its positions, row after row: (windows, width, inputs), earliest step first.

    left, right: zero steps before and after each row, one number for all rows or (rows,) numbers; context: (rows, left, inputs), steps that
    replace the zeros on the left. All rows then have the same number of them.
    """
    index = WindowIndex(x, left, right)
    padded = x.data.new_zeros(index.steps, *x.data.shape[1:])
    padded[_to_device(index.tokens, x)] = x.data
    if context is not None:
        padded[_to_device(index.left, x)] = context.to(x.data.dtype)
    return padded[_to_device(index.windows(width, dilation, stride), x)]


class WindowIndex:
    """Positions in a batch of rows packed with their padding. Computed on the host, where small arrays are cheap."""

    def __init__(self, x: Ragged, left: int | Sizes, right: int | Sizes) -> None:
        """left, right: steps of padding before and after each row, one number for all rows or (rows,) numbers."""
        self._lengths = x.lengths + left + right
        self._left = left
        self._starts = start_offsets(self._lengths)
        self.steps = int(self._lengths.sum())
        self.tokens: Sizes = np.repeat(self._starts + left - start_offsets(x.lengths), x.lengths) + np.arange(x.data.shape[0])
        """(tokens,) the position of each token."""

    @property
    def left(self) -> Sizes:
        """The positions of the padding before each row, (rows, left), if it has the same number of steps for all rows."""
        assert isinstance(self._left, int)
        positions: Sizes = self._starts[:, None] + np.arange(self._left)
        return positions

    def windows(self, width: int, dilation: int, stride: int) -> Sizes:
        """Return the positions that a filter covers at each of its positions, row after row: (windows, width)."""
        counts = count_windows(self._lengths, (width - 1) * dilation + 1, stride)
        within = np.arange(counts.sum()) - np.repeat(start_offsets(counts), counts)
        first: Sizes = np.repeat(self._starts, counts) + within * stride
        return first[:, None] + np.arange(width) * dilation


def _to_device(positions: Sizes, x: Ragged) -> Tensor:
    return torch.from_numpy(positions).to(x.data.device)


def left_context(x: Ragged, left: int, context: Tensor | None) -> Tensor:
    """Return the last `left` steps of each row and of its context, (rows, left, inputs): the context of the row's next chunk."""
    # Read only the steps that are kept, so that a layer without a next chunk costs almost nothing.
    before = x.data.new_zeros(x.rows, left, *x.data.shape[1:]) if context is None else context.to(x.data.dtype)
    if not len(x.data):
        return before.clone()
    steps = torch.diff(x.offsets).long()[:, None]
    position = steps - left + torch.arange(left, device=x.data.device)  # negative before the chunk's first step
    from_chunk = x.data[(x.offsets[:-1].long()[:, None] + position).clamp(0, len(x.data) - 1)]
    from_context = before[torch.arange(x.rows, device=x.data.device)[:, None], (position + left).clamp(max=left - 1)]
    in_chunk = (position >= 0).reshape(*position.shape, *[1] * (from_chunk.dim() - 2))
    return torch.where(in_chunk, from_chunk, from_context)
