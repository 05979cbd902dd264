"""How `product.cu` is launched: the shape of its tiles, the room between rows, what is specialised, and the numbers that it is told.

Everything is worked out from sizes, and kept: two calls of the same sizes are planned once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.compile import Kernel, compiled, shared_limit
from kernels.contract import ACTIVATIONS, GATED, ContractError
from kernels.conv.packing import DEPTH
from kernels.conv.rows import Windows, apart, most_windows, of_banks
from kernels.conv.thinning import Thinned
from kernels.launching import parts_of, processors, round_up
from kernels.tuning import tuned

HERE = Path(__file__).parent
MOST_PLACES = 2**31 - 2**16
"""Of one call: they are counted in 32 bits."""
FILTER_BYTES = 64 * DEPTH * 2
LINE_BYTES = DEPTH * 2
BARRIER_BYTES, ALIGNED = 768, 1024
"""Of barriers, at most; of all that a block has in shared memory."""
X_STAGES = 12
"""Pieces of the inputs that may be on their way where they are small; where a block goes through many tiles, three are enough."""
FILTER_STAGES, FEW_FILTERS = 24, 4
"""Pieces of the filters that may be on their way, and how few should."""
FEW_LINES, MORE_WAVES = 16, 1.125
"""Lines beyond those of a tile that are always shared, and how many times as many waves of tiles there may be for that."""
MOST_ADDED = 128
"""Places of a tile whose residual a thread has registers for."""
WIDE, WIDEST = 16, 256
"""Taps up to which the table of a tile's lines fits beside any tile, and beside the smallest one."""
MOST_PIECE_BYTES, LEAST_PIECE_BYTES = 16, 4
"""That are fetched at once, as the inputs lie."""
MOST_PLANS = 4096
"""That are kept."""
NAMES = (*ACTIVATIONS,)
GATES = ("", *GATED)


class Bank(NamedTuple):
    """Filters over the steps; column: of what comes out, where their maps begin."""

    width: int
    maps: int
    outputs: int
    column: int


class Problem(NamedTuple):
    """All that a launch depends on but for where arrays lie. piece: bytes of the inputs that may be fetched at once; residual: columns of
    what is added and which steps of it there are."""

    device: int
    storage: torch.dtype
    activation: str
    banks: tuple[Bank, ...]
    windows: Windows
    inputs: int
    piece: int
    columns: int
    pooled: bool
    float32: bool
    residual: tuple[int, Thinned] | None
    after: str
    goes_on: bool
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
        """Of windows that have lines of their own."""
        rows, tokens, padding, _, stride, _, thinned_out, _ = self.windows
        if thinned_out.most:
            return rows * thinned_out.most
        if stride > 1:
            return most_windows(tokens, rows, sum(padding), max(self.reaches), stride)
        return tokens + rows * self.more

    @property
    def more(self) -> int:
        """How many more windows than steps a row may give, where they are one step apart."""
        return max(0, sum(self.windows.padding) - min(self.reaches) + 1)


class Shape(NamedTuple):
    """groups: warp groups, each of 64 maps; places: windows of a tile."""

    groups: int
    places: int

    @property
    def maps(self) -> int:
        return 64 * self.groups


NARROWEST = Shape(1, 32)
"""The tiles that leave the most room for a table of lines."""


class Lines(NamedTuple):
    """Lines of inputs that a tile has: `stage` of them at a time, `table` in all; shared: every tap sees the same ones. gap: places
    between the windows of two rows; places: all of them, windows or none."""

    stage: int
    table: int
    shared: bool
    gap: int
    places: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch without its addresses; alone: one tile has all rows, and nobody else says anything of their maxima; numbers: what the
    kernel is told after the addresses."""

    kernel: Kernel
    blocks: int
    shared: int
    maps: int
    alone: bool
    numbers: list[int]


@lru_cache(MOST_PLANS)
def shape_for(problem: Problem) -> Shape:
    """The one that takes the least time by what was measured: that of a wave of tiles, one for each multiprocessor, as often as there are
    waves, and of setting maxima to zero where several tiles may have a row's."""
    measured = tuned(HERE / "tuned", torch.cuda.get_device_name(problem.device))

    def time(one: Mapping[str, float]) -> float:
        shape = _shape(one)
        zeroed = measured["zeroed_us"] if problem.pooled and problem.places > shape.places else 0
        return one["us"] * _waves(problem, problem.places, shape) + zeroed

    fastest = _shape(min(measured["shapes"], key=time))
    return fastest if problem.residual is None else fastest._replace(places=min(fastest.places, MOST_ADDED))


def _shape(tuned: Mapping[str, float]) -> Shape:
    return Shape(int(tuned["groups"]), int(tuned["places"]))


def _waves(problem: Problem, places: int, shape: Shape) -> int:
    """How many times the multiprocessors have a tile each."""
    tiles = parts_of(places, shape.places) * sum(parts_of(bank.maps, shape.maps) for bank in problem.banks)
    return parts_of(max(1, tiles), processors(problem.device))


