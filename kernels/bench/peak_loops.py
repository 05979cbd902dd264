"""Compiled loops at the peak of a processor: multiply-adds between registers, and reads of an array.

They use the vectors of the CPU kernels. Imports Numba, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from kernels.cpu.compiled import Codegen, inner, llvm_code
from kernels.cpu.vectors import LANES, REGISTERS, Vectors, index

CHAINS = 3 * REGISTERS // 4
"""Vectors that are multiplied and added independently. A processor starts several before the first has ended."""
CHAIN_NUMBERS = CHAINS * LANES
PIECE = REGISTERS // 2 * LANES
"""Numbers that are read without a branch between them."""


@llvm_code
def _multiply_adds(_typing: Any, repetitions: Any, numbers: Any) -> tuple[Any, Codegen]:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        repetitions, numbers = arguments
        code = Vectors(builder)
        pointer = code.pointer(numbers)
        places = [code.variable(code.load(pointer, index(chain * LANES))) for chain in range(CHAINS)]
        factor, term = (code.broadcast(pointer, index(CHAIN_NUMBERS + position)) for position in (0, 1))
        with cgutils.for_range(builder, repetitions, intp=repetitions.type):
            for place in places:
                builder.store(code.multiply_add(builder.load(place), factor, term), place)
        for chain, place in enumerate(places):
            code.store(builder.load(place), pointer, index(chain * LANES))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@llvm_code
def _read(_typing: Any, repetitions: Any, numbers: Any, pieces: Any, sums: Any) -> tuple[Any, Codegen]:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        repetitions, numbers, pieces, sums = arguments
        code = Vectors(builder)
        pointer, sums_pointer = code.pointer(numbers), code.pointer(sums)
        at = [index(first) for first in range(0, PIECE, LANES)]
        places = [code.variable(code.constant(0.0)) for _ in at]
        with cgutils.for_range(builder, repetitions, intp=repetitions.type):  # noqa: SIM117 # two loops
            with cgutils.for_range(builder, pieces, intp=pieces.type) as loop:
                piece = builder.mul(loop.index, index(PIECE))
                for offset, place in zip(at, places, strict=True):
                    number = code.load(pointer, builder.add(piece, offset))
                    builder.store(builder.fadd(builder.load(place), number), place)
        for offset, place in zip(at, places, strict=True):
            code.store(builder.load(place), sums_pointer, offset)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@inner
def multiply_adds(repetitions: int, numbers: int) -> None:
    """Replace each of CHAIN_NUMBERS numbers by ``number * factor + term``, `repetitions` times.

    numbers: their address; factor and term are the two numbers after them.
    """
    _multiply_adds(repetitions, numbers)


@inner
def read(repetitions: int, numbers: int, pieces: int, sums: int) -> None:
    """Read `pieces` times PIECE numbers, `repetitions` times, and write PIECE sums: every PIECE-th number is in one sum."""
    _read(repetitions, numbers, pieces, sums)
