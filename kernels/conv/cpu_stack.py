"""The launcher of `cpu_loops.stack`: a stack of convolutions, or a single one, in one call for a ragged batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_

import numpy as np
import torch
from torch import Tensor

from kernels.conv.geometry import ALL_STEPS, needed_steps
from kernels.conv.layer_by_layer import keep_steps, stack_of, wants_only_last_step
from kernels.conv.types import GATED, ConvBlock, ConvState, ConvWeights
from kernels.cpu.conv_numbers import ACTIVATION_NUMBERS, BUFFERS, CallNumbers, LayerNumbers, MemorySizes
from kernels.cpu.launch import (
    ALIGNED_BYTES,
    FLOAT_BYTES,
    LONG_BYTES,
    aligned,
    as_floats,
    as_longs,
    empty_outputs,
    loops,
    output_arguments,
    updates_in_place,
)
from kernels.cpu.storage import STORAGES, as_stored_rows, panel_storage
from kernels.cpu.threads import most_in_a_part, part_count, run_in_parts
from kernels.embedding import embed
from kernels.launching import pack_once
from kernels.ragged import Encoded, Outputs, Ragged, Sizes, with_state_slots, without_sources

COPIED_FLOATS = 65536
"""Numbers of the windows of a product, which stay in the second-level cache."""
ROW_OPERATIONS = 2
"""Additions of a table row that take as long as a multiplication of a product."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """numbers: of a layer, without the fields of its block; arrays: what their addresses refer to."""

    numbers: LayerNumbers
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PackedStack:
    """The layers of a stack as the compiled loop takes them.

    blocks: what was packed; numbers: a `LayerNumbers` for each layer; outputs: of the widest layer; memory: scratch memory of a part
    without steps; operations: of an output step of each layer, as multiplications; arrays: what the addresses refer to.
    """

    blocks: tuple[ConvBlock, ...]
    numbers: array[int]
    outputs: int
    memory: MemorySizes
    operations: tuple[int, ...]
    arrays: tuple[Tensor, ...]


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Run one convolution. Shapes as in `kernels.conv.types`."""
    if state is not None and not _in_place(state):
        encoded: Encoded = with_state_slots(conv)(x, weights, state, want=want)
        return encoded
    if state is None and not weights.takes_ids:
        state = ConvState(x.data.new_zeros(x.rows, weights.left, x.data.shape[1]))
    encoded = _run(x, (ConvBlock((weights,)),), None if state is None else (state,), want)
    return replace(encoded, state=None if encoded.state is None else encoded.state[0])


def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
    """Run all blocks. Shapes as in `kernels.conv.stack`."""
    if states is not None and not all(map(_in_place, states)):
        return _layer_by_layer(x, blocks, states, want=want)
    encoded = _run(x, blocks, states, want)
    return replace(encoded, offsets=None) if keep_steps(blocks) else encoded


_layer_by_layer = stack_of(conv)


def _in_place(state: ConvState) -> bool:
    """Return whether the compiled loop can run from this state."""
    return updates_in_place(state) and (state.slots is None or state.left.dtype == torch.float32)


def _run(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, want: Outputs) -> Encoded:
    """Run all blocks in one call. The returned offsets belong to the output steps."""
    packed, first = _packed(blocks), blocks[0].layers[0]
    data = _input(x, first)
    states_after, calls, kept = _calls(blocks, states, want)
    steps, most, offsets, written = _output_steps(x, blocks)
    outputs = empty_outputs(Ragged(data.new_empty(steps[-1], 0), offsets), want, blocks[-1].outputs)
    operations = sum(count * each for count, each in zip(steps, packed.operations, strict=True))
    longest_part = most_in_a_part(most, part_count(x.rows, operations))
    memory = packed.memory._replace(table_rows=packed.memory.table_rows + data.shape[0], buffer=longest_part * packed.outputs)
    run_in_parts(
        loops("kernels.conv.cpu_loops").stack,
        (
            (offsets.data_ptr(), offsets.itemsize, x.rows, x.data.shape[0], 0),
            *(data.data_ptr(), data.itemsize, packed.numbers.buffer_info()[0], calls.buffer_info()[0], len(steps)),
            *(written.data_ptr(), output_arguments(outputs, blocks[-1].outputs), memory),
        ),
        x.rows,
        operations,
        _scratch_bytes(x.rows, memory),
    )
    del kept  # the addresses refer to it until here
    return Encoded(states_after, *outputs, offsets=written)


