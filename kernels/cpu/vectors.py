"""Vectors of float32 in LLVM's intermediate representation, for the innermost loops of the CPU kernels.

Numba compiles plain loops well, but it does not keep a tile of sums in registers across a loop. The tiles are therefore written
as LLVM operations on vectors of LANES numbers, which LLVM turns into the instructions of any processor. Values, sums and cells
are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from kernels.cpu.compiled import Codegen, compiled_target
from kernels.cpu.storage import BFLOAT16, FLOAT16, FLOAT32

FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT_BYTES, LONG_BYTES = 4, 8
STORED = {FLOAT32: FLOAT, BFLOAT16: SHORT, FLOAT16: HALF}
"""The LLVM type of a stored weight."""
STORED_PANEL = {FLOAT32: FLOAT, BFLOAT16: INT}
"""The same in a panel of floating-point weights, where bfloat16 weights are stored in pairs."""

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Their sum is ln 2; the product of LN2_HIGH and a small whole number is exact in float32."""
EXP_MINUS_1 = (0.0013926250394433737, 0.00836323294788599, 0.04166655242443085, 0.16666576266288757, 0.5)
"""p(r) of exp(r) - 1 = r + r^2 p(r) for |r| <= ln(2) / 2, highest power first. The relative error is below 2.6e-8."""
HALF_ERFC_SCALE = 0.36
HALF_ERFC = (
    0.03466318905149251,
    -0.1866296500009878,
    0.3468909461665262,
    -0.264889721758669,
    0.24453091376344824,
    0.01311305638474017,
    0.11129983642184481,
    0.09933562590608563,
    0.1016858023461092,
)
"""p(t) of erfc(z) / 2 = exp(-z^2) t p(t) with t = 1 / (1 + HALF_ERFC_SCALE z), highest power first. Least squares with weights for the
largest relative error, which is 3.5e-9 for 0 <= z <= 5.6."""
MAX_EXPONENT = 30.0
"""exp(30) is 1e13: sigmoid and tanh are 0 or 1 in float32 beyond it, and no product of two such numbers overflows."""


TARGET = compiled_target()
LANES, REGISTERS = TARGET.lanes, TARGET.registers
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)


def index(value: int) -> ir.Constant:
    return ir.Constant(LONG, value)


