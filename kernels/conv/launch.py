"""The fused backend: splits convolutions, stacks and text CNNs into launches of the two CUDA kernels.

`product.py` multiplies inputs by filters on the tensor cores; `folded.py` adds up rows of folded tables. Between the layers of a stack,
steps are stored as float16 or bfloat16, like the weights. Sums, and everything that leaves the stack, are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backend import Problem
from kernels.conv import framework
from kernels.conv.folded import add_table_rows
from kernels.conv.geometry import ALL_STEPS, BANKS, LAST_STEP, NeededSteps, max_windows, needed_steps
from kernels.conv.layer_by_layer import keep_steps, stack_of, text_cnn_of, wants_only_last_step
from kernels.conv.plan import MAX_WIDTH, MIN_PIECE_BYTES
from kernels.conv.product import STATELESS, Destination, LeftContext, PackedSteps, convolve, window_offsets
from kernels.conv.types import GATED, ConvBlock, ConvState, ConvWeights
from kernels.framework import linear
from kernels.launching import PIECE, as_int32, device_refusal, pack_once, round_up
from kernels.pooling import pool_steps
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots, without_sources

framework_run = with_state_slots(framework.conv)
MAXIMUM, ONLY_LAST, EVERY_STEP = Outputs(max=True), Outputs(last=True), Outputs(steps=True)


def refused(problem: Problem) -> str | None:
    """Return why the kernels cannot run on this device or dtype, or None if they can."""
    return device_refusal(problem, (9, 0), until=(10, 0), halves=True)


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Run one convolution. Shapes as in `kernels.conv.types`."""
    if not _is_supported(weights):
        return framework_run(x, weights, state, want=want)
    steps, needed = _packed_input(x, weights), LAST_STEP if want == ONLY_LAST and weights.keeps_steps else ALL_STEPS
    context, left_after = _left_context(steps, weights, state)
    encoded = _outputs(steps, weights, want, context, needed)
    return replace(encoded, state=None if weights.takes_ids else _state_after(left_after, weights, state, x))


def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
    """Run all blocks of a stack. Shapes as in `kernels.conv.types`."""
    layers = [layer for block in blocks for layer in block.layers]
    if not all(map(_is_supported, layers)):
        return stack_of(framework_run)(x, blocks, states, want=want)
    needed_per_layer = iter(needed_steps(layers) if wants_only_last_step(blocks, states, want) else [ALL_STEPS] * len(layers))
    states_before = repeat(None) if states is None else iter(states)
    states_after: list[ConvState] = []
    steps = _packed_input(x, layers[0])
    for number, block in enumerate(blocks):
        block_input = steps
        for position, layer in enumerate(block.layers):
            needed, state, ends_block = next(needed_per_layer), next(states_before), position + 1 == len(block.layers)
            context, left_after = (STATELESS, None) if state is None else _left_context(steps, layer, state)
            residual = _residual(block_input, block, needed) if ends_block else NO_RESIDUAL
            if ends_block and number + 1 == len(blocks):
                encoded = _outputs(steps, layer, want, context, needed, residual)
            else:
                steps = _inner_steps(steps, layer, context, needed, residual)
            states_after += [] if state is None else [_state_after(left_after, layer, state, x)]
    return replace(
        encoded,
        state=None if states is None else tuple(states_after),
        offsets=None if keep_steps(blocks) else encoded.offsets,
    )


def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
    """Run all layers of a text CNN, in one launch where their windows allow it. Shapes as in `kernels.conv.types`."""
    first = layers[0]
    fits_one_launch = len(layers) <= BANKS and all(
        layer.activation == "relu" and _is_supported(layer) and _have_equal_windows(layer, first) for layer in layers
    )
    if not fits_one_launch:
        return text_cnn_of(conv)(x, layers, classifier)
    steps = _packed_input(x, first)
    if first.tables is None or classifier is None or any(part.dtype != first.tables.dtype for part in classifier):
        maxima = _maxima(steps, layers)
        return Encoded(None, max=maxima, scores=None if classifier is None else linear(maxima, *classifier))
    weight, bias = (part.contiguous() for part in classifier)
    maxima = _empty_maxima(steps, layers)
    scores = first.bias.new_empty(x.rows, weight.shape[1], dtype=torch.float32)
    add_table_rows(steps, layers, Destination(maxima=maxima), (weight, bias), scores)
    return Encoded(None, max=maxima, scores=scores)


