"""The launch shape of a scan kernel: hidden units of a block, rings, and threads for each unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kernels.compile import is_hopper_or_newer
from kernels.launching import ceil_div
from kernels.scan.layer import ScanForm, ScanVariant
from kernels.tuning import load_tuned, matching_shapes

HERE = Path(__file__).parent
TILE = 64
"""Steps that a team computes at once."""
LONG_ROW = 384
"""Steps of a row that is long enough for a ring."""
FEW_ROWS = 8
"""Rows up to which the product of long rows has too few blocks."""
NARROW = 256
"""Hidden units of all directions up to which a ring is faster than a library product, and faster than no ring."""
RINGS = (8, 4)
"""Blocks of a ring's cluster."""
MAX_CLUSTER_BLOCKS = 120
"""Blocks in clusters that run at once. A device's multiprocessors are not a whole number of clusters."""
MAX_COLUMNS = 192
"""Columns of a tile."""
ALIGNED = 1024
"""Alignment in bytes of a block's shared memory, and of the tensor cores' operands in it."""
STAGES = range(8, 0, -1)
"""Pieces of the inputs, or tiles of gate inputs, that may be in flight, in the order in which they are tried."""
SMALL_UNITS = 32
"""Hidden units of a block in a ring, and of a block that reads gate inputs."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """How a kernel is launched.

    units: hidden units of a block; ring: blocks of a cluster whose teams form a ring, or 0 if each team has its own rows; busy: gate
    inputs arrive faster than four threads for each unit prepare them.
    """

    units: int
    ring: int = 0
    busy: bool = False

    @property
    def groups(self) -> int:
        """Threads of a team for each unit."""
        if self.busy:
            return 6
        return 4 if self.units <= 32 else 1

    @property
    def buffers(self) -> int:
        """Tiles of a product that may wait for a team."""
        return 2 if self.units <= 32 and not self.ring else 1

    @property
    def team(self) -> int:
        """Threads of a team."""
        return self.groups * self.units

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return max(1, self.ring)

    @property
    def team_bytes(self) -> int:
        """Bytes of shared memory of both teams, and of the values that a block stores once."""
        ring = self.units * (16 + 16 * self.groups + 32 * self.cluster) + 96 if self.ring else 0
        return 2 * (12 * self.units + ring + 128) + 256


def shape_for(variant: ScanVariant, rows: int, tokens: int, pooled: bool) -> ScanShape:
    """Return the fastest measured shape.

    Few long rows run in a ring, but not with pooled outputs, which are summed in the order of the steps.
    """
    width, own_cell = variant.hidden * variant.directions, variant.form.own_cell
    may_ring = not own_cell and not pooled and tokens >= LONG_ROW * rows and width <= NARROW
    if may_ring and is_hopper_or_newer(variant.device):
        blocks = ceil_div(variant.hidden, SMALL_UNITS) * variant.directions * rows
        ring = next((ring for ring in RINGS if ring * blocks <= MAX_CLUSTER_BLOCKS), 0)
        if ring:
            return ScanShape(SMALL_UNITS, ring)
    if not variant.gates.product:
        return ScanShape(SMALL_UNITS, busy=not own_cell and rows > FEW_ROWS)
    # The teams compute the outputs of every step, and blocks with few units have more threads for it.
    if variant.all_steps:
        return ScanShape(SMALL_UNITS)
    sizes = {"width": width, "depth": variant.gates.window * variant.inputs, "rows": rows, "tokens": tokens}
    fastest = next(_tuned_units(variant.device, **sizes))
    return ScanShape(fastest if fastest * variant.form.blocks <= MAX_COLUMNS else SMALL_UNITS)


@cache
def multiplies_inputs(device: int) -> bool:
    """Return whether product.cu runs on a device: only Hopper has the tensor-core instructions of wgmma.cuh."""
    return (9, 0) <= torch.cuda.get_device_capability(device) < (10, 0)


def prefers_library_product(form: ScanForm, width: int, rows: int, tokens: int) -> bool:
    """Return whether the library should compute the product of the inputs. width: hidden units of all directions.

    With few long rows, the blocks that multiply would wait for each other's cells.
    """
    return rows <= FEW_ROWS and tokens >= LONG_ROW * rows and (form.own_cell or width > NARROW)


def _tuned_units(device: int, **sizes: int) -> Iterator[int]:
    shapes = load_tuned(HERE / "tuned", torch.cuda.get_device_name(device))["shapes"]
    return (units for _, units in matching_shapes(shapes, ("units",), **sizes))
