"""Products of float32 rows with packed weights: the tile that every CPU kernel computes, and the layout of its weights.

Weights are packed into panels, (panels, depth, vectors, LANES): all weights of one panel are consecutive. In panels of
bfloat16, (panels, depth / 2, vectors, LANES, 2), the weights of two consecutive steps are the halves of a 32-bit word, because
a shift or a mask then makes float32 numbers of a whole vector. `kernels.cpu.int8` describes panels of int8. The width of every
block of columns is rounded up to LANES with zeros. In a panel of a recurrent weight, the vectors are the gates of the same
LANES units; in a panel of any other weight they are consecutive columns.

A tile is up to `max_rows` rows of one panel, or one row of two panels, because the sums of a row and a panel are too few: each addition
waits for the one before it. It keeps its sums in registers while it runs over the depth. Each sum adds its products in the order of the
depth, so a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu.compiled import Codegen, inner
from kernels.cpu.int8 import emit_int8_products, int8_vector_bytes, pack_int8, quantized_bytes
from kernels.cpu.launch import TILE_BYTES
from kernels.cpu.rows import aligned, longs
from kernels.cpu.storage import BFLOAT16, FLOAT32, INT8
from kernels.cpu.vectors import (
    FLOAT,
    FLOAT_BYTES,
    LANES,
    LONG,
    LONG_BYTES,
    REGISTERS,
    STORED_PANEL,
    Vectors,
    for_each_case,
    index,
    vector_code,
)
from kernels.launching import round_up
from kernels.quantized import quantize

VECTORS = 4
"""Vectors of a panel of consecutive columns."""
PANEL_COLUMNS = VECTORS * LANES
LARGEST_TILE = 8
"""More rows take longer to compile and are hardly faster."""
UNROLLED = 4
"""Steps over the depth without a branch between them."""
ROWS_IN_CACHE = 96
"""Rows of a product that pass over all panels together, so that they stay in the cache."""


def max_rows(vectors: int) -> int:
    """Return the rows of the largest tile. Its sums, a vector of each block and one value fit into the registers."""
    return min(LARGEST_TILE, max(1, (REGISTERS - vectors - 1) // vectors))


def padded(hidden: int) -> int:
    """Return the width of a block of `hidden` columns."""
    return round_up(hidden, LANES)


def product_width(columns: int) -> int:
    """Return the width of the rows that a product writes, for this number of padded columns."""
    return round_up(columns, PANEL_COLUMNS)


def pack_blocks(weight: Tensor, blocks: int, storage: int) -> Tensor:
    """Return a weight, (depth, blocks x hidden), in panels with a vector of each block."""

    def panels(matrix: Tensor) -> Tensor:
        separate = _pad_blocks(matrix, blocks)
        return separate.reshape(len(matrix), blocks, separate.shape[2] // LANES, LANES).permute(2, 0, 1, 3)

    return _store(weight, panels, storage)


def pack_columns(weight: Tensor, blocks: int, storage: int) -> Tensor:
    """Return a weight, (depth, blocks x hidden), in panels of VECTORS consecutive vectors."""

    def panels(matrix: Tensor) -> Tensor:
        columns = _pad_blocks(matrix, blocks).flatten(1)
        columns = pad(columns, (0, -columns.shape[1] % PANEL_COLUMNS))
        return columns.reshape(len(matrix), columns.shape[1] // PANEL_COLUMNS, VECTORS, LANES).transpose(0, 1)

    return _store(weight, panels, storage)


def _store(weight: Tensor, panels: Callable[[Tensor], Tensor], storage: int) -> Tensor:
    """Return the panels of a weight as they are stored. panels: splits a matrix into panels, (panels, depth, vectors, LANES)."""
    if storage == INT8:
        numbers, scales = quantize(weight)
        return pack_int8(panels(numbers), panels(scales[None]))
    return panels(weight.float()).contiguous() if storage == FLOAT32 else _pair_halves(panels(weight.bfloat16()))


def _pair_halves(panels: Tensor) -> Tensor:
    """Return panels of bfloat16 with the weights of two steps together."""
    even = pad(panels, (0, 0, 0, 0, 0, panels.shape[1] % 2))
    pairs = even.reshape(even.shape[0], even.shape[1] // 2, 2, *even.shape[2:])
    return pairs.permute(0, 1, 3, 4, 2).contiguous()


def pack_bias(bias: Tensor, blocks: int) -> Tensor:
    """Return a bias, (blocks x hidden,), as float32 for a weight of `pack_columns`."""
    columns = _pad_blocks(bias.float()[None], blocks).flatten()
    return pad(columns, (0, -len(columns) % PANEL_COLUMNS))


def _pad_blocks(weight: Tensor, blocks: int) -> Tensor:
    """Return a weight as (depth, blocks, hidden), with hidden rounded up to LANES."""
    separate = weight.reshape(len(weight), blocks, weight.shape[1] // blocks)
    return pad(separate, (0, -separate.shape[2] % LANES))


def _emit_products(
    code: Vectors,
    places: Sequence[Sequence[Sequence[ir.Value]]],
    values: ir.Value,
    offsets: Sequence[ir.Value],
    panel: ir.Value,
    depth: ir.Value,
    storage: int,
) -> None:
    """Add the products of a tile's rows and panels to the tile's variables, by panel, row and vector.

    values: float32, the rows begin at `offsets`; panel: the address of the first panel's weights, behind which the others are.
    """
    builder, vectors = code.builder, len(places[0][0])
    weights = code.pointer(panel, STORED_PANEL[storage])
    together = 2 if storage == BFLOAT16 else 1
    positions = builder.udiv(builder.add(depth, index(together - 1)), index(together))
    panel_numbers = builder.mul(positions, index(vectors * LANES))

    def load(position: ir.Value, steps: int) -> list[list[ir.Value]]:
        """Return the weights of consecutive steps, by step, panel and vector. position: of the first step, or of its pair."""
        first = builder.mul(position, index(vectors * LANES))
        begins = [builder.add(first, builder.mul(panel_numbers, index(number))) for number in range(len(places))]
        at = [builder.add(begin, index(vector * LANES)) for begin in begins for vector in range(vectors)]
        if storage == BFLOAT16:
            pairs = [code.load_pairs(weights, offset) for offset in at]
            return [[pair[half] for pair in pairs] for half in range(steps)]
        return [[code.load(weights, offset) for offset in at]]

    def add(position: ir.Value, columns: Sequence[ir.Value]) -> None:
        for offset, *row_places in zip(offsets, *places, strict=True):
            value = code.broadcast(values, builder.add(offset, position))
            for column, place in zip(columns, chain.from_iterable(row_places), strict=True):
                builder.store(code.multiply_add(value, column, builder.load(place)), place)

    unrolled = builder.udiv(depth, index(UNROLLED))
    with cgutils.for_range(builder, unrolled, intp=unrolled.type) as loop:
        start = builder.mul(loop.index, index(UNROLLED))
        first_load = builder.mul(loop.index, index(UNROLLED // together))
        for step in range(0, UNROLLED, together):
            for number, columns in enumerate(load(builder.add(first_load, index(step // together)), together)):
                add(builder.add(start, index(step + number)), columns)
    start = builder.mul(unrolled, index(UNROLLED))
    with cgutils.for_range(builder, builder.sub(depth, start), intp=unrolled.type) as loop:
        position = builder.add(start, loop.index)
        loaded = load(builder.udiv(position, index(together)), together)
        if together == 2:
            odd = builder.trunc(position, ir.IntType(1))
            loaded = [[builder.select(odd, second, first) for first, second in zip(*loaded, strict=True)]]
        add(position, loaded[0])


@intrinsic  # type: ignore[untyped-decorator]
def _zeros(_typing: Any) -> tuple[Any, Codegen]:
    """Return the address of as many int64 zeros as a tile has rows."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        zeros = cgutils.global_constant(builder, "zeros", ir.Constant(ir.ArrayType(LONG, LARGEST_TILE), [0] * LARGEST_TILE))
        return builder.ptrtoint(zeros, LONG)

    return types.int64(), codegen