@dataclass(frozen=True, slots=True)
class Residual:
    """The steps that are added to the output of a layer, and the activation after the addition."""

    steps: PackedSteps | None = None
    activation: str = "none"


NO_RESIDUAL = Residual()


def _have_equal_windows(layer: ConvWeights, first: ConvWeights) -> bool:
    """Return whether the windows of both layers begin at the same steps, so that one launch can run both."""
    shapes = [(weights.left, weights.right, weights.dilation) for weights in (layer, first)]
    return layer is first or (shapes[0] == shapes[1] and layer.stride == first.stride == 1)


def _is_supported(weights: ConvWeights) -> bool:
    """Return whether the kernels can run this layer: tables without gates, or filters that are not too wide."""
    return weights.activation not in GATED if weights.tables is not None else weights.shape[0] <= MAX_WIDTH


def _packed_input(x: Ragged, weights: ConvWeights) -> PackedSteps:
    """Return the input in the dtype and alignment that the kernels read."""
    storage = weights.filters.dtype
    if weights.tables is not None:
        return PackedSteps(x.data.new_empty(0), x.offsets, ids=x.data.contiguous())
    if weights.embedding is None:
        return PackedSteps(in_pairs(x.data.to(storage)), x.offsets)
    vectors = weights.embedding
    embedding = pack_once(weights.packed, "embedding", lambda: in_pairs(vectors.to(storage)))
    return PackedSteps(embedding, x.offsets, ids=x.data.contiguous())


def _residual(block_input: PackedSteps, block: ConvBlock, needed: NeededSteps) -> Residual:
    """Return the residual that is added to the output of the block's last layer."""
    if not block.residual:
        return NO_RESIDUAL
    if block.projection is None:
        return Residual(block_input, block.activation)
    return Residual(_inner_steps(block_input, block.projection, STATELESS, needed, NO_RESIDUAL), block.activation)


def _inner_steps(
    x: PackedSteps, weights: ConvWeights, context: LeftContext, needed: NeededSteps, residual: Residual
) -> PackedSteps:
    """Return the steps that the next layer reads, with columns padded to a whole number of pieces."""
    if weights.tables is not None:
        steps = _table_sums(x, weights, needed)
        return PackedSteps(in_pairs(steps.to(weights.tables.dtype)), _output_offsets(x, weights), needed)
    count = x.rows * needed.count if needed.count else x.tokens if weights.keeps_steps else _max_windows(x, weights)
    steps = weights.filters.new_empty(count, round_up(weights.outputs, PIECE))
    offsets = _output_offsets(x, weights)
    destination = Destination(steps, offsets, needed, residual=residual.steps, after=residual.activation)
    convolve(x, [weights], destination, context, followed=True)
    return PackedSteps(steps, offsets, needed, exact=x.exact and weights.keeps_steps, known=weights.keeps_steps)


def _outputs(
    x: PackedSteps,
    weights: ConvWeights,
    want: Outputs,
    context: LeftContext,
    needed: NeededSteps,
    residual: Residual = NO_RESIDUAL,
) -> Encoded:
    """Return the wanted outputs of the last layer. The state is None."""
    offsets = _output_offsets(x, weights)
    if want == MAXIMUM and weights.activation == "relu" and residual is NO_RESIDUAL:
        return Encoded(None, max=_maxima(x, [weights], context), offsets=offsets)
    if weights.tables is not None:
        steps = _table_sums(x, weights, needed)
    else:
        steps = weights.bias.new_empty(_output_count(x, weights, needed), weights.outputs, dtype=torch.float32)
        destination = Destination(steps, offsets, needed, residual=residual.steps, after=residual.activation)
        convolve(x, [weights], destination, context)
    if needed.count:
        return Encoded(None, last=steps, offsets=offsets)
    if want == EVERY_STEP:
        return Encoded(None, steps, offsets=offsets)
    return replace(pool_steps(steps, offsets, want, directions=1), offsets=offsets)


