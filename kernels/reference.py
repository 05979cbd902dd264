"""Shared by the references of all families: pooling the steps row by row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs


def select_outputs(
    steps: Tensor, offsets: Tensor, want: Outputs, *, state: Any, last: Tensor | None = None, new_offsets: bool = False
) -> Encoded:
    """Return the requested outputs of steps, (tokens, width).

    last: the hidden state after each row in families that have one; otherwise the output is the last step, or zero for a row without
    steps. new_offsets: the offsets differ from the offsets of the input, so the result contains them.
    """
    rows = [steps[begin:end] for begin, end in pairwise(offsets.tolist())]
    zero = steps.new_zeros(steps.shape[1])

    def by_row(pool: Any) -> Tensor:
        return torch.stack([pool(row) if len(row) else zero for row in rows]) if rows else steps.new_zeros(0, steps.shape[1])

    return Encoded(
        state=state,
        steps=steps if want.steps else None,
        last=(by_row(lambda row: row[-1]) if last is None else last) if want.last else None,
        mean=by_row(lambda row: row.mean(0)) if want.mean else None,
        max=by_row(lambda row: row.amax(0)) if want.max else None,
        offsets=offsets if new_offsets else None,
    )