def sums_of(vectors: int, started: int, panels: int = 1) -> Any:
    """Return the compiled function that writes ``start + values @ panel`` for a tile of rows and a panel of `vectors` vectors.

    Only the first `started` vectors have a start; the others start from zero. The function takes, as numbers and addresses:
    the storage of the panel and the number of rows; start, start_offsets, block: float32 numbers, where each row's begin,
    int64, and the numbers from vector to vector; values, value_offsets, depth: rows of `depth` numbers, of `rows_of_product`,
    and where each begins; panel; sums, width: where the first row is written, and the numbers from row to row. panels: 1, or 2 for a
    tile of one row and two panels of floating-point weights; the sums of the second panel are written like those of a second row.
    """

    @vector_code
    def tile(
        code: Vectors,
        storage: ir.Value,
        rows: ir.Value,
        start: ir.Value,
        start_offsets: ir.Value,
        block: ir.Value,
        values: ir.Value,
        value_offsets: ir.Value,
        depth: ir.Value,
        panel: ir.Value,
        sums: ir.Value,
        width: ir.Value,
    ) -> None:
        builder = code.builder
        start_at, values_at, sums_at = (code.pointer(address, FLOAT) for address in (start, values, sums))
        starts, begins = (code.pointer(address, LONG) for address in (start_offsets, value_offsets))
        zero = code.constant(0.0)

        def start_row(row: int, number: int = 0) -> list[ir.Value]:
            first = builder.add(builder.load(builder.gep(starts, [index(row)])), index(number * LANES))
            blocks = [builder.add(first, builder.mul(block, index(vector))) for vector in range(started)]
            return [code.load(start_at, at) for at in blocks] + [zero] * (vectors - started)

        def sum_int8(offsets: Sequence[ir.Value]) -> list[list[ir.Value]]:
            products = emit_int8_products(code, values_at, offsets, panel, depth, vectors)
            return [
                [builder.fadd(value, product) for value, product in zip(start_row(row), row_products, strict=True)]
                for row, row_products in enumerate(products)
            ]

        def sum_floats(offsets: Sequence[ir.Value], stored: int) -> list[list[ir.Value]]:
            places = [
                [[code.variable(value) for value in start_row(row, number)] for row in range(len(offsets))]
                for number in range(panels)
            ]
            _emit_products(code, places, values_at, offsets, panel, depth, stored)
            return [[builder.load(place) for place in row_places] for panel_places in places for row_places in panel_places]

        def emit(stored: int, count: int) -> None:
            offsets = [builder.load(builder.gep(begins, [index(row)])) for row in range(count)]
            totals = sum_int8(offsets) if stored == INT8 else sum_floats(offsets, stored)
            for row, row_totals in enumerate(totals):
                for vector, total in enumerate(row_totals):
                    at = builder.add(builder.mul(width, index(row)), index(vector * LANES))
                    code.store(total, sums_at, at)

        storages, largest = ((FLOAT32, BFLOAT16, INT8), max_rows(vectors)) if panels == 1 else ((FLOAT32, BFLOAT16), 1)
        sizes = range(1, largest + 1)
        for_each_case(
            builder,
            storage,
            storages,
            lambda stored: for_each_case(builder, rows, sizes, lambda count: emit(stored, count)),
        )

    @inner
    def sums(*arguments: int) -> None:
        tile(*arguments)

    return sums


