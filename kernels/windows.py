"""Windows over time in a ragged batch: each row's own steps and its own padding, never a neighbour's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.contract import Ragged, Sizes, begins, whole_windows


def windows(
    x: Ragged, width: int, *, left: int = 0, right: int = 0, dilation: int = 1, stride: int = 1, context: Tensor | None = None
) -> Tensor:
    """(windows, width, inputs): the steps under each position of a filter, earliest first, row after row.

    left, right: zero steps around each row; context: (rows, left, inputs) what stands in place of the zeros on the left.
    """
    places = Places(x, left, right)
    padded = x.data.new_zeros(places.steps, *x.data.shape[1:])
    padded[_there(places.own, x)] = x.data
    if context is not None:
        padded[_there(places.left, x)] = context.to(x.data.dtype)
    return padded[_there(places.seen(width, dilation, stride), x)]


class Places:
    """Where the steps of a batch stand once each row has its padding; worked out on the host, where small arrays are cheap."""

    def __init__(self, x: Ragged, left: int, right: int) -> None:
        self._lengths = x.lengths + left + right
        self._begins = begins(self._lengths)
        self.steps = int(self._lengths.sum())
        self.own: Sizes = np.repeat(self._begins + left - begins(x.lengths), x.lengths) + np.arange(x.data.shape[0])
        """(tokens,) where each token stands."""
        self.left: Sizes = self._begins[:, None] + np.arange(left)
        """(rows, left) where the padding before each row stands."""

    def seen(self, width: int, dilation: int, stride: int) -> Sizes:
        """(windows, width) what a filter sees at each of its positions, row after row."""
        counts = whole_windows(self._lengths, (width - 1) * dilation + 1, stride)
        within = np.arange(counts.sum()) - np.repeat(begins(counts), counts)
        first: Sizes = np.repeat(self._begins, counts) + within * stride
        return first[:, None] + np.arange(width) * dilation


def _there(places: Sizes, x: Ragged) -> Tensor:
    return torch.from_numpy(places).to(x.data.device)


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