class Vectors:
    """Emits operations on vectors at the position of a builder."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(VECTOR, [ir.Constant(FLOAT, value)] * LANES)

    def pointer(self, address: ir.Value, element: ir.Type = FLOAT) -> ir.Value:
        return self.builder.inttoptr(address, element.as_pointer())

    def variable(self, value: ir.Value | None = None) -> ir.Value:
        """Return a variable, which LLVM keeps in a register."""
        place = cgutils.alloca_once(self.builder, VECTOR if value is None else value.type)
        if value is not None:
            self.builder.store(value, place)
        return place

    def load(self, pointer: ir.Value, offset: ir.Value) -> ir.Value:
        """Return LANES numbers from `offset` on."""
        return self._load(pointer, offset, VECTOR, FLOAT_BYTES)

    def load_ints(self, pointer: ir.Value, offset: ir.Value) -> ir.Value:
        """Return LANES 32-bit integers from `offset` on."""
        return self._load(pointer, offset, INTS, FLOAT_BYTES)

    def load_bytes(self, pointer: ir.Value, offset: ir.Value, count: int) -> ir.Value:
        """Return LANES x `count` bytes from `offset` on."""
        return self._load(pointer, offset, ir.VectorType(BYTE, LANES * count), 1)

    def load_stored(self, pointer: ir.Value, offset: ir.Value, storage: int) -> ir.Value:
        """Return LANES weights from `offset` on as float32."""
        if storage == FLOAT32:
            return self.load(pointer, offset)
        return self._as_floats(self._load(pointer, offset, ir.VectorType(STORED[storage], LANES), 2), storage)

    def load_pairs(self, pointer: ir.Value, offset: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the first and the second bfloat16 numbers of LANES pairs as float32."""
        words = self._load(pointer, offset, INTS, FLOAT_BYTES)
        first = self.builder.shl(words, ir.Constant(INTS, [16] * LANES))
        second = self.builder.and_(words, ir.Constant(INTS, [0xFFFF0000] * LANES))
        return self.builder.bitcast(first, VECTOR), self.builder.bitcast(second, VECTOR)

    def load_masked(self, pointer: ir.Value, offset: ir.Value, storage: int, mask: ir.Value) -> ir.Value:
        """Return the weights that a mask selects, from `offset` on, as float32, and zeros elsewhere. Reads nothing
        else."""
        vector = ir.VectorType(STORED[storage], LANES)
        address = self.builder.bitcast(self.builder.gep(pointer, [offset]), vector.as_pointer())
        kind = {FLOAT32: "f32", BFLOAT16: "i16", FLOAT16: "f16"}[storage]
        name = f"llvm.masked.load.v{LANES}{kind}.p0"
        signature = ir.FunctionType(vector, [vector.as_pointer(), INT, MASK, vector])
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        align = ir.Constant(INT, FLOAT_BYTES if storage == FLOAT32 else 2)
        return self._as_floats(self.builder.call(function, [address, align, mask, ir.Constant(vector, None)]), storage)

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """Return the mask of the first `count` elements."""
        counts = self.in_every_lane(self.builder.trunc(count, INT))
        return self.builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), counts)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return the larger numbers of two vectors, element by element. The result is not a number where either is not."""
        return self._call("llvm.maximum", a, b)

    def absolute(self, value: ir.Value) -> ir.Value:
        return self._call("llvm.fabs", value)

    def round(self, value: ir.Value) -> ir.Value:
        """Return the nearest whole numbers. Halves are rounded to even numbers."""
        return self._call("llvm.rint", value)

    def largest(self, value: ir.Value) -> ir.Value:
        """Return the largest number of a vector. It is not a number if any is not."""
        return self.call(f"llvm.vector.reduce.fmaximum.v{LANES}f32", FLOAT, value)

    def store(self, value: ir.Value, pointer: ir.Value, offset: ir.Value) -> None:
        place = self.builder.bitcast(self.builder.gep(pointer, [offset]), value.type.as_pointer())
        # Arrays are aligned to their elements, not to whole vectors.
        self.builder.store(value, place).align = 1 if value.type.element != FLOAT else FLOAT_BYTES

    def in_every_lane(self, number: ir.Value) -> ir.Value:
        """Return a vector of copies of a 32-bit number."""
        undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))

    def broadcast(self, pointer: ir.Value, offset: ir.Value) -> ir.Value:
        """Return a vector of copies of the number at `offset`."""
        return self.in_every_lane(self.builder.load(self.builder.gep(pointer, [offset])))

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a * b + c, rounded once."""
        return self._call("llvm.fma", a, b, c)

    def for_each_vector(
        self, pointer: ir.Value, count: ir.Value, emit: Callable[[ir.Value, ir.Value], None], storage: int = FLOAT32
    ) -> None:
        """Emit a loop over `count` stored numbers, LANES at a time as float32, with zeros after the last. `emit` emits the code for a
        vector and its offset."""
        build = self.builder
        whole = build.udiv(count, index(LANES))
        with cgutils.for_range(build, whole, intp=whole.type) as loop:
            offset = build.mul(loop.index, index(LANES))
            emit(self.load_stored(pointer, offset, storage), offset)
        offset = build.mul(whole, index(LANES))
        rest = build.sub(count, offset)
        with build.if_then(build.icmp_signed(">", rest, index(0))):
            emit(self.load_masked(pointer, offset, storage, self.first_lanes(rest)), offset)

    def call(self, name: str, returned: ir.Type, *arguments: ir.Value) -> ir.Value:
        """Call a function of LLVM by its whole name."""
        signature = ir.FunctionType(returned, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), arguments)

    def sigmoid_divisor(self, x: ir.Value) -> ir.Value:
        """Return 1 + exp(-x). Its inverse is the sigmoid of x."""
        scale, rest = self._exp(self.builder.fneg(x))
        return self.builder.fadd(self.multiply_add(scale, rest, scale), self.constant(1.0))

    def tanh_fraction(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the numerator and the divisor of tanh(x): exp(2x) - 1 and exp(2x) + 1. Exact to a few bits also
        near 0."""
        scale, rest = self._exp(self.builder.fadd(x, x))
        numerator = self.multiply_add(scale, rest, self.builder.fsub(scale, self.constant(1.0)))
        return numerator, self.builder.fadd(numerator, self.constant(2.0))

    def sigmoid(self, x: ir.Value) -> ir.Value:
        return self.builder.fdiv(self.constant(1.0), self.sigmoid_divisor(x))

    def tanh(self, x: ir.Value) -> ir.Value:
        return self.builder.fdiv(*self.tanh_fraction(x))

    def gelu(self, x: ir.Value) -> ir.Value:
        """Return x times the normal distribution function of x: max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2."""
        build, limit = self.builder, self.constant(MAX_EXPONENT)
        size = self.absolute(x)
        size = build.select(build.fcmp_ordered(">", size, limit), limit, size)
        z = build.fmul(size, self.constant(0.5**0.5))
        t = build.fdiv(self.constant(1.0), self.multiply_add(z, self.constant(HALF_ERFC_SCALE), self.constant(1.0)))
        polynomial = self.constant(HALF_ERFC[0])
        for coefficient in HALF_ERFC[1:]:
            polynomial = self.multiply_add(polynomial, t, self.constant(coefficient))
        scale, rest = self._exp(build.fneg(build.fmul(z, z)))
        tail = build.fmul(build.fmul(size, t), build.fmul(polynomial, self.multiply_add(scale, rest, scale)))
        return build.fsub(self.maximum(x, self.constant(0.0)), tail)

    def _exp(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return a power of two p and a number r with exp(x) = p * r + p. |x| is limited to MAX_EXPONENT."""
        build = self.builder
        limit = self.constant(MAX_EXPONENT)
        x = build.select(build.fcmp_ordered(">", x, limit), limit, x)
        x = build.select(build.fcmp_ordered("<", x, build.fneg(limit)), build.fneg(limit), x)
        whole = self.round(build.fmul(x, self.constant(LOG2_E)))
        rest = self.multiply_add(whole, self.constant(-LN2_HIGH), x)
        rest = self.multiply_add(whole, self.constant(-LN2_LOW), rest)
        polynomial = self.constant(EXP_MINUS_1[0])
        for coefficient in EXP_MINUS_1[1:]:
            polynomial = self.multiply_add(polynomial, rest, self.constant(coefficient))
        exponent = build.add(build.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
        scale = build.bitcast(build.shl(exponent, ir.Constant(INTS, [23] * LANES)), VECTOR)
        return scale, self.multiply_add(build.fmul(rest, rest), polynomial, rest)

    def _as_floats(self, stored: ir.Value, storage: int) -> ir.Value:
        if storage == FLOAT32:
            return stored
        if storage == FLOAT16:
            return self.builder.fpext(stored, VECTOR)
        # bfloat16 is the upper half of a float32.
        bits = self.builder.shl(self.builder.zext(stored, INTS), ir.Constant(INTS, [16] * LANES))
        return self.builder.bitcast(bits, VECTOR)

    def _load(self, pointer: ir.Value, offset: ir.Value, vector: ir.Type, align: int) -> ir.Value:
        loaded = self.builder.load(self.builder.bitcast(self.builder.gep(pointer, [offset]), vector.as_pointer()))
        loaded.align = align
        return loaded

    def _call(self, name: str, *arguments: ir.Value) -> ir.Value:
        """Call a function of LLVM from vectors to a vector."""
        return self.call(f"{name}.v{LANES}f32", VECTOR, *arguments)


def for_each_case(builder: ir.IRBuilder, value: ir.Value, cases: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emit a switch: the code of the case that equals `value` runs. `emit` emits the code of a case."""
    end = builder.append_basic_block("end_of_cases")
    switch = builder.switch(value, end)
    for case in cases:
        block = builder.append_basic_block(f"case_{case}")
        switch.add_case(index(case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(end)
    builder.position_at_end(end)


def vector_code(emit: Callable[..., None]) -> Any:
    """Return a function for compiled code that is written in operations on vectors. emit: from (vectors, *arguments); all are int64."""

    @wraps(emit)  # the names of the arguments
    def function(_typing: Any, *arguments: Any) -> tuple[Any, Codegen]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
            emit(Vectors(builder), *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * len(arguments)), codegen

    return intrinsic(function)


@intrinsic  # type: ignore[untyped-decorator]
def pointer_at(_typing: Any, address: Any) -> tuple[Any, Codegen]:
    """Return the pointer for an address, for `numba.carray`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen
