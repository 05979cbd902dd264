"""Launches of `folded.cu`: convolutions of token ids through tables, gathers and additions without a product.

Nothing waits for the device, and a call may be captured in a CUDA graph: offsets, ids and values are read when the graph runs.
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

from kernels.compile import PORTABLE_CLUSTER, Kernel, compiled
from kernels.contract import ConvWeights, Ragged
from kernels.conv.plan import BANKS, MOST_PLANS, NAMES, apart
from kernels.conv.thinning import ALL, Thinned
from kernels.launching import PIECE, address, current, in_pieces, index_of, kept, parts_of, processors

HERE = Path(__file__).parent
PIECES_AT_ONCE = 4
"""Of 16 bytes, by one warp."""
MOST_WARPS = 30
"""Of a block, so that each thread may have its registers."""
SPLITS = (1, 2, 3, 4, 8)
"""Warps that may share the windows of a row."""
WINDOWS_OF_A_BLOCK, MOST_SHARES = 64, 1024
"""Where every step is wanted: about so many windows, of at most so many parts of a row."""
FEW_GROUPS = 4
"""Of pieces, for each multiprocessor: with fewer, several warps share a row's windows."""
Classifier = tuple[Tensor, Tensor]


class Bank(NamedTuple):
    """Tables; stride: columns from one of their rows to the next."""

    width: int
    outputs: int
    stride: int


class Problem(NamedTuple):
    """All that a launch depends on but for where arrays lie. labels: of the classifier, or 0."""

    device: int
    storage: torch.dtype
    activation: str
    banks: tuple[Bank, ...]
    padding: tuple[int, int]
    dilation: int
    stride: int
    height: int
    rows: int
    tokens: int
    columns: int
    labels: int
    pooled: bool
    thinned: Thinned
    wide: bool
    wide_ids: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch without its addresses; numbers: what the kernel is told after the addresses."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class Target:
    """Where it goes: steps (tokens, columns) float32, whose rows begin at `offsets`, or where a thinned row does; or maxima (rows,
    columns) float32, and scores (rows, labels) float32 of a classifier over them."""

    steps: Tensor | None = None
    offsets: Tensor | None = None
    thinned: Thinned = ALL
    maxima: Tensor | None = None
    scores: Tensor | None = None


def gather(ids: Ragged, banks: Sequence[ConvWeights], target: Target, classifier: Classifier | None = None) -> None:
    """One launch for all banks, which differ in their widths and maps only."""
    out = target.steps if target.maxima is None else target.maxima
    assert out is not None
    if not ids.rows or not out.shape[0]:
        return
    tables = [_table(bank) for bank in banks]
    plan = _plan(_problem(ids, banks, tables, target, out))
    none = [0] * (BANKS - len(banks))
    weight, bias = classifier or (None, None)
    members = [
        *map(address, (ids.data, target.offsets, target.steps, target.maxima, weight, bias, target.scores)),
        *map(address, tables),
        *none,
        *(address(_bias(bank)) for bank in banks),
        *none,
        address(ids.offsets),
        0,
        *plan.numbers,
    ]
    with current(ids.offsets.device):
        plan.kernel.launch(plan.blocks, plan.shared, members, early=True)


def _problem(ids: Ragged, banks: Sequence[ConvWeights], tables: Sequence[Tensor], target: Target, out: Tensor) -> Problem:
    one = banks[0]
    return Problem(
        index_of(ids.offsets.device),
        tables[0].dtype,
        one.activation,
        tuple(Bank(bank.shape[0], bank.outputs, table.stride(1)) for bank, table in zip(banks, tables, strict=True)),
        (one.left, one.right),
        one.dilation,
        one.stride,
        tables[0].shape[1],
        ids.rows,
        ids.data.shape[0],
        out.shape[1],
        0 if target.scores is None else target.scores.shape[1],
        target.maxima is not None,
        target.thinned,
        ids.offsets.dtype == torch.int64,
        ids.data.dtype == torch.int64,
    )


@lru_cache(MOST_PLANS)
def _plan(problem: Problem) -> Plan:
    """A row has blocks of its own, and warps that share its windows where there are few rows; with a classifier, they are a cluster."""
    firsts = [0, *accumulate(parts_of(bank.outputs, PIECE) for bank in problem.banks)]
    groups, classifies = parts_of(firsts[-1], PIECES_AT_ONCE), problem.labels > 0
    few = problem.rows * groups <= FEW_GROUPS * processors(problem.device)
    parts = 1 if not few else groups if not classifies else parts_of(groups, parts_of(groups, PORTABLE_CLUSTER))
    together = min(parts_of(groups, parts), MOST_WARPS)  # groups of pieces that a block has at once
    split = max(split for split in SPLITS if split == 1 or (few and together * split <= MOST_WARPS))
    shares = 1 if problem.pooled else min(MOST_SHARES, max(1, problem.tokens // problem.rows // WINDOWS_OF_A_BLOCK))
    columns = [0, *accumulate(bank.outputs for bank in problem.banks)]
    by_bank = [
        *map(list, zip(*((bank.stride, bank.width, bank.outputs) for bank in problem.banks), strict=True)),
        columns,
        firsts,
    ]
    numbers = [
        *_rows(problem),
        problem.wide_ids,
        problem.dilation,
        problem.columns,
        problem.labels,
        firsts[-1],
        len(problem.banks),
        problem.height,
        *(value for values in by_bank for value in (*values, *[0] * BANKS)[:BANKS]),
    ]
    constants = {
        "BFLOAT16": problem.storage == torch.bfloat16,
        "POOLED": problem.pooled,
        "ACTIVATION": 0 if problem.pooled else NAMES.index(problem.activation),
        "SPLIT": split,
        "CLASSIFIES": classifies,
        "CTAS": parts if classifies else 1,
        "THINNED": problem.thinned.most > 0,
    }
    named = {name: int(value) for name, value in constants.items()}
    warps = split * together
    kernel = compiled(HERE / "folded.cu", problem.device, threads=32 * warps, cluster=named["CTAS"], **named)
    shared = 4 * (32 * warps + (problem.columns if classifies else 0))
    return Plan(kernel, (problem.rows, parts, shares), shared, list(map(int, numbers)))


def _rows(problem: Problem) -> list[int]:
    """Those that come in are whole."""
    out, (left, right) = problem.thinned, problem.padding
    stride = apart(ALL, out) if out.most else problem.stride
    return [problem.wide, problem.rows, 0, 1, 0, out.most, out.every, left, right, stride]


def _bias(weights: ConvWeights) -> Tensor:
    return kept(weights.packed, "bias", lambda: weights.bias.float().contiguous())


def _table(weights: ConvWeights) -> Tensor:
    """(width, 1 + vocabulary, outputs), whose rows begin at multiples of 16 bytes."""
    table = weights.tables
    assert table is not None
    whole = table.stride(2) == 1 and table.stride(0) == table.shape[1] * table.stride(1)
    if whole and table.stride(1) % PIECE == 0 and table.data_ptr() % 16 == 0:
        return table
    return kept(weights.packed, "tables", partial(in_pieces, table))
