"""The launcher of tile_gates.cu, which computes the last hidden vector of each row from gate inputs, or from rows of a table."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.launching import round_up
from kernels.scan.layer import ScanVariant
from kernels.scan.shape import ALIGNED, TILE, TileShape


def tile_gates_constants(variant: ScanVariant, shape: TileShape) -> Mapping[str, int]:
    """Return the constants of tile_gates.cu."""
    columns = variant.form.blocks * shape.units
    gates = TILE * (8 * shape.units + 2 * (columns + 8))
    share = 4 * columns + shape.tiles * (12 * shape.units + 12 * TILE + 8) + 64
    return {
        "THREADS": 128 * shape.tiles,
        "TILES": shape.tiles,
        "SHARED": round_up(shape.tiles * gates + share, ALIGNED),
        "GATHER": int(variant.gates.gather),
        "FIRST_LINE": int(variant.gates.gather and not variant.form.sru),
    }