def _input(x: Ragged, first: ConvWeights) -> Tensor:
    """Return the input steps as float32, or ids if the first layer has tables."""
    if first.embedding is not None:
        return embed(x.data, first.embedding, torch.float32)
    if first.tables is not None:
        return x.data.contiguous()
    data = as_floats(x.data)
    return data.clone() if data.data_ptr() % FLOAT_BYTES else data  # distances from copied windows are whole numbers


def _output_steps(x: Ragged, blocks: Sequence[ConvBlock]) -> tuple[list[int], Sizes, Tensor, Tensor]:
    """Return the output steps of each layer, the most steps of each row after any layer, the offsets of the batch, and the offsets of
    the last layer's steps in int64."""
    lengths, steps, offsets = x.lengths, [x.data.shape[0]], x.offsets.contiguous()
    most = lengths
    for block in blocks:
        for layer in block.layers:
            if layer.keeps_steps:
                steps.append(steps[-1])
            else:
                lengths = layer.steps(lengths)
                most = np.maximum(most, lengths)
                steps.append(int(lengths.sum()))
    written = as_longs(offsets) if lengths is x.lengths else torch.from_numpy(np.append(0, lengths.cumsum()))
    return steps[1:], most, offsets, written


def _calls(
    blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, want: Outputs
) -> tuple[tuple[ConvState, ...] | None, array[int], list[Tensor]]:
    """Return the states after the call, the `CallNumbers` of each layer, and what their addresses refer to."""
    layers = [layer for block in blocks for layer in block.layers]
    numbers, kept = array("q"), list[Tensor]()
    if states is None:
        only_last = wants_only_last_step(blocks, states, want)
        for needed in needed_steps(layers) if only_last else [ALL_STEPS] * len(layers):
            numbers.extend(CallNumbers(0, 0, 0, 0, needed.count, needed.spacing))
        return None, numbers, []
    after = []
    for state in states:
        state_after, call, of_call = _state_of_call(state)
        after.append(state_after)
        numbers.extend(call)
        kept += of_call
    return tuple(after), numbers, kept


def _state_of_call(state: ConvState) -> tuple[ConvState, CallNumbers, tuple[Tensor, ...]]:
    """Return the state after a call that computes all steps, and what `_calls` returns for its layer."""
    if state.slots is None:
        before, left = as_floats(state.left), torch.empty(state.left.shape)
        return ConvState(left), CallNumbers(before.data_ptr(), 0, left.data_ptr(), 0), (before,)
    slots, cache = as_longs(state.slots), state.left.data_ptr()
    sources = slots if state.sources is None else as_longs(state.sources)
    return without_sources(state), CallNumbers(cache, sources.data_ptr(), cache, slots.data_ptr()), (slots, sources)


def _memory_sizes(layers: Sequence[LayerNumbers]) -> MemorySizes:
    """Return the scratch memory of a part without steps."""
    return MemorySizes(
        together=max(layer.together for layer in layers),
        table_rows=layers[0].left + layers[0].right,
        windows=max(layer.together * layer.width * layer.inputs for layer in layers),
        tile=max(layer.together * layer.columns for layer in layers),
        projected=max(layer.together * layer.projection_columns for layer in layers),
        buffer=0,
    )


def _scratch_bytes(rows: int, memory: MemorySizes) -> int:
    longs = 2 * (rows + 1) + 2 * memory.together + memory.table_rows
    floats = memory.windows + memory.tile + memory.projected + BUFFERS * memory.buffer
    return aligned(LONG_BYTES * longs + FLOAT_BYTES * floats) + (len(memory) + 1 + BUFFERS) * ALIGNED_BYTES


def _packed(blocks: Sequence[ConvBlock]) -> PackedStack:
    first = blocks[0].layers[0]
    packed: PackedStack | None = first.packed.get("cpu stack")
    if packed is None or not _same(packed.blocks, blocks):
        packed = first.packed["cpu stack"] = _pack(tuple(blocks))
    return packed


