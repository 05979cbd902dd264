"""From every step to what was wanted, where what made the steps could not pool them on the way. Waits for no device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs


def pooled(steps: Tensor, offsets: Tensor, want: Outputs, *, directions: int) -> Encoded:
    """steps: (tokens, width) float32, the directions side by side; offsets: (rows + 1,). The state is None.

    Last is what each direction gives after the whole row: the forward one at its last step, the backward one at its first.
    """
    some = torch.diff(offsets)[:, None] > 0

    def over_rows(how: str, initial: float) -> Tensor:
        # Scattered additions would give other bits each time; here one thread walks each row.
        return torch.segment_reduce(steps, how, offsets=offsets.long(), axis=0, initial=initial, unsafe=True)

    def mean() -> Tensor:
        return over_rows("sum", 0.0) / torch.diff(offsets).clamp(min=1)[:, None]

    def last() -> Tensor:
        if not len(steps):
            return steps.new_zeros(len(some), steps.shape[1])
        ends = (offsets[1:] - 1, offsets[:-1])[:directions]
        parts = [part[end.clamp(0, len(steps) - 1)] for part, end in zip(steps.chunk(directions, dim=1), ends, strict=True)]
        return torch.cat(parts, dim=1).where(some, 0.0)

    return Encoded(
        state=None,
        steps=steps if want.steps else None,
        last=last() if want.last else None,
        mean=mean() if want.mean else None,
        max=over_rows("max", -torch.inf).where(some, 0.0) if want.max else None,
    )
