"""The launcher of `product.cu`: one convolution, or convolutions of several widths over the same steps, on the tensor cores.

A launch never waits for the device, and CUDA graphs may capture it: offsets, ids, places and values are read when the kernel runs.
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

from kernels.conv.geometry import ALL_STEPS, NeededSteps, WindowGeometry, per_bank
from kernels.conv.packing import packed_bias, packed_filters
from kernels.conv.plan import MAX_PIECE_BYTES, FilterBank, TileProblem, planned, shape_for
from kernels.conv.types import ConvWeights
from kernels.launching import PIECE, address, device_index, on_device, pack_once, round_up


@dataclass(frozen=True, slots=True)
class PackedSteps:
    """The rows of a batch as the kernels read them.

    data: (tokens, columns) 16-bit with an even number of columns, or an embedding if there are `ids`; offsets: of the whole rows;
    needed: the steps of each row that are present, `count` lines per row; exact: there are as many lines as steps; known: an earlier
    launch of these kernels has read the same offsets.
    """

    data: Tensor
    offsets: Tensor
    needed: NeededSteps = ALL_STEPS
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

    def windows(self, weights: ConvWeights, needed_out: NeededSteps) -> WindowGeometry:
        """Return the windows of a convolution over these rows."""
        return WindowGeometry(
            self.rows,
            self.tokens,
            (weights.left, weights.right),
            weights.dilation,
            weights.stride,
            self.needed,
            needed_out,
            wide=self.offsets.dtype == torch.int64,
        )


@dataclass(frozen=True, slots=True)
class LeftContext:
    """The steps before each row, and where the kernel writes the steps before each row's next chunk.

    before: (rows, left, inputs); after: (lines, left, inputs); lines_after: (rows,) the line of each row in `after`; None: the row number.
    """

    before: Tensor | None = None
    after: Tensor | None = None
    lines_after: Tensor | None = None


STATELESS = LeftContext()


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a launch writes its output: all steps, or the maxima over time.

    steps: (tokens, columns), with rows at `offsets`, or at multiples of `needed.count`; maxima: (rows, columns); residual: steps to
    add to the output; after: the activation after the addition.
    """

    steps: Tensor | None = None
    offsets: Tensor | None = None
    needed: NeededSteps = ALL_STEPS
    maxima: Tensor | None = None
    residual: PackedSteps | None = None
    after: str = "none"


def convolve(
    x: PackedSteps,
    banks: Sequence[ConvWeights],
    destination: Destination,
    context: LeftContext = STATELESS,
    *,
    followed: bool = False,
) -> None:
    """Run all banks over the same steps in one launch. The banks differ only in width and maps.

    followed: the next launch reads the same offsets and relies on this launch having waited for them.
    """
    problem = _problem(x, banks, destination, context, followed)
    if not x.rows:
        return
    plan = planned(problem, shape_for(problem))
    if destination.maxima is not None and not plan.alone:
        destination.maxima.zero_()
    if not problem.places and not plan.alone and context.after is None:
        return
    # The kernel fetches its filters before it waits for earlier kernels, so it must not start early while they are being packed.
    early = all(("filters", plan.maps) in bank.packed for bank in banks)
    filters = [pack_once(bank.packed, ("filters", plan.maps), partial(packed_filters, bank, plan.maps)) for bank in banks]
    biases = [pack_once(bank.packed, ("bias", plan.maps), partial(packed_bias, bank, plan.maps)) for bank in banks]
    residual = None if destination.residual is None else destination.residual.data
    contexts = context.before, context.after, context.lines_after
    members = [
        *map(address, (x.data, x.ids, *contexts, destination.offsets, residual, destination.steps, destination.maxima)),
        *per_bank(list(map(address, filters)), list(map(address, biases))),
        *map(address, (x.offsets, _places(x, banks[0], destination))),
        *plan.numbers,
    ]
    with on_device(x.offsets.device):
        plan.kernel.launch((plan.blocks, 1, 1), plan.shared, members, early=early)


def _problem(
    x: PackedSteps, banks: Sequence[ConvWeights], destination: Destination, context: LeftContext, followed: bool
) -> TileProblem:
    first, data = banks[0], x.data
    out = destination.maxima if destination.steps is None else destination.steps
    assert out is not None
    float32 = destination.steps is None or out.dtype == torch.float32
    first_columns = accumulate((bank.outputs for bank in banks), initial=0)
    addresses = [array.data_ptr() for array in (data, context.before, context.after) if array is not None]
    residual = destination.residual
    return TileProblem(
        device=device_index(data.device),
        storage=data.dtype,
        activation=first.activation,
        banks=tuple(
            FilterBank(bank.shape[0], bank.shape[2], bank.outputs if float32 else round_up(bank.outputs, PIECE), column)
            for bank, column in zip(banks, first_columns, strict=False)
        ),
        windows=x.windows(first, destination.needed),
        inputs=data.shape[1],
        piece=math.gcd(2 * data.shape[1], MAX_PIECE_BYTES, *addresses),
        columns=out.shape[1],
        pooled=destination.steps is None,
        float32=destination.steps is not None and float32,
        residual=None if residual is None else (residual.data.shape[1], residual.needed),
        after=destination.after,
        resumes=context.before is not None,
        wide_ids=x.wide_ids,
        known=x.known,
        followed=followed,
    )


def _places(x: PackedSteps, weights: ConvWeights, destination: Destination) -> Tensor:
    """Return where the windows of each row begin, without the gaps between rows."""
    if weights.stride == 1 or destination.needed.count:
        return x.offsets
    return window_offsets(x.offsets, weights) if destination.offsets is None else destination.offsets


def window_offsets(offsets: Tensor, weights: ConvWeights) -> Tensor:
    """Return the (rows + 1,) offsets of the windows of each row. Does not wait for the device."""
    room = torch.diff(offsets) + (weights.left + weights.right - weights.reach)
    windows = room.div(weights.stride, rounding_mode="floor") + 1
    return functional.pad(windows.clamp(min=0).cumsum(0, dtype=offsets.dtype), (1, 0))
