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
from kernels.contract import ConvWeights
from kernels.conv.plan import MOST_PLANS, NAMES
from kernels.conv.product import Steps, Target
from kernels.conv.rows import Windows, of_banks
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
    windows: Windows
    height: int
    columns: int
    labels: int
    pooled: bool
    wide_ids: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch without its addresses; numbers: what the kernel is told after the addresses."""

    kernel: Kernel
    blocks: tuple[int, int, int]
    shared: int
    numbers: list[int]


def gather(
    x: Steps, banks: Sequence[ConvWeights], target: Target, classifier: Classifier | None = None, scores: Tensor | None = None
) -> None:
    """One launch for all banks, which differ in their widths and maps only. What it gives is float32.

    scores: (rows, labels) of the classifier over the maxima, weight (columns, labels) and bias (labels,).
    """
    out = target.steps if target.maxima is None else target.maxima
    assert x.ids is not None and out is not None and target.residual is None
    if not x.rows or not out.shape[0]:
        return
    one, tables = banks[0], [_table(bank) for bank in banks]
    plan = _plan(
        Problem(
            index_of(x.offsets.device),
            tables[0].dtype,
            one.activation,
            tuple(Bank(bank.shape[0], bank.outputs, table.stride(1)) for bank, table in zip(banks, tables, strict=True)),
            x.windows(one, target.thinned),
            height=tables[0].shape[1],
            columns=out.shape[1],
            labels=0 if scores is None else scores.shape[1],
            pooled=target.maxima is not None,
            wide_ids=x.wide_ids,
        )
    )
    weight, bias = classifier or (None, None)
    members = [
        *map(address, (x.ids, target.offsets, target.steps, target.maxima, weight, bias, scores)),
        *of_banks(list(map(address, tables)), [address(_bias(bank)) for bank in banks]),
        *(address(x.offsets), 0),
        *plan.numbers,
    ]
    with current(x.offsets.device):
        plan.kernel.launch(plan.blocks, plan.shared, members, early=True)


@lru_cache(MOST_PLANS)
def _plan(problem: Problem) -> Plan:
    """A row has blocks of its own, and warps that share its windows where there are few rows; with a classifier, they are a cluster."""
    firsts = [0, *accumulate(parts_of(bank.outputs, PIECE) for bank in problem.banks)]
    groups, classifies = parts_of(firsts[-1], PIECES_AT_ONCE), problem.labels > 0
    rows, tokens = problem.windows.rows, problem.windows.tokens
    few = rows * groups <= FEW_GROUPS * processors(problem.device)
    parts = 1 if not few else groups if not classifies else parts_of(groups, parts_of(groups, PORTABLE_CLUSTER))
    together = min(parts_of(groups, parts), MOST_WARPS)  # groups of pieces that a block has at once
    split = max(split for split in SPLITS if split == 1 or (few and together * split <= MOST_WARPS))
    shares = 1 if problem.pooled else min(MOST_SHARES, max(1, tokens // rows // WINDOWS_OF_A_BLOCK))
    columns = accumulate((bank.outputs for bank in problem.banks[:-1]), initial=0)
    numbers = [
        *problem.windows.numbers(),
        problem.wide_ids,
        problem.windows.dilation,
        problem.columns,
        problem.labels,
        firsts[-1],
        len(problem.banks),
        problem.height,
        *of_banks(*([getattr(bank, name) for bank in problem.banks] for name in ("stride", "width", "outputs"))),
        *of_banks(list(columns), firsts[:-1]),
    ]
    constants = {
        "BFLOAT16": problem.storage == torch.bfloat16,
        "POOLED": problem.pooled,
        "ACTIVATION": 0 if problem.pooled else NAMES.index(problem.activation),
        "SPLIT": split,
        "CLASSIFIES": classifies,
        "THINNED": problem.windows.thinned_out.most > 0,
    }
    warps, cluster = split * together, parts if classifies else 1
    named = {name: int(value) for name, value in constants.items()}
    kernel = compiled(HERE / "folded.cu", problem.device, threads=32 * warps, cluster=cluster, CTAS=cluster, **named)
    shared = 4 * (32 * warps + (problem.columns if classifies else 0))
    return Plan(kernel, (rows, parts, shares), shared, list(map(int, numbers)))


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