@lru_cache(MOST_PLANS)
def planned(problem: Problem, shape: Shape) -> Plan:
    """A block is alone on its multiprocessor and goes through tiles, those of the widest filters first."""
    lines = _lines(problem, shape)
    if not lines.shared and problem.width > WIDE:
        shape = NARROWEST
        lines = _lines(problem, shape)
    if lines.places > MOST_PLACES:
        raise ContractError(f"x has {problem.windows.tokens} tokens, at most about {MOST_PLACES} are taken at once")
    alone = problem.pooled and lines.places <= shape.places
    positions = max(1, parts_of(lines.places, shape.places))
    order = sorted(range(len(problem.banks)), key=lambda bank: -problem.banks[bank].width)
    firsts, tiles = [0] * len(order), 0
    for bank in order:
        firsts[bank] = tiles
        tiles += positions * parts_of(problem.banks[bank].maps, shape.maps)
    blocks = min(tiles, processors(problem.device))
    kernel, shared = _kernel(problem, shape, lines, alone=alone, many=tiles > blocks)
    numbers = [
        *problem.windows.numbers(lines.gap),
        problem.wide_ids,
        problem.inputs,
        problem.windows.dilation // problem.windows.thinned.every,
        lines.stage,
        problem.columns,
        *_residual(problem),
        tiles,
        len(problem.banks),
        problem.known,
        problem.known or not problem.followed,
        *of_banks(*([getattr(bank, name) for bank in problem.banks] for name in ("width", "outputs", "column")), firsts),
    ]
    return Plan(kernel, blocks, shared, shape.maps, alone, list(map(int, numbers)))


def _lines(problem: Problem, shape: Shape) -> Lines:
    """Taps see the same lines where a tile's windows are one step apart, filters do not reach too far, and the room that this needs
    between rows makes hardly more waves of tiles: zeros may be those of two rows at once, the steps of a chunk before may not."""
    windows, places, reach = problem.windows, problem.places, max(problem.reaches)
    if windows.stride == 1 and not windows.thinned_out.most and reach - 1 <= max(shape.places // 2, FEW_LINES):
        gap = max(problem.more, sum(windows.padding) if problem.goes_on else max(windows.padding))
        together = windows.tokens + windows.rows * gap
        if _waves(problem, together, shape) <= MORE_WAVES * _waves(problem, places, shape):
            lines = shape.places + reach - 1
            return Lines(lines, lines, True, gap, together)
    gap = problem.more if windows.stride == 1 else 0
    return Lines(shape.places, problem.width * shape.places, False, gap, places)


def _residual(problem: Problem) -> list[int]:
    if problem.residual is None:
        return [0] * 4
    columns, steps = problem.residual
    return [columns, steps.most, steps.every, apart(steps, problem.windows.thinned_out)]


def _kernel(problem: Problem, shape: Shape, lines: Lines, *, alone: bool, many: bool) -> tuple[Kernel, int]:
    """And the bytes of shared memory that a block has. many: a block goes through several tiles."""
    room, table = round_up(lines.stage, 8), round_up(lines.table, 8)
    fixed = round_up(8 * table + 16 * shape.places + BARRIER_BYTES, ALIGNED)
    x_stages, filter_stages = _stages(
        problem, shape, room * LINE_BYTES, shared_limit(problem.device) - fixed, lines.shared, many
    )
    shared = fixed + x_stages * room * LINE_BYTES + filter_stages * shape.groups * FILTER_BYTES
    gated = problem.activation in GATED
    constants = {
        "BFLOAT16": problem.storage == torch.bfloat16,
        "ACTIVATION": 0 if gated or problem.pooled else NAMES.index(problem.activation),
        "GATE": GATES.index(problem.activation) if gated else 0,
        "AFTER": NAMES.index(problem.after),
        "RESIDUAL": problem.residual is not None,
        "POOLED": problem.pooled,
        "ALONE": alone,
        "STEPS_FLOAT32": problem.float32,
        "THINNED": problem.windows.thinned_out.most > 0,
        "PIECE_BYTES": problem.piece,
        "SHARED_LINES": lines.shared,
        "GROUPS": shape.groups,
        "PLACES": shape.places,
        "LINES": room,
        "TABLE": table,
        "X_STAGES": x_stages,
        "FILTER_STAGES": filter_stages,
        "SHARED": shared,
    }
    threads = 128 + 128 * shape.groups
    named = {name: int(value) for name, value in constants.items()}
    return compiled(HERE / "product.cu", problem.device, threads=threads, **named), shared


def _stages(problem: Problem, shape: Shape, stage_bytes: int, limit: int, shared: bool, many: bool) -> tuple[int, int]:
    """Of the inputs and of the filters, as many as there is room for and use."""
    taps = parts_of(problem.inputs, DEPTH) * problem.width
    pieces = parts_of(problem.inputs, DEPTH) if shared else taps
    for x_stages in range(3 if many else min(X_STAGES, max(2, pieces)), 1, -1):
        fitting = (limit - x_stages * stage_bytes) // (shape.groups * FILTER_BYTES)
        filter_stages = min(fitting, FILTER_STAGES, max(2, taps))
        if filter_stages >= min(FEW_FILTERS, taps):
            return x_stages, filter_stages
    raise ContractError(f"this device has no room for filters that are {problem.width} wide")
