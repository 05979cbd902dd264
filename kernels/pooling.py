"""Outputs computed from the steps of a layer, for backends that cannot pool while they run. Does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs


def pool_steps(steps: Tensor, offsets: Tensor, want: Outputs, *, directions: int) -> Encoded:
    """Return the requested outputs, without a state.

    steps: (tokens, width) float32, with the directions joined along the width; offsets: (rows + 1,). `last` is each direction's output
    after the whole row: the forward direction's at the last step, the backward direction's at the first.
    """
    has_steps = torch.diff(offsets)[:, None] > 0

    def reduce_rows(operation: str, initial: float) -> Tensor:
        # Scattered additions would give different bits on every run; segment_reduce sums each row in one thread.
        return torch.segment_reduce(steps, operation, offsets=offsets.long(), axis=0, initial=initial, unsafe=True)

    def mean() -> Tensor:
        return reduce_rows("sum", 0.0) / torch.diff(offsets).clamp(min=1)[:, None]

    def last() -> Tensor:
        if not len(steps):
            return steps.new_zeros(len(has_steps), steps.shape[1])
        ends = (offsets[1:] - 1, offsets[:-1])[:directions]
        parts = [part[end.clamp(0, len(steps) - 1)] for part, end in zip(steps.chunk(directions, dim=1), ends, strict=True)]
        return torch.cat(parts, dim=1).where(has_steps, 0.0)

    return Encoded(
        state=None,
        steps=steps if want.steps else None,
        last=last() if want.last else None,
        mean=mean() if want.mean else None,
        max=reduce_rows("max", -torch.inf).where(has_steps, 0.0) if want.max else None,
    )
