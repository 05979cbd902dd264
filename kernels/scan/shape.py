"""The launch shapes of the scan kernels: hidden units of a block, and threads for each unit or tiles computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kernels.compile import is_hopper_or_newer
from kernels.launching import ceil_div, device_index, multiprocessors
from kernels.ragged import Outputs, Ragged
from kernels.scan.forms import ScanForm
from kernels.scan.layer import ScanVariant
from kernels.tuning import load_tuned, matching_shapes

HERE = Path(__file__).parent
TILE = 64
"""Steps that a team computes at once."""
PART = 128
"""Steps of a part of a row, as in call.cuh."""
LONG_ROW = 384
"""Steps of a row whose parts are computed in different blocks."""
FEW_ROWS = 8
"""Rows up to which the product of long rows has too few blocks."""
TILED_TOKENS = 4096
"""Tokens of several long rows up to which tiles are faster than a library product."""
TILE_UNITS = (8, 16, 32)
"""Hidden units of a block that computes a short row in tiles."""
SHORT_UNITS = 16
"""Hidden units of a block that computes parts of a long row in tiles."""
STREAM_UNITS = (32, 64)
"""Hidden units of a block with two streams of parts of a long row."""
MAX_COLUMNS = 192
"""Columns of a tile."""
ALIGNED = 1024
"""Alignment in bytes of a block's shared memory, and of the tensor cores' operands in it."""
STAGES = range(8, 0, -1)
"""Pieces of the inputs, or tiles of gate inputs, that may be in flight, in the order in which they are tried."""
PIECE_BYTES = 16
"""Bytes of gate inputs that tile_gates.cu copies at once."""
SMALL_UNITS = 32
"""Hidden units of a block that reads gate inputs."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """How a kernel is launched.

    units: hidden units of a block; busy: gate inputs arrive faster than four threads for each unit prepare them; split: streams have parts
    of a single row, instead of whole rows.
    """

    units: int
    busy: bool = False
    split: bool = False

    @property
    def groups(self) -> int:
        """Threads of a team for each unit."""
        if self.busy:
            return 6
        return 4 if self.units <= 32 else 1

    @property
    def buffers(self) -> int:
        """Tiles of a product that may wait for a team."""
        return 2 if self.units <= 32 else 1

    @property
    def team(self) -> int:
        """Threads of a team."""
        return self.groups * self.units

    @property
    def team_bytes(self) -> int:
        """Bytes of shared memory of both teams, and of the values that a block stores once."""
        return 2 * (20 * self.units + 128) + 256


@dataclass(frozen=True, slots=True)
class TileShape:
    """How tile_product.cu or tile_gates.cu is launched.

    units: hidden units of a block; tiles: tiles of 64 steps that it computes at once; split: the parts of a row are in different blocks.
    """

    units: int
    tiles: int
    split: bool = False


def shape_for(variant: ScanVariant, rows: int, tokens: int) -> ScanShape | TileShape:
    """Return the fastest measured shape."""
    own_cell = variant.form.own_cell
    if not own_cell and not variant.all_steps and is_hopper_or_newer(variant.device):
        divided = _divided_product(variant, rows, tokens) if variant.gates.product else _divided_gates(variant, rows, tokens)
        if divided is not None:
            return divided
    if not variant.gates.product:
        return ScanShape(SMALL_UNITS, busy=not own_cell and rows > FEW_ROWS)
    # The teams compute the outputs of every step, and blocks with few units have more threads for it.
    if variant.all_steps:
        return ScanShape(SMALL_UNITS)
    width, depth = variant.hidden * variant.directions, variant.gates.window * variant.inputs
    return ScanShape(_allowed(variant, next(_tuned_units(variant.device, width=width, depth=depth, rows=rows, tokens=tokens))))


@cache
def multiplies_inputs(device: int) -> bool:
    """Return whether product.cu runs on a device: only Hopper has the tensor-core instructions of wgmma.cuh."""
    return (9, 0) <= torch.cuda.get_device_capability(device) < (10, 0)


def needs_every_step(want: Outputs) -> bool:
    """Return whether outputs depend on the hidden vectors of all steps."""
    return want.steps or want.mean or want.max


def takes_library_product(form: ScanForm, storage: torch.dtype, x: Ragged, want: Outputs) -> bool:
    """Return whether the library computes the product of the inputs: in float32, on devices without the kernel's instructions, and of few
    long rows, unless their parts are computed apart. There, the blocks that multiply would wait for each other's cells."""
    if storage == torch.float32 or not multiplies_inputs(device_index(x.offsets.device)):
        return True
    rows, tokens = x.rows, len(x.data)
    in_sequence = form.own_cell or needs_every_step(want) or (rows > 1 and tokens > TILED_TOKENS)
    return _few_long_rows(rows, tokens) and in_sequence


def _divided_product(variant: ScanVariant, rows: int, tokens: int) -> ScanShape | TileShape | None:
    """Return the shape for a single row or for few long rows, or None. Other rows are enough for all multiprocessors."""
    if rows > 1:
        return TileShape(SMALL_UNITS, PART // TILE, split=True) if _few_long_rows(rows, tokens) else None
    if tokens <= PART:
        # Blocks on every second multiprocessor are faster than twice as many with half of the units.
        return TileShape(_narrowest(variant, TILE_UNITS, 2), max(1, ceil_div(tokens, TILE)))
    if tokens < LONG_ROW:
        return None
    parts = ceil_div(tokens, PART)
    if _blocks(variant, SHORT_UNITS, parts) <= 2 * multiprocessors(variant.device):
        return TileShape(SHORT_UNITS, PART // TILE, split=True)
    # A block has two streams.
    return ScanShape(_allowed(variant, _narrowest(variant, STREAM_UNITS, ceil_div(parts, 2))), split=True)


def _divided_gates(variant: ScanVariant, rows: int, tokens: int) -> TileShape | None:
    """Return the shape for few long rows whose gates tile_gates.cu can read, or None."""
    gates = variant.gates
    readable = gates.window == 1 and not gates.float32 and gates.piece_bytes == PIECE_BYTES
    return TileShape(SMALL_UNITS, PART // TILE, split=True) if readable and _few_long_rows(rows, tokens) else None


def _few_long_rows(rows: int, tokens: int) -> bool:
    return rows <= FEW_ROWS and tokens >= LONG_ROW * rows


def _blocks(variant: ScanVariant, units: int, spans: int) -> int:
    return spans * ceil_div(variant.hidden, units) * variant.directions


def _narrowest(variant: ScanVariant, choices: Sequence[int], spans: int) -> int:
    """Return the fewest units for which all blocks run at once, or the most units."""
    room = multiprocessors(variant.device)
    return next((units for units in choices if _blocks(variant, units, spans) <= room), choices[-1])


def _allowed(variant: ScanVariant, units: int) -> int:
    return units if units * variant.form.blocks <= MAX_COLUMNS else SMALL_UNITS


def _tuned_units(device: int, **sizes: int) -> Iterator[int]:
    shapes = load_tuned(HERE / "tuned", torch.cuda.get_device_name(device))["shapes"]
    return (units for _, units in matching_shapes(shapes, ("units",), **sizes))
