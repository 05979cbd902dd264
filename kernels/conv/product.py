"""Launches of `product.cu`: one convolution, or several widths over the same steps, on the tensor cores.

Nothing waits for the device, and a call may be captured in a CUDA graph: offsets, ids, places and values are read when the graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from kernels.contract import ConvWeights
from kernels.conv.packing import packed_bias, packed_filters
from kernels.conv.plan import MOST_PIECE_BYTES, Bank, Problem, planned, shape_for
from kernels.conv.rows import Windows, of_banks
from kernels.conv.thinning import ALL, Thinned
from kernels.launching import PIECE, address, current, index_of, kept, round_up


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows of vectors, as a kernel reads them: data (tokens, columns) 16-bit, an even number of columns, and offsets those of the whole
    rows; or, of token ids, data are an embedding. thinned: which steps there are of each row, `most` lines for each; exact: there
    are as many lines as steps, and not more; known: a launch of these kernels has seen the offsets before."""

    data: Tensor
    offsets: Tensor
    thinned: Thinned = ALL
    ids: Tensor | None = None
    exact: bool = True
    known: bool = False

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def tokens(self) -> int:
        return (self.data if self.ids is None else self.ids).shape[0]

    @property
    def wide_ids(self) -> bool:
        return self.ids is not None and self.ids.dtype == torch.int64

    def windows(self, weights: ConvWeights, thinned_out: Thinned) -> Windows:
        """Those of a convolution."""
        return Windows(
            self.rows,
            self.tokens,
            (weights.left, weights.right),
            weights.dilation,
            weights.stride,
            self.thinned,
            thinned_out,
            wide=self.offsets.dtype == torch.int64,
        )


@dataclass(frozen=True, slots=True)
class Context:
    """What stands before the rows, (lines, left, inputs), and where what stands before their next chunks goes; with the line of each
    row, or its own."""

    before: Tensor | None = None
    after: Tensor | None = None
    lines_after: Tensor | None = None


STATELESS = Context()


@dataclass(frozen=True, slots=True)
class Target:
    """Where it goes: steps (tokens, columns), whose rows begin at `offsets`, or where a thinned row does; or maxima (rows, columns).
    residual: steps that are added, and the activation after that."""

    steps: Tensor | None = None
    offsets: Tensor | None = None
    thinned: Thinned = ALL
    maxima: Tensor | None = None
    residual: Steps | None = None
    after: str = "none"


def convolve(
    x: Steps, banks: Sequence[ConvWeights], target: Target, context: Context = STATELESS, *, followed: bool = False
) -> None:
    """One launch, in which all banks go over the same steps: they differ in their widths and maps only.

    followed: the next launch knows the offsets through this one.
    """
    problem = _problem(x, banks, target, context, followed)
    if not x.rows:
        return
    plan = planned(problem, shape_for(problem))
    if target.maxima is not None and not plan.alone:
        target.maxima.zero_()
    if not problem.places and not plan.alone and context.after is None:
        return
    # A kernel asks for its filters before it waits for what packs them.
    early = all(("filters", plan.maps) in bank.packed for bank in banks)
    filters = [kept(bank.packed, ("filters", plan.maps), partial(packed_filters, bank, plan.maps)) for bank in banks]
    biases = [kept(bank.packed, ("bias", plan.maps), partial(packed_bias, bank, plan.maps)) for bank in banks]
    residual = None if target.residual is None else target.residual.data
    around = context.before, context.after, context.lines_after
    members = [
        *map(address, (x.data, x.ids, *around, target.offsets, residual, target.steps, target.maxima)),
        *of_banks(list(map(address, filters)), list(map(address, biases))),
        *map(address, (x.offsets, _places(x, banks[0], target))),
        *plan.numbers,
    ]
    with current(x.offsets.device):
        plan.kernel.launch((plan.blocks, 1, 1), plan.shared, members, early=early)


def _problem(x: Steps, banks: Sequence[ConvWeights], target: Target, context: Context, followed: bool) -> Problem:
    one, data, out = banks[0], x.data, target.maxima if target.steps is None else target.steps
    assert out is not None
    exactly, columns = (
        target.steps is None or out.dtype == torch.float32,
        accumulate((bank.outputs for bank in banks), initial=0),
    )
    read = [array.data_ptr() for array in (data, context.before, context.after) if array is not None]
    residual = target.residual
    return Problem(
        device=index_of(data.device),
        storage=data.dtype,
        activation=one.activation,
        banks=tuple(
            Bank(bank.shape[0], bank.shape[2], bank.outputs if exactly else round_up(bank.outputs, PIECE), column)
            for bank, column in zip(banks, columns, strict=False)
        ),
        windows=x.windows(one, target.thinned),
        inputs=data.shape[1],
        piece=math.gcd(2 * data.shape[1], MOST_PIECE_BYTES, *read),
        columns=out.shape[1],
        pooled=target.steps is None,
        float32=target.steps is not None and exactly,
        residual=None if residual is None else (residual.data.shape[1], residual.thinned),
        after=target.after,
        goes_on=context.before is not None,
        wide_ids=x.wide_ids,
        known=x.known,
        followed=followed,
    )


def _places(x: Steps, weights: ConvWeights, target: Target) -> Tensor:
    """Where each row's windows begin, but for the gaps between rows."""
    if weights.stride == 1 or target.thinned.most:
        return x.offsets
    return window_offsets(x.offsets, weights) if target.offsets is None else target.offsets


def window_offsets(offsets: Tensor, weights: ConvWeights) -> Tensor:
    """(rows + 1,) those of the windows of these rows; waits for no device."""
    room = torch.diff(offsets) + (weights.left + weights.right - weights.reach)
    windows = room.div(weights.stride, rounding_mode="floor") + 1
    return functional.pad(windows.clamp(min=0).cumsum(0, dtype=offsets.dtype), (1, 0))
