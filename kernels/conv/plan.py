"""Launch plans of `product.cu`: tile shapes, the room between rows, the constants that specialise the kernel and its integer arguments.

A plan depends on sizes only and is cached: two calls of equal sizes are planned once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.compile import Kernel, load_kernel, shared_limit
from kernels.conv.geometry import NeededSteps, WindowGeometry, max_windows, per_bank, steps_apart
from kernels.conv.packing import DEPTH
from kernels.conv.types import ACTIVATIONS, GATED
from kernels.launching import ceil_div, multiprocessors, round_up
from kernels.ragged import ContractError
from kernels.tuning import load_tuned

HERE = Path(__file__).parent
MAX_PLACES = 2**31 - 2**16
"""Places per launch: the kernel counts them in 32 bits."""
FILTER_BYTES = 64 * DEPTH * 2
LINE_BYTES = DEPTH * 2
MAX_BARRIER_BYTES, ALIGNMENT = 768, 1024
"""Shared memory for barriers, and the alignment of a block's shared memory."""
X_STAGES = 12
"""Maximum number of input pieces in flight. Three are enough for a block that runs many tiles."""
FILTER_STAGES, MIN_FILTER_STAGES = 24, 4
"""Maximum number of filter pieces in flight, and the minimum to aim for."""
FEW_LINES, MAX_WAVE_RATIO = 16, 1.125
"""Taps share lines if they reach at most FEW_LINES lines beyond the tile, or half a tile, and if the gaps that this needs increase the
number of waves by at most MAX_WAVE_RATIO."""
MAX_RESIDUAL_PLACES = 128
"""Places per tile for which a thread has enough registers to hold the residual."""
WIDE, MAX_WIDTH = 16, 256
"""Filter widths up to which shared memory has room for the table of lines next to any tile, and next to the smallest tile."""
MAX_PIECE_BYTES, MIN_PIECE_BYTES = 16, 4
"""Bytes per copy of the input, which depend on its alignment."""
MAX_CACHED_PLANS = 4096
ACTIVATION_NAMES = (*ACTIVATIONS,)
GATE_NAMES = ("", *GATED)


class FilterBank(NamedTuple):
    """The filters of one layer. column: the output column at which its maps begin."""

    width: int
    maps: int
    outputs: int
    column: int


class TileProblem(NamedTuple):
    """Everything that a launch depends on except addresses.

    piece: bytes per copy of the input; residual: the columns of the residual, and its steps; resumes: rows continue an earlier chunk;
    known: an earlier kernel has read the same offsets; followed: the next kernel reads them too.
    """

    device: int
    storage: torch.dtype
    activation: str
    banks: tuple[FilterBank, ...]
    windows: WindowGeometry
    inputs: int
    piece: int
    columns: int
    pooled: bool
    float32: bool
    residual: tuple[int, NeededSteps] | None
    after: str
    resumes: bool
    wide_ids: bool
    known: bool
    followed: bool

    @property
    def reaches(self) -> list[int]:
        return [(bank.width - 1) * self.windows.dilation + 1 for bank in self.banks]

    @property
    def width(self) -> int:
        return max(bank.width for bank in self.banks)

    @property
    def places(self) -> int:
        """Places of all windows, if every window has its own lines."""
        rows, tokens, padding, _, stride, _, needed_out, _ = self.windows
        if needed_out.count:
            return rows * needed_out.count
        if stride > 1:
            return max_windows(tokens, rows, sum(padding), max(self.reaches), stride)
        return tokens + rows * self.extra_windows

    @property
    def extra_windows(self) -> int:
        """How many more windows than steps a row may have, with stride 1."""
        return max(0, sum(self.windows.padding) - min(self.reaches) + 1)


class ConvTile(NamedTuple):
    """groups: warp groups, 64 maps each; places: windows per tile."""

    groups: int
    places: int

    @property
    def maps(self) -> int:
        return 64 * self.groups