def _same(packed: Sequence[ConvBlock], blocks: Sequence[ConvBlock]) -> bool:
    """Return whether the blocks have the same layers, although the caller may have made them again."""
    return len(packed) == len(blocks) and all(map(_same_block, packed, blocks))


def _same_block(one: ConvBlock, other: ConvBlock) -> bool:
    return one is other or (
        len(one.layers) == len(other.layers)
        and all(map(is_, one.layers, other.layers))
        and one.projection is other.projection
        and (one.residual, one.activation) == (other.residual, other.activation)
    )


def _pack(blocks: tuple[ConvBlock, ...]) -> PackedStack:
    layers, arrays, operations = list[LayerNumbers](), list[Tensor](), list[int]()
    for block in blocks:
        for position, layer in enumerate(block.layers):
            packed = packed_layer(layer)
            if block.residual and position == len(block.layers) - 1:
                packed = _with_input(packed, block)
            layers.append(packed.numbers._replace(begins_block=int(position == 0)))
            arrays += packed.arrays
            depth = layer.shape[0] * (ROW_OPERATIONS if layer.tables is not None else layer.shape[1])
            operations.append(depth * layer.shape[2] + packed.numbers.block_inputs * packed.numbers.projection_columns)
    numbers = array("q", chain.from_iterable(layers))
    widest = max(layer.outputs for layer in layers)
    return PackedStack(blocks, numbers, widest, _memory_sizes(layers), tuple(operations), tuple(arrays))


def packed_layer(layer: ConvWeights) -> PackedLayer:
    """Return a layer as it is packed once."""
    return pack_once(layer.packed, "cpu layer", lambda: _pack_layer(layer))


def _pack_layer(layer: ConvWeights) -> PackedLayer:
    from kernels.cpu.products import MAX_ROWS, ROWS_IN_CACHE, pack_bias, padded, product_width

    width, inputs, _ = layer.shape
    blocks = 2 if layer.activation in GATED else 1
    bias = pack_bias(layer.bias, blocks)
    numbers = LayerNumbers(
        together=max(MAX_ROWS, min(ROWS_IN_CACHE, COPIED_FLOATS // max(width * inputs, 1))),
        width=width,
        inputs=inputs,
        outputs=layer.outputs,
        left=layer.left,
        right=layer.right,
        dilation=layer.dilation,
        stride=layer.stride,
        activation=ACTIVATION_NUMBERS[layer.activation],
        bias=bias.data_ptr(),
        columns=product_width(blocks * padded(layer.outputs)),
        gates=padded(layer.outputs) if blocks == 2 else 0,
    )
    if layer.tables is None:
        panels, storage = _pack_filters(layer, blocks)
        return PackedLayer(numbers._replace(storage=storage, panels=panels.data_ptr()), (bias, panels))
    table = as_stored_rows(layer.tables)
    row_numbers, tap_numbers = table.stride(1), table.stride(0)
    in_table = {"takes_ids": 1, "storage": STORAGES[table.dtype], "table": table.data_ptr(), "height": table.shape[1]}
    return PackedLayer(numbers._replace(**in_table, row_numbers=row_numbers, tap_numbers=tap_numbers), (bias, table))


def _pack_filters(layer: ConvWeights, blocks: int) -> tuple[Tensor, int]:
    """Return the filters of a layer as panels, and how they are stored. blocks: 2 for values and gates."""
    from kernels.cpu.products import pack_columns

    storage = panel_storage(layer.filters, int8=False)
    return pack_columns(layer.filters.reshape(layer.shape[0] * layer.shape[1], layer.shape[2]), blocks, storage), storage


def _with_input(layer: PackedLayer, block: ConvBlock) -> PackedLayer:
    """Return the last layer of a block that adds its input."""
    columns, activation = block.layers[0].shape[1], ACTIVATION_NUMBERS[block.activation]
    numbers = layer.numbers._replace(adds_input=1, block_activation=activation, block_inputs=columns)
    if block.projection is None:
        return PackedLayer(numbers, layer.arrays)
    projection = packed_layer(block.projection)
    numbers = numbers._replace(
        projects=1,
        projection_storage=projection.numbers.storage,
        projection=projection.numbers.panels,
        projection_bias=projection.numbers.bias,
        projection_columns=projection.numbers.columns,
    )
    return PackedLayer(numbers, layer.arrays + projection.arrays)
