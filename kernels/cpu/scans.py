"""The recurrences of the SRU and the QRNN over the steps of a row, after its gate inputs.

The early blocks decide the cell: candidate, forget gate and, in ifo-pooling, input gate. The late blocks decide the hidden
vector alone: the SRU's reset gate and skip, the QRNN's output gate. Without outputs of every step, a row needs the late blocks
of its last step only.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.compiled import inner
from kernels.cpu.storage import FLOAT32
from kernels.cpu.vectors import FLOAT, LANES, STORED, Vectors, for_each_case, index, vector_code
from kernels.scan.forms import CANDIDATES, FORMS, IDENTITY, POSITIVE, TANH, ScanForm


def _positive(code: Vectors, candidate: ir.Value) -> ir.Value:
    above = code.builder.fcmp_ordered(">=", candidate, code.constant(0.0))
    return code.builder.select(above, code.builder.fadd(candidate, code.constant(0.5)), code.sigmoid(candidate))


ACTIVATED: dict[str, Callable[[Vectors, ir.Value], ir.Value]] = {IDENTITY: lambda _, candidate: candidate, POSITIVE: _positive}
"""The activations of a candidate besides tanh."""


@vector_code
def scan(
    code: Vectors,
    form: ir.Value,
    quiet: ir.Value,
    steps: ir.Value,
    units: ir.Value,
    early: ir.Value,
    early_step: ir.Value,
    late: ir.Value,
    late_step: ir.Value,
    skip: ir.Value,
    skip_step: ir.Value,
    factors: ir.Value,
    width: ir.Value,
    scale: ir.Value,
    cell: ir.Value,
) -> None:
    """Advance the cells of a row by `steps` steps, and write the hidden vectors of all steps but the first `quiet`.

    form: a number of FORMS; units: a multiple of LANES; early: blocks of the first step, `units` numbers each, of which the
    first is replaced by the hidden vector; late: the gate of the hidden vector in the step `quiet`; skip: of the same step;
    early_step, late_step, skip_step: from step to step; factors: of the old cell in the forget gate and, `width` numbers
    later, in the reset gate; scale: one number, of the skip; cell: (units,), which changes. All but numbers are addresses of
    float32 numbers.
    """
    builder = code.builder
    arrays = [code.pointer(address, FLOAT) for address in (early, late, skip, factors, cell)]

    def emit(number: int) -> None:
        row = _Row(code, FORMS[number], units, width, code.pointer(scale, FLOAT), *arrays)
        with cgutils.for_range(builder, quiet, intp=quiet.type) as loop:
            row.emit_cells(builder.mul(loop.index, early_step))
        with cgutils.for_range(builder, builder.sub(steps, quiet), intp=quiet.type) as loop:
            first = builder.mul(builder.add(loop.index, quiet), early_step)
            row.emit_hidden(first, builder.mul(loop.index, late_step), builder.mul(loop.index, skip_step))

    for_each_case(builder, form, range(len(FORMS)), emit)


class _Row:
    """Emits the steps of a row. Offsets are in numbers."""

    def __init__(
        self,
        code: Vectors,
        form: ScanForm,
        units: ir.Value,
        width: ir.Value,
        scale: ir.Value,
        early: ir.Value,
        late: ir.Value,
        skip: ir.Value,
        factors: ir.Value,
        cell: ir.Value,
    ) -> None:
        self._code, self._form, self._units, self._width = code, form, units, width
        self._early, self._late, self._skip, self._factors, self._cell = early, late, skip, factors, cell
        self._scale = code.broadcast(scale, index(0)) if form.skip else None

    def emit_cells(self, early: ir.Value) -> None:
        """Advance the cells by one step. early: where its early blocks begin."""
        build = self._code.builder
        with cgutils.for_range(build, build.udiv(self._units, index(LANES)), intp=early.type) as loop:
            unit = build.mul(loop.index, index(LANES))
            cell = self._code.load(self._cell, unit)
            self._code.store(self._new_cell(early, unit, cell), self._cell, unit)

    def emit_hidden(self, early: ir.Value, late: ir.Value, skip: ir.Value) -> None:
        """Advance the cells by one step and write its hidden vector in the place of the candidate."""
        build = self._code.builder
        with cgutils.for_range(build, build.udiv(self._units, index(LANES)), intp=early.type) as loop:
            unit = build.mul(loop.index, index(LANES))
            before = self._code.load(self._cell, unit)
            cell = self._new_cell(early, unit, before)
            self._code.store(cell, self._cell, unit)
            hidden = self._hidden(build.add(late, unit), build.add(skip, unit), unit, before, cell)
            self._code.store(hidden, self._early, build.add(early, unit))

    def _new_cell(self, early: ir.Value, unit: ir.Value, cell: ir.Value) -> ir.Value:
        code, build = self._code, self._code.builder
        offsets = [build.add(build.add(early, unit), build.mul(self._units, index(block))) for block in range(self._form.early)]
        candidate, forget, *others = [code.load(self._early, offset) for offset in offsets]
        activation = IDENTITY if self._form.sru else CANDIDATES[self._form.activation]
        if activation != TANH:
            candidate = ACTIVATED[activation](code, candidate)
            kept = build.fdiv(build.fsub(cell, candidate), code.sigmoid_divisor(self._with_cell(forget, 0, unit, cell)))
            return build.fadd(candidate, kept)
        numerator, divisor = code.tanh_fraction(candidate)
        forget_divisor, one = code.sigmoid_divisor(forget), code.constant(1.0)
        if others:
            added = build.fdiv(numerator, build.fmul(divisor, code.sigmoid_divisor(others[0])))
            return code.multiply_add(build.fdiv(one, forget_divisor), cell, added)
        # One division for both quotients. It does not depend on the cell, so the next step does not wait for it.
        inverse = build.fdiv(one, build.fmul(divisor, forget_divisor))
        new = build.fmul(build.fmul(numerator, forget_divisor), inverse)
        return code.multiply_add(build.fmul(divisor, inverse), build.fsub(cell, new), new)

    def _hidden(self, late: ir.Value, skip: ir.Value, unit: ir.Value, before: ir.Value, cell: ir.Value) -> ir.Value:
        code, build, form = self._code, self._code.builder, self._form
        if not form.late:
            return cell
        divisor = code.sigmoid_divisor(self._with_cell(code.load(self._late, late), 1, unit, before))
        inner = code.tanh(cell) if form.tanh else cell
        if self._scale is None:
            return build.fdiv(inner, divisor)
        unchanged = build.fmul(code.load(self._skip, skip), self._scale)
        return build.fadd(unchanged, build.fdiv(build.fsub(inner, unchanged), divisor))

    def _with_cell(self, gate: ir.Value, number: int, unit: ir.Value, cell: ir.Value) -> ir.Value:
        if not self._form.own_cell:
            return gate
        build = self._code.builder
        factor = self._code.load(self._factors, build.add(unit, build.mul(self._width, index(number))))
        return self._code.multiply_add(factor, cell, gate)


@inner
def stored_bytes(storage: int) -> int:
    """Return the bytes of a stored number of a row that is gathered."""
    return 4 if storage == FLOAT32 else 2


@vector_code
def add_stored(code: Vectors, storage: ir.Value, source: ir.Value, count: ir.Value, base: ir.Value, target: ir.Value) -> None:
    """Write ``base + source`` to `target`. source: `count` stored numbers; base, target: whole vectors of float32, which may be the
    same."""
    builder = code.builder
    base_at, target_at = code.pointer(base, FLOAT), code.pointer(target, FLOAT)

    def emit(stored: int) -> None:
        source_at = code.pointer(source, STORED[stored])

        def add(values: ir.Value, at: ir.Value) -> None:
            code.store(builder.fadd(code.load(base_at, at), values), target_at, at)

        code.for_each_vector(source_at, count, add, stored)

    for_each_case(builder, storage, tuple(STORED), emit)