SMALLEST = ConvTile(1, 32)
"""The tile that leaves the most room for the table of lines."""


class TileLines(NamedTuple):
    """The input lines of a tile.

    stage: lines per stage; table: lines in all; shared: every tap reads the same lines; gap: places between the windows of two rows;
    places: all places of the launch, including gaps.
    """

    stage: int
    table: int
    shared: bool
    gap: int
    places: int


@dataclass(frozen=True, slots=True)
class TilePlan:
    """A launch without its addresses.

    alone: one tile has all rows, so it writes their maxima without atomics; numbers: the members of `Call` after the addresses.
    """

    kernel: Kernel
    blocks: int
    shared: int
    maps: int
    alone: bool
    numbers: list[int]


@lru_cache(MAX_CACHED_PLANS)
def shape_for(problem: TileProblem) -> ConvTile:
    """Return the tile shape with the smallest predicted time.

    The time is the measured time of one wave of tiles, with one tile per multiprocessor, times the number of waves, plus the time to set
    the maxima to zero where several tiles may share a row.
    """
    measured = load_tuned(HERE / "tuned", torch.cuda.get_device_name(problem.device))

    def predicted_us(entry: Mapping[str, float]) -> float:
        shape = _shape(entry)
        zeroed = measured["zeroed_us"] if problem.pooled and problem.places > shape.places else 0
        return entry["us"] * _waves(problem, problem.places, shape) + zeroed

    fastest = _shape(min(measured["shapes"], key=predicted_us))
    return fastest if problem.residual is None else fastest._replace(places=min(fastest.places, MAX_RESIDUAL_PLACES))


def _shape(entry: Mapping[str, float]) -> ConvTile:
    return ConvTile(int(entry["groups"]), int(entry["places"]))


def _waves(problem: TileProblem, places: int, shape: ConvTile) -> int:
    """Return how many tiles each multiprocessor runs in sequence."""
    tiles = ceil_div(places, shape.places) * sum(ceil_div(bank.maps, shape.maps) for bank in problem.banks)
    return ceil_div(max(1, tiles), multiprocessors(problem.device))


@lru_cache(MAX_CACHED_PLANS)
def planned(problem: TileProblem, shape: ConvTile) -> TilePlan:
    """Return the launch of a problem. Each multiprocessor runs one block, which starts with the tiles of the widest filters."""
    lines = _lines(problem, shape)
    if not lines.shared and problem.width > WIDE:
        shape = SMALLEST
        lines = _lines(problem, shape)
    if lines.places > MAX_PLACES:
        raise ContractError(f"x has {problem.windows.tokens} tokens, one launch takes about {MAX_PLACES}: split the batch")
    alone = problem.pooled and lines.places <= shape.places
    positions = max(1, ceil_div(lines.places, shape.places))
    order = sorted(range(len(problem.banks)), key=lambda bank: -problem.banks[bank].width)
    first_tiles, tiles = [0] * len(order), 0
    for bank in order:
        first_tiles[bank] = tiles
        tiles += positions * ceil_div(problem.banks[bank].maps, shape.maps)
    blocks = min(tiles, multiprocessors(problem.device))
    kernel, shared = _kernel(problem, shape, lines, alone=alone, many=tiles > blocks)
    numbers = [
        *problem.windows.members(lines.gap),
        problem.wide_ids,
        problem.inputs,
        problem.windows.dilation // problem.windows.needed.spacing,
        lines.stage,
        problem.columns,
        *_residual_members(problem),
        tiles,
        len(problem.banks),
        problem.known,
        problem.known or not problem.followed,
        *per_bank(*([getattr(bank, name) for bank in problem.banks] for name in ("width", "outputs", "column")), first_tiles),
    ]
    return TilePlan(kernel, blocks, shared, shape.maps, alone, list(map(int, numbers)))


