"""The launcher of `folded.cu`: convolutions of token ids as sums of table rows, without a product.

A launch never waits for the device, and CUDA graphs may capture it: offsets, ids and values are read when the kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.compile import PORTABLE_CLUSTER, Kernel, is_hopper_or_newer, load_kernel
from kernels.conv.geometry import WindowGeometry, per_bank
from kernels.conv.plan import ACTIVATION_NAMES, MAX_CACHED_PLANS
from kernels.conv.product import Destination, PackedSteps
from kernels.conv.types import ConvWeights
from kernels.launching import PIECE, address, aligned_inputs, ceil_div, device_index, multiprocessors, on_device, pack_once

HERE = Path(__file__).parent
PIECES_PER_WARP = 4
"""Pieces of 16 bytes that a warp adds up at once."""
MAX_WARPS = 30
"""Warps per block: more would leave each thread too few registers."""
SPLITS = (1, 2, 3, 4, 8)
"""How many warps may share the windows of a row."""
WINDOWS_PER_BLOCK, MAX_SHARES = 64, 1024
"""When every step is wanted: the approximate number of windows per block, and the maximum number of blocks per row."""
FEW_GROUPS = 4
"""Groups of pieces per multiprocessor up to which several warps share the windows of a row."""
Classifier = tuple[Tensor, Tensor]


class TableBank(NamedTuple):
    """The tables of one layer. stride: columns from one row to the next."""

    width: int
    outputs: int
    stride: int


class LookupProblem(NamedTuple):
    """Everything that a launch depends on except addresses. labels: outputs of the classifier, or 0."""

    device: int
    storage: torch.dtype
    activation: str
    banks: tuple[TableBank, ...]
    windows: WindowGeometry
    height: int
    columns: int
    labels: int
    pooled: bool
    wide_ids: bool


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """A launch without its addresses. numbers: the members of `Call` after the addresses."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    numbers: list[int]


def add_table_rows(
    x: PackedSteps,
    banks: Sequence[ConvWeights],
    destination: Destination,
    classifier: Classifier | None = None,
    scores: Tensor | None = None,
) -> None:
    """Run all banks in one launch. The banks differ only in width and maps; outputs are float32.

    classifier: weight (columns, labels) and bias (labels,) of a linear layer over the maxima; scores: (rows, labels), its output.
    """
    out = destination.steps if destination.maxima is None else destination.maxima
    assert x.ids is not None and out is not None and destination.residual is None
    if not x.rows or not out.shape[0]:
        return
    first, tables = banks[0], [_table(bank) for bank in banks]
    plan = _plan(
        LookupProblem(
            device_index(x.offsets.device),
            tables[0].dtype,
            first.activation,
            tuple(TableBank(bank.shape[0], bank.outputs, table.stride(1)) for bank, table in zip(banks, tables, strict=True)),
            x.windows(first, destination.needed),
            height=tables[0].shape[1],
            columns=out.shape[1],
            labels=0 if scores is None else scores.shape[1],
            pooled=destination.maxima is not None,
            wide_ids=x.wide_ids,
        )
    )
    weight, bias = classifier or (None, None)
    members = [
        *map(address, (x.ids, destination.offsets, destination.steps, destination.maxima, weight, bias, scores)),
        *per_bank(list(map(address, tables)), [address(_bias(bank)) for bank in banks]),
        *(address(x.offsets), 0),
        *plan.numbers,
    ]
    with on_device(x.offsets.device):
        plan.kernel.launch(plan.blocks, plan.shared, members, early=True)


@lru_cache(MAX_CACHED_PLANS)
def _plan(problem: LookupProblem) -> LookupPlan:
    """Return the launch of a problem.

    Each row has its own blocks. With few rows, several warps share the windows of a row. With a classifier, the blocks of a row form a
    cluster; on devices without clusters, a row has one block.
    """
    first_pieces = [0, *accumulate(ceil_div(bank.outputs, PIECE) for bank in problem.banks)]
    groups, classifies = ceil_div(first_pieces[-1], PIECES_PER_WARP), problem.labels > 0
    rows, tokens = problem.windows.rows, problem.windows.tokens
    few = rows * groups <= FEW_GROUPS * multiprocessors(problem.device)
    most = groups if not classifies else PORTABLE_CLUSTER if is_hopper_or_newer(problem.device) else 1
    parts = ceil_div(groups, ceil_div(groups, most)) if few else 1
    groups_per_block = min(ceil_div(groups, parts), MAX_WARPS)
    split = max(split for split in SPLITS if split == 1 or (few and groups_per_block * split <= MAX_WARPS))
    shares = 1 if problem.pooled else min(MAX_SHARES, max(1, tokens // rows // WINDOWS_PER_BLOCK))
    first_columns = accumulate((bank.outputs for bank in problem.banks[:-1]), initial=0)
    numbers = [
        *problem.windows.members(),
        problem.wide_ids,
        problem.windows.dilation,
        problem.columns,
        problem.labels,
        first_pieces[-1],
        len(problem.banks),
        problem.height,
        *per_bank(*([getattr(bank, name) for bank in problem.banks] for name in ("stride", "width", "outputs"))),
        *per_bank(list(first_columns), first_pieces[:-1]),
    ]
    constants = {
        "BFLOAT16": problem.storage == torch.bfloat16,
        "POOLED": problem.pooled,
        "ACTIVATION": 0 if problem.pooled else ACTIVATION_NAMES.index(problem.activation),
        "SPLIT": split,
        "CLASSIFIES": classifies,
        "THINNED": problem.windows.needed_out.count > 0,
    }
    warps, cluster = split * groups_per_block, parts if classifies else 1
    integers = {name: int(value) for name, value in constants.items()}
    kernel = load_kernel(HERE / "folded.cu", problem.device, threads=32 * warps, cluster=cluster, CTAS=cluster, **integers)
    shared = 4 * (32 * warps + (problem.columns if classifies else 0))
    return LookupPlan(kernel, (rows, parts, shares), shared, list(map(int, numbers)))


def _bias(weights: ConvWeights) -> Tensor:
    return pack_once(weights.packed, "bias", lambda: weights.bias.float().contiguous())


def _table(weights: ConvWeights) -> Tensor:
    """Return the tables (width, 1 + vocabulary, outputs), with rows that begin at multiples of 16 bytes."""
    table = weights.tables
    assert table is not None
    whole = table.stride(2) == 1 and table.stride(0) == table.shape[1] * table.stride(1)
    if whole and table.stride(1) % PIECE == 0 and table.data_ptr() % 16 == 0:
        return table
    return pack_once(weights.packed, "tables", partial(aligned_inputs, table))