def _maxima(x: PackedSteps, layers: Sequence[ConvWeights], context: LeftContext = STATELESS) -> Tensor:
    """Return the maxima over time of ReLU layers, concatenated: (rows, columns) float32."""
    maxima = _empty_maxima(x, layers)
    if layers[0].tables is None:
        convolve(x, layers, Destination(maxima=maxima), context)
    else:
        add_table_rows(x, layers, Destination(maxima=maxima))
    return maxima


def _empty_maxima(x: PackedSteps, layers: Sequence[ConvWeights]) -> Tensor:
    return layers[0].bias.new_empty(x.rows, sum(layer.outputs for layer in layers), dtype=torch.float32)


def _table_sums(x: PackedSteps, weights: ConvWeights, needed: NeededSteps) -> Tensor:
    """Return the needed steps, float32, of a layer with folded tables."""
    steps = weights.bias.new_empty(_output_count(x, weights, needed), weights.outputs, dtype=torch.float32)
    add_table_rows(x, [weights], Destination(steps, _output_offsets(x, weights), needed))
    return steps


def in_pairs(values: Tensor) -> Tensor:
    """Return (..., columns) with an even number of columns, because the kernel reads at least two at a time."""
    return _padded(values, round_up(values.shape[-1], 2))


def _padded(values: Tensor, columns: int) -> Tensor:
    """Return (..., columns), contiguous and aligned, padded with zeros; copies only if necessary."""
    missing = columns - values.shape[-1]
    whole = (functional.pad(values, (0, missing)) if missing else values).contiguous()
    return whole if whole.data_ptr() % MIN_PIECE_BYTES == 0 else whole.clone()


def _max_windows(x: PackedSteps, weights: ConvWeights) -> int:
    return max_windows(x.tokens, x.rows, weights.left + weights.right, weights.reach, weights.stride)


def _output_count(x: PackedSteps, weights: ConvWeights, needed: NeededSteps) -> int:
    """Return the number of output steps. Where it depends on the lengths, this reads them, which waits for the device."""
    if needed.count:
        return x.rows * needed.count
    if weights.keeps_steps and x.exact:
        return x.tokens
    return int(weights.steps(Ragged(x.data, x.offsets).lengths).sum())


def _output_offsets(x: PackedSteps, weights: ConvWeights) -> Tensor:
    return x.offsets if weights.keeps_steps else window_offsets(x.offsets, weights)


def _left_context(x: PackedSteps, weights: ConvWeights, state: ConvState | None) -> tuple[LeftContext, Tensor | None]:
    """Return the context that a launch reads and writes, and the array in which it leaves the context of the next chunks.

    That array is the state's slab if the kernel can write into it, otherwise a new one.
    """
    if not weights.left or x.ids is not None:
        return STATELESS, None
    before = None if state is None else _padded(state.by_row().left.to(x.data.dtype), x.data.shape[1])
    if state is not None and state.slots is not None and _is_writable(state.left, x.data):
        return LeftContext(before, state.left, as_int32(state.slots)), state.left
    after = x.data.new_empty(x.rows, weights.left, x.data.shape[1])
    return LeftContext(before, after), after


def _is_writable(slab: Tensor, data: Tensor) -> bool:
    """Return whether the kernel can write into a slab: dtype, columns and alignment must match the data."""
    alike = slab.dtype == data.dtype and slab.shape[2] == data.shape[1]
    return alike and slab.is_contiguous() and slab.data_ptr() % MIN_PIECE_BYTES == 0


def _state_after(left_after: Tensor | None, weights: ConvWeights, state: ConvState | None, x: Ragged) -> ConvState:
    """Return the state for the next chunks, written into its slots if the previous state has slots."""
    inputs = weights.filters.shape[1]
    left = weights.filters.new_empty(x.rows, weights.left, inputs) if left_after is None else left_after[..., :inputs]
    if state is None or state.slots is None:
        return ConvState(left)
    if left_after is not None and left_after is not state.left:
        state.left.index_copy_(0, state.slots.long(), left.to(state.left.dtype))
    return without_sources(state)
