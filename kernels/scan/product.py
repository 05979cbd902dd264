"""The launcher of product.cu, which computes a layer from its inputs: the product with the weights, and the scan over it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels.compile import shared_limit
from kernels.launching import ceil_div, round_up, swizzled
from kernels.scan.layer import ScanVariant
from kernels.scan.shape import ALIGNED, STAGES, TILE, ScanShape
from kernels.tensormap import MAP_BYTES, tensor_map

DEPTH = 64
"""Columns of the inputs that one step of the product multiplies."""
RUN = 16
"""Steps that a thread computes before it hands its cell over."""
PATCHING_WARPS = 3
"""Warps that patch the inputs at the borders of rows; each needs a stage."""


def pack(weights: Tensor, blocks: int, units: int) -> Tensor:
    """Return weights, (window, inputs, blocks x hidden), as right operands of tensor-core products, padded with zeros.

    Shape: (slices of `units` hidden units, steps of the window by pieces of 64 inputs, columns block by block, 64 inputs). The 16-byte
    pieces of a column are swizzled.
    """
    window, inputs, columns = weights.shape
    hidden = columns // blocks
    slices, depth = ceil_div(hidden, units), ceil_div(inputs, DEPTH)
    padded = weights.new_zeros(window, depth * DEPTH, blocks, slices * units)
    padded[:, :inputs, :, :hidden] = weights.view(window, inputs, blocks, hidden)
    split = padded.view(window, depth, 8, 8, blocks, slices, units)
    tap, chunk, piece, value, block, part, unit = range(7)
    rows = split.permute(part, tap, chunk, block, unit, piece, value)
    return swizzled(rows.reshape(slices, window * depth, blocks * units, 8, 8))


def product_constants(variant: ScanVariant, shape: ScanShape) -> Mapping[str, int]:
    """Return the constants of product.cu that depend on how it computes the gates. STAGES is 0 if shared memory is too small."""
    pieces = variant.gates.window * ceil_div(variant.inputs, DEPTH)
    resident = _stages(variant, shape, pieces, resident=True) > 0
    stages = _stages(variant, shape, pieces, resident=resident)
    return {
        "THREADS": 384 + 2 * shape.team,
        "GROUPS": shape.groups,
        "RUN": RUN,
        "STAGES": stages,
        "SHARED": _shared_bytes(variant, shape, pieces, stages, resident=resident),
        "WINDOW": variant.gates.window,
        "BUFFERS": shape.buffers,
        "PIECES": pieces,
        "RESIDENT": int(resident),
        "SPLIT": int(shape.split),
    }


def input_map(data: Tensor | None) -> bytes:
    """Return the tensor map of the inputs, or zeros if there are none to copy."""
    if data is None or not data.numel():
        return bytes(MAP_BYTES)
    return tensor_map(data.data_ptr(), len(data), data.shape[1], TILE, DEPTH)


def _shared_bytes(variant: ScanVariant, shape: ScanShape, pieces: int, stages: int, *, resident: bool) -> int:
    """Return the bytes of shared memory. resident: all weights stay there; otherwise they arrive with each stage."""
    columns = variant.form.blocks * shape.units
    gates = shape.buffers * 2 * TILE * (2 * columns + 16)
    weights = (pieces if resident else stages) * columns * 2 * DEPTH
    return round_up(shape.team_bytes + gates + weights + stages * (2 * TILE * 2 * DEPTH + 24) + 8, ALIGNED)


def _stages(variant: ScanVariant, shape: ScanShape, pieces: int, *, resident: bool) -> int:
    """Return how many stages fit, or 0 if there are too few for the patching warps."""
    limit = shared_limit(variant.device)
    fitting = (count for count in STAGES if _shared_bytes(variant, shape, pieces, count, resident=resident) <= limit)
    stages = next(fitting, 0)
    return stages if stages >= PATCHING_WARPS else 0