sums_of_4 = sums_of(4, 4)
MAX_ROWS = max_rows(VECTORS)


@inner
def tile_rows(rows: int, largest: int) -> int:
    """Return the rows of the next tile, so that all tiles of `rows` rows have about the same size."""
    tiles = (rows + largest - 1) // largest
    return (rows + tiles - 1) // tiles


@inner
def product(
    storage: int, values: int, offsets: int, rows: int, depth: int, panels: int, bias: int, out: int, width: int
) -> None:
    """Write ``values @ weight + bias``, (rows, width).

    values, offsets: rows of `depth` numbers, of `rows_of_product`, and where each begins, int64; panels: of `pack_columns`;
    bias: of `pack_bias`.
    """
    panel_bytes = VECTORS * vector_bytes(storage, depth)
    for first in range(0, rows, ROWS_IN_CACHE):
        end = min(first + ROWS_IN_CACHE, rows)
        for panel in range(width // PANEL_COLUMNS):
            column = FLOAT_BYTES * PANEL_COLUMNS * panel
            row = first
            while row < end:
                count = tile_rows(end - row, MAX_ROWS)
                sums_of_4(
                    *(storage, count, bias + column, _zeros(), LANES, values, offsets + LONG_BYTES * row, depth),
                    *(panels + panel_bytes * panel, out + FLOAT_BYTES * width * row + column, width),
                )
                row += count


@inner
def tile_memory(rows: int, width: int, memory: int) -> tuple[int, int, int, int]:
    """Return where each row of `width` numbers begins, memory for the sums of a tile and for quantized rows, and where the scratch
    memory goes on."""
    sums = memory + aligned(LONG_BYTES * rows)
    begins = longs(memory, rows)
    for row in range(rows):
        begins[row] = row * width
    quantized = sums + TILE_BYTES
    return memory, sums, quantized, quantized + quantized_bytes(rows, width)


@inner
def vector_bytes(storage: int, depth: int) -> int:
    """Return the bytes of one vector of a panel. bfloat16 weights are stored in pairs of steps."""
    if storage == INT8:
        return int8_vector_bytes(depth)
    return depth * LANES * FLOAT_BYTES if storage == FLOAT32 else (depth + depth % 2) * LANES * FLOAT_BYTES // 2


@inner
def padded_width(hidden: int) -> int:
    return (hidden + LANES - 1) // LANES * LANES