def _lines(problem: TileProblem, shape: ConvTile) -> TileLines:
    """Return the input lines of a tile.

    All taps share lines if the windows of a tile are one step apart, the filters do not reach too far, and the gaps that this needs
    between rows add few waves of tiles. Adjacent rows may share the zeros in a gap, but not the steps of an earlier chunk.
    """
    windows, places, reach = problem.windows, problem.places, max(problem.reaches)
    if windows.stride == 1 and not windows.needed_out.count and reach - 1 <= max(shape.places // 2, FEW_LINES):
        gap = max(problem.extra_windows, sum(windows.padding) if problem.resumes else max(windows.padding))
        with_gaps = windows.tokens + windows.rows * gap
        if _waves(problem, with_gaps, shape) <= MAX_WAVE_RATIO * _waves(problem, places, shape):
            lines = shape.places + reach - 1
            return TileLines(lines, lines, True, gap, with_gaps)
    gap = problem.extra_windows if windows.stride == 1 else 0
    return TileLines(shape.places, problem.width * shape.places, False, gap, places)


def _residual_members(problem: TileProblem) -> list[int]:
    if problem.residual is None:
        return [0] * 4
    columns, steps = problem.residual
    return [columns, steps.count, steps.spacing, steps_apart(steps, problem.windows.needed_out)]


def _kernel(problem: TileProblem, shape: ConvTile, lines: TileLines, *, alone: bool, many: bool) -> tuple[Kernel, int]:
    """Return the specialised kernel and the bytes of shared memory per block. many: a block runs several tiles."""
    stage_lines, table = round_up(lines.stage, 8), round_up(lines.table, 8)
    fixed = round_up(8 * table + 16 * shape.places + MAX_BARRIER_BYTES, ALIGNMENT)
    x_stages, filter_stages = _stages(
        problem, shape, stage_lines * LINE_BYTES, shared_limit(problem.device) - fixed, lines.shared, many
    )
    shared = fixed + x_stages * stage_lines * LINE_BYTES + filter_stages * shape.groups * FILTER_BYTES
    gated = problem.activation in GATED
    constants = {
        "BFLOAT16": problem.storage == torch.bfloat16,
        "ACTIVATION": 0 if gated or problem.pooled else ACTIVATION_NAMES.index(problem.activation),
        "GATE": GATE_NAMES.index(problem.activation) if gated else 0,
        "AFTER": ACTIVATION_NAMES.index(problem.after),
        "RESIDUAL": problem.residual is not None,
        "POOLED": problem.pooled,
        "ALONE": alone,
        "STEPS_FLOAT32": problem.float32,
        "THINNED": problem.windows.needed_out.count > 0,
        "PIECE_BYTES": problem.piece,
        "SHARED_LINES": lines.shared,
        "GROUPS": shape.groups,
        "PLACES": shape.places,
        "LINES": stage_lines,
        "TABLE": table,
        "X_STAGES": x_stages,
        "FILTER_STAGES": filter_stages,
        "SHARED": shared,
    }
    threads = 128 + 128 * shape.groups
    integers = {name: int(value) for name, value in constants.items()}
    return load_kernel(HERE / "product.cu", problem.device, threads=threads, **integers), shared


def _stages(problem: TileProblem, shape: ConvTile, stage_bytes: int, limit: int, shared: bool, many: bool) -> tuple[int, int]:
    """Return how many stages the inputs and the filters get: as many as are useful and fit into `limit` bytes."""
    taps = ceil_div(problem.inputs, DEPTH) * problem.width
    pieces = ceil_div(problem.inputs, DEPTH) if shared else taps
    for x_stages in range(3 if many else min(X_STAGES, max(2, pieces)), 1, -1):
        fitting = (limit - x_stages * stage_bytes) // (shape.groups * FILTER_BYTES)
        filter_stages = min(fitting, FILTER_STAGES, max(2, taps))
        if filter_stages >= min(MIN_FILTER_STAGES, taps):
            return x_stages, filter_stages
    raise ContractError(
        f"filters of width {problem.width} do not fit into {limit} bytes of shared memory: use narrower filters"
    )
