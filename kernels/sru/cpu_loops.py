"""The projection of an SRU's data, compiled for the CPU."""

from __future__ import annotations

from kernels.cpu.compiled import Compiled
from kernels.cpu.int8 import rows_of_product
from kernels.cpu.products import product
from kernels.cpu.rows import aligned, longs
from kernels.cpu.vectors import FLOAT_BYTES, LONG_BYTES


@Compiled
def project(
    part: int,
    parts: int,
    tokens: int,
    storage: int,
    data: int,
    columns: int,
    weights: int,
    bias: int,
    width: int,
    out: int,
    scratch: int,
) -> None:
    """Write the product of part `part` of `parts` of the tokens with packed weights, (tokens, width). scratch: memory for
    (tokens,) int64, aligned, and for quantized rows."""
    begin, end = tokens * part // parts, tokens * (part + 1) // parts
    offsets = longs(scratch, end - begin)
    for position in range(end - begin):
        offsets[position] = (begin + position) * columns
    rows, begins = rows_of_product(storage, data, scratch, end - begin, columns, scratch + aligned(LONG_BYTES * (end - begin)))
    product(storage, rows, begins, end - begin, columns, weights, bias, out + FLOAT_BYTES * width * begin, width)
