"""Operations on padded rows of steps: (rows, steps, width) with the length of each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def padding_mask(lengths: Tensor, steps: int) -> Tensor:
    """Return (rows, steps), True for steps beyond the length of their row."""
    return torch.arange(steps, device=lengths.device) >= lengths[:, None]


def without_padding(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows with zeros for their padding."""
    return rows.masked_fill(padding_mask(lengths, rows.shape[1])[:, :, None], 0.0)


def max_over_time(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return (rows, width), the maximum over the steps of each row without padding."""
    return rows.masked_fill(padding_mask(lengths, rows.shape[1])[:, :, None], -math.inf).amax(dim=1)


def reverse_rows(rows: Tensor, lengths: Tensor) -> Tensor:
    """Return the rows with their steps in reverse order; padding stays in place."""
    steps = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
    source = lengths[:, None] - 1 - steps
    return rows.gather(1, torch.where(source < 0, steps, source)[:, :, None].expand_as(rows))
