"""The launcher of tile_product.cu, which computes the last hidden vector of each row from the inputs."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.compile import shared_limit
from kernels.launching import ceil_div, round_up
from kernels.scan.layer import ScanVariant
from kernels.scan.product import DEPTH
from kernels.scan.shape import ALIGNED, STAGES, TILE, TileShape

RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""


def tile_product_constants(variant: ScanVariant, shape: TileShape) -> Mapping[str, int]:
    """Return the constants of tile_product.cu. STAGES is 0 if shared memory is too small.

    Two blocks of up to two tiles share a multiprocessor, so that one starts while the other, or the previous kernel, runs.
    """
    pieces = variant.gates.window * ceil_div(variant.inputs, DEPTH)
    limit = shared_limit(variant.device)
    if shape.tiles <= 2:
        limit = (limit + RESERVED) // 2 - RESERVED
    stages = next((count for count in STAGES if _shared_bytes(variant, shape, count) <= limit), 0)
    return {
        "THREADS": 128 * shape.tiles + 32,
        "TILES": shape.tiles,
        "STAGES": stages,
        "SHARED": _shared_bytes(variant, shape, stages),
        "WINDOW": variant.gates.window,
        "PIECES": pieces,
    }


def _shared_bytes(variant: ScanVariant, shape: TileShape, stages: int) -> int:
    columns, line = variant.form.blocks * shape.units, 2 * DEPTH
    gates = TILE * (8 * shape.units + 2 * (columns + 8))
    inputs = round_up(max(stages * TILE * line, gates), ALIGNED)
    share = 4 * columns + shape.tiles * (12 * shape.units + 12 * TILE + 8) + 64
    return round_up(shape.tiles * inputs + stages * (columns * line + 16) + share, ALIGNED)
