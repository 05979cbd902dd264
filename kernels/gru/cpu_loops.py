"""The GRU's loop over the steps of a batch, compiled for the CPU.

A tile is LANES units of a few rows. With the reset after the product, it is the gate inputs of a step plus the products of the
hidden state, for all gates of these units, and then their new hidden state. With the reset before the product, the tiles of a
step first compute the reset and update gates of all units, and then the new gate, whose product takes the reset hidden state.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.compiled import Compiled, inner
from kernels.cpu.gated import GatedArguments
from kernels.cpu.gated_loops import GatedStep, gated_loop, tiles_of
from kernels.cpu.launch import BatchArguments, OutputArrays, RowStates
from kernels.cpu.products import vector_bytes
from kernels.cpu.vectors import FLOAT, FLOAT_BYTES, LANES, LONG, Vectors, index, vector_code

BLOCKS = 3
RESET_AND_UPDATE = 2
"""Gates that a tile computes together with the reset before the product. The new gate follows in tiles of its own."""


@vector_code
def update_hidden(
    code: Vectors,
    rows: ir.Value,
    gates: ir.Value,
    new_inputs: ir.Value,
    offsets: ir.Value,
    bias: ir.Value,
    before: ir.Value,
    after: ir.Value,
    width: ir.Value,
) -> None:
    """Write the new hidden state of LANES units of each row of a tile, with the reset after the product.

    gates: (rows, BLOCKS, LANES) float32, the reset and update gates before their activation and the product of the new gate
    without its bias; new_inputs, offsets: the inputs of the new gate and where each row's begin, int64; bias: of the product of
    the new gate; before, after: rows with `width` numbers from row to row. All but numbers are addresses.
    """
    builder = code.builder
    offsets_at = code.pointer(offsets, LONG)
    gates_at, inputs_at, bias_at, before_at, after_at = (
        code.pointer(address, FLOAT) for address in (gates, new_inputs, bias, before, after)
    )
    recurrent_bias = code.load(bias_at, index(0))
    with cgutils.for_range(builder, rows, intp=rows.type) as loop:
        first, row_at = builder.mul(loop.index, index(BLOCKS * LANES)), builder.mul(loop.index, width)
        reset, update, product = (code.load(gates_at, builder.add(first, index(block * LANES))) for block in range(BLOCKS))
        new_input = code.load(inputs_at, builder.load(builder.gep(offsets_at, [loop.index])))
        reset_product = builder.fdiv(builder.fadd(product, recurrent_bias), code.sigmoid_divisor(reset))
        new = code.tanh(builder.fadd(new_input, reset_product))
        code.store(_emit_mix(code, code.load(before_at, row_at), new, update), after_at, row_at)


@vector_code
def reset_hidden(
    code: Vectors, rows: ir.Value, gates: ir.Value, before: ir.Value, updates: ir.Value, reset_states: ir.Value, width: ir.Value
) -> None:
    """Write the update gates of a tile, before their activation, and its hidden state times the reset gate.

    gates: (rows, RESET_AND_UPDATE, LANES) float32, before their activation; before, updates, reset_states: rows with `width`
    numbers from row to row. All but numbers are addresses.
    """
    builder = code.builder
    gates_at, before_at, updates_at, reset_at = (code.pointer(address) for address in (gates, before, updates, reset_states))
    with cgutils.for_range(builder, rows, intp=rows.type) as loop:
        first, row_at = builder.mul(loop.index, index(RESET_AND_UPDATE * LANES)), builder.mul(loop.index, width)
        reset, update = code.load(gates_at, first), code.load(gates_at, builder.add(first, index(LANES)))
        code.store(builder.fdiv(code.load(before_at, row_at), code.sigmoid_divisor(reset)), reset_at, row_at)
        code.store(update, updates_at, row_at)


@vector_code
def mix_hidden(
    code: Vectors, rows: ir.Value, gates: ir.Value, before: ir.Value, updates: ir.Value, after: ir.Value, width: ir.Value
) -> None:
    """Write the new hidden state of LANES units of each row of a tile.

    gates: (rows, LANES) float32, the new gate before its activation; before, updates, after: rows with `width` numbers from row
    to row, the updates before their activation. All but numbers are addresses.
    """
    builder = code.builder
    gates_at, before_at, updates_at, after_at = (code.pointer(address) for address in (gates, before, updates, after))
    with cgutils.for_range(builder, rows, intp=rows.type) as loop:
        row_at = builder.mul(loop.index, width)
        new = code.tanh(code.load(gates_at, builder.mul(loop.index, index(LANES))))
        mixed = _emit_mix(code, code.load(before_at, row_at), new, code.load(updates_at, row_at))
        code.store(mixed, after_at, row_at)


def _emit_mix(code: Vectors, hidden: ir.Value, new: ir.Value, update: ir.Value) -> ir.Value:
    """Return ``(1 - z) * new + z * hidden`` for the update gate z, with one division."""
    build = code.builder
    return build.fadd(new, build.fdiv(build.fsub(hidden, new), code.sigmoid_divisor(update)))


@inner
def _finish_all(step: GatedStep, sums: int, rows: int, column: int, place: int, gate_offsets: int) -> None:
    new_inputs, bias = step.gates + column + FLOAT_BYTES * RESET_AND_UPDATE * step.block, step.weights.recurrent_bias + column
    update_hidden(rows, sums, new_inputs, gate_offsets, bias, step.before + place, step.after + place, step.width)


@inner
def _finish_reset_and_update(step: GatedStep, sums: int, rows: int, _column: int, place: int, _gate_offsets: int) -> None:
    updates = step.own + place
    reset_hidden(rows, sums, step.before + place, updates, updates + step.array_bytes, step.width)


@inner
def _finish_new(step: GatedStep, sums: int, rows: int, _column: int, place: int, _gate_offsets: int) -> None:
    mix_hidden(rows, sums, step.before + place, step.own + place, step.after + place, step.width)


_all_tiles = tiles_of(BLOCKS, RESET_AND_UPDATE, _finish_all)
_reset_and_update_tiles = tiles_of(RESET_AND_UPDATE, RESET_AND_UPDATE, _finish_reset_and_update)
_new_tiles = tiles_of(1, 1, _finish_new)


@inner
def _advance(step: GatedStep) -> None:
    """Advance the running rows by a step. The arrays of the family are update gates, and hidden states times the reset gate."""
    recurrent = step.weights.recurrent
    if step.weights.recurrent_bias:
        _all_tiles(step, step.gates, step.before, recurrent)
    else:
        _reset_and_update_tiles(step, step.gates, step.before, recurrent)
        panel_bytes = RESET_AND_UPDATE * vector_bytes(step.weights.storage, step.weights.hidden)
        new_inputs = step.gates + FLOAT_BYTES * RESET_AND_UPDATE * step.block
        _new_tiles(step, new_inputs, step.own + step.array_bytes, recurrent + panel_bytes * (step.width // LANES))


_loop = gated_loop(BLOCKS, 2, _advance)


@Compiled
def run(
    part: int,
    parts: int,
    call: BatchArguments,
    data: int,
    number_bytes: int,
    weights: GatedArguments,
    hidden: RowStates,
    outputs: OutputArrays,
    scratch: int,
) -> None:
    """Encode part `part` of `parts` of a batch's rows, as in `gated_loop`."""
    _loop(part, parts, call, data, number_bytes, weights, hidden, RowStates(0, 0, 0, 0), outputs, scratch)
