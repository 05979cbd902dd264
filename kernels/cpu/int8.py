"""Products of int8 weights with rows that are quantized when they are needed, each with its own scale.

A row's scale is its largest absolute value / 127, so a result depends on no other row. The integer sums are exact. A sum times the
scales of its row and its column is the product.

An instruction adds up the products of STEPS consecutive steps of a column, so these weights are together.
A panel is (depth / STEPS, vectors, LANES, STEPS) int8, then the scales of its columns, (vectors, LANES) float32, and the numbers from
which its sums start, (vectors, LANES) int32. A quantized row is its scale, float32, and its numbers. VNNI multiplies unsigned with
signed bytes: there, the numbers of a row are 128 too large, and the sums start from -128 times the sums of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from llvmlite import ir
from numba.core import cgutils
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu.compiled import inner
from kernels.cpu.rows import aligned, longs
from kernels.cpu.storage import INT8
from kernels.cpu.vectors import (
    BYTE,
    FLOAT,
    FLOAT_BYTES,
    INT,
    INTS,
    LANES,
    LONG_BYTES,
    SHORT,
    TARGET,
    VECTOR,
    Vectors,
    index,
    vector_code,
)
from kernels.quantized import LEVELS

STEPS = TARGET.int8_steps
BYTES = STEPS == 4
"""Whether the numbers of a quantized row are unsigned bytes; they are 16-bit numbers otherwise."""
SHIFT, NUMBER = (128, BYTE) if BYTES else (0, SHORT)
SMALLEST = 1e-30
"""A row of smaller values counts as zeros: LEVELS / SMALLEST is still a float32 number."""
UNROLLED = 4
"""Words of STEPS steps without a branch between them."""


def pack_int8(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return panels as they are stored, (panels, bytes). numbers: (panels, depth, vectors, LANES) int8; scales: (panels, 1,
    vectors, LANES)."""
    even = pad(numbers, (0, 0, 0, 0, 0, -numbers.shape[1] % STEPS))
    words = even.reshape(len(even), even.shape[1] // STEPS, STEPS, *even.shape[2:]).permute(0, 1, 3, 4, 2)
    starts = numbers.sum(1, dtype=torch.int32) * -SHIFT
    parts = [part.flatten(1).contiguous().view(torch.int8) for part in (words, scales, starts)]
    return torch.cat(parts, dim=1)


def row_words(depth: int) -> int:
    """Return the 32-bit words of a quantized row: whole vectors of numbers after its scale."""
    return 1 + (depth + LANES - 1) // LANES * LANES // STEPS


def row_floats(depth: int) -> int:
    """Return the scratch memory of a quantized row and of where it begins, as float32 numbers."""
    return row_words(depth) + LONG_BYTES // FLOAT_BYTES


compiled_row_words = inner(row_words)


@inner
def quantized_bytes(rows: int, depth: int) -> int:
    """Return the memory of quantized rows."""
    return aligned(LONG_BYTES * rows) + aligned(FLOAT_BYTES * compiled_row_words(depth) * rows)


@inner
def int8_vector_bytes(depth: int) -> int:
    """Return the bytes of one vector of a panel: its weights, scales and starts."""
    steps = (depth + STEPS - 1) // STEPS * STEPS
    return (steps + 2 * FLOAT_BYTES) * LANES


@inner
def rows_of_product(storage: int, values: int, offsets: int, rows: int, depth: int, memory: int) -> tuple[int, int]:
    """Return the rows that a product with weights of this storage reads, and where each begins: the rows themselves, or for int8
    quantized rows in `memory`.

    values, offsets: float32 rows of `depth` numbers and where each begins, int64; memory: aligned, of `quantized_bytes`.
    """
    if storage != INT8:
        return values, offsets
    words, target = compiled_row_words(depth), memory + aligned(LONG_BYTES * rows)
    before, begins = longs(offsets, rows), longs(memory, rows)
    for row in range(rows):
        begins[row] = words * row
        _quantize_row(values + FLOAT_BYTES * before[row], depth, target + FLOAT_BYTES * begins[row])
    return target, memory


@vector_code
def _quantize_row(code: Vectors, values: ir.Value, depth: ir.Value, target: ir.Value) -> None:
    """Write a quantized row of `depth` values. values, target: addresses."""
    builder = code.builder
    values_at, scale_at = code.pointer(values), code.pointer(target)
    numbers_at = code.pointer(builder.add(target, index(FLOAT_BYTES)), NUMBER)
    highest = code.variable(code.constant(0.0))

    def include(vector: ir.Value, _at: ir.Value) -> None:
        builder.store(code.maximum(builder.load(highest), code.absolute(vector)), highest)

    code.for_each_vector(values_at, depth, include)
    largest = code.largest(builder.load(highest))
    builder.store(builder.fdiv(largest, ir.Constant(FLOAT, LEVELS)), scale_at)
    # The comparison is false for a value that is not a number: the scale carries it to the sums.
    is_quantized = builder.fcmp_ordered(">=", largest, ir.Constant(FLOAT, SMALLEST))
    inverse = builder.select(is_quantized, builder.fdiv(ir.Constant(FLOAT, LEVELS), largest), ir.Constant(FLOAT, 0.0))
    factor = code.in_every_lane(inverse)

    def write(vector: ir.Value, at: ir.Value) -> None:
        number = code.round(builder.fmul(vector, factor))
        shifted = builder.add(builder.fptosi(number, INTS), ir.Constant(INTS, [SHIFT] * LANES))
        narrow = builder.trunc(shifted, ir.VectorType(NUMBER, LANES))
        code.store(narrow, numbers_at, at)

    code.for_each_vector(values_at, depth, write)


def emit_int8_products(
    code: Vectors, values: ir.Value, offsets: Sequence[ir.Value], panel: ir.Value, depth: ir.Value, vectors: int
) -> list[list[ir.Value]]:
    """Return the products of a tile's rows and a panel, by row and vector.

    values: a pointer to 32-bit words; the quantized rows begin at `offsets`; panel: the address of the panel.
    """
    builder = code.builder
    words = builder.udiv(builder.add(depth, index(STEPS - 1)), index(STEPS))
    scales = builder.add(panel, builder.mul(words, index(vectors * LANES * STEPS)))
    weights_at, scales_at = code.pointer(panel, BYTE), code.pointer(scales)
    starts_at, values_at = code.pointer(scales, INT), builder.bitcast(values, INT.as_pointer())
    starts = [code.load_ints(starts_at, index((vectors + vector) * LANES)) for vector in range(vectors)]
    sums = [[code.variable(start) for start in starts] for _ in offsets]

    def add(position: ir.Value) -> None:
        first = builder.mul(position, index(vectors * LANES * STEPS))
        columns = [
            code.load_bytes(weights_at, builder.add(first, index(vector * LANES * STEPS)), STEPS) for vector in range(vectors)
        ]
        for offset, row_sums in zip(offsets, sums, strict=True):
            word = builder.load(builder.gep(values_at, [builder.add(builder.add(offset, index(1)), position)]))
            for column, total in zip(columns, row_sums, strict=True):
                builder.store(_emit_step(code, builder.load(total), code.in_every_lane(word), column), total)

    unrolled = builder.udiv(words, index(UNROLLED))
    with cgutils.for_range(builder, unrolled, intp=unrolled.type) as loop:
        start = builder.mul(loop.index, index(UNROLLED))
        for word in range(UNROLLED):
            add(builder.add(start, index(word)))
    start = builder.mul(unrolled, index(UNROLLED))
    with cgutils.for_range(builder, builder.sub(words, start), intp=unrolled.type) as loop:
        add(builder.add(start, loop.index))

    column_scales = [code.load(scales_at, index(vector * LANES)) for vector in range(vectors)]
    products = []
    for offset, row_sums in zip(offsets, sums, strict=True):
        row_scale = code.broadcast(values, offset)
        scales_of_row = [builder.fmul(row_scale, scale) for scale in column_scales]
        floats = [builder.sitofp(builder.load(total), VECTOR) for total in row_sums]
        products.append([builder.fmul(value, scale) for value, scale in zip(floats, scales_of_row, strict=True)])
    return products


def _emit_step(code: Vectors, total: ir.Value, word: ir.Value, weights: ir.Value) -> ir.Value:
    """Return `total` plus the products of the STEPS numbers of a word with the weights of each column."""
    builder = code.builder
    if BYTES:
        return code.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, word, builder.bitcast(weights, INTS))
    # LLVM makes one instruction of it where the processor has one: vpmaddwd on x86.
    wide = ir.VectorType(INT, LANES * STEPS)
    numbers = builder.bitcast(word, ir.VectorType(SHORT, LANES * STEPS))
    products = builder.mul(builder.sext(numbers, wide), builder.sext(weights, wide))
    halves = [
        builder.shuffle_vector(
            products, ir.Constant(wide, ir.Undefined), ir.Constant(INTS, list(range(half, LANES * STEPS, STEPS)))
        )
        for half in range(STEPS)
    ]
    return builder.add(total, builder.add(*halves))
