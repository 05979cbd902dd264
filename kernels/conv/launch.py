"""The convolution through its CUDA kernels: what each call is made of, as they want it.

Inputs are multiplied on the tensor cores (`product.py`), or rows of tables added up (`folded.py`). Between the layers of a stack, steps
are float16 or bfloat16 as the weights are; sums, and whatever leaves the stack, are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backend import Problem
from kernels.contract import GATED, ConvBlock, ConvState, ConvWeights, Encoded, Outputs, Ragged
from kernels.conv import framework
from kernels.conv.composed import composed_stack, composed_text_cnn, keep_steps, only_the_last
from kernels.conv.folded import gather
from kernels.conv.plan import LEAST_PIECE_BYTES, WIDEST
from kernels.conv.product import STATELESS, Context, Steps, Target, convolve, window_offsets
from kernels.conv.rows import BANKS, most_windows
from kernels.conv.thinning import ALL, LAST, Thinned, thinned
from kernels.launching import PIECE, as_lines, kept, refused_by_device, round_up
from kernels.pooling import pooled
from kernels.slots import by_slot, moved_on
from kernels.walk import product

framework_run = by_slot(framework.conv)
MAXIMUM, LAST_STEP, EVERY_STEP = Outputs(max=True), Outputs(last=True), Outputs(steps=True)


def refused(problem: Problem) -> str | None:
    """What `explain` shows where the kernels cannot run."""
    return refused_by_device(problem, (9, 0), until=(10, 0), halves=True)


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    if not _takes(weights):
        return framework_run(x, weights, state, want=want)
    steps, needed = _taken(x, weights), LAST if want == LAST_STEP and weights.keeps_steps else ALL
    context, after = _context(steps, weights, state)
    encoded = _given(steps, weights, want, context, needed)
    return replace(encoded, state=None if weights.takes_ids else _state(after, weights, state, x))


def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    layers = [layer for block in blocks for layer in block.layers]
    if not all(map(_takes, layers)):
        return composed_stack(framework_run)(x, blocks, states, want=want)
    needed = iter(thinned(layers) if only_the_last(blocks, states, want) else [ALL] * len(layers))
    before = repeat(None) if states is None else iter(states)
    after: list[ConvState] = []
    at = _taken(x, layers[0])
    for number, block in enumerate(blocks):
        entered = at
        for position, layer in enumerate(block.layers):
            some, state, last = next(needed), next(before), position + 1 == len(block.layers)
            context, left = (STATELESS, None) if state is None else _context(at, layer, state)
            added = _added(entered, block, some) if last else NOTHING
            if last and number + 1 == len(blocks):
                encoded = _given(at, layer, want, context, some, added)
            else:
                at = _between(at, layer, context, some, added)
            after += [] if state is None else [_state(left, layer, state, x)]
    return replace(
        encoded, state=None if states is None else tuple(after), offsets=None if keep_steps(blocks) else encoded.offsets
    )


def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
    """Shapes as in `kernels.contract`."""
    one = layers[0]
    if len(layers) > BANKS or not all(layer.activation == "relu" and _takes(layer) and _alike(layer, one) for layer in layers):
        return composed_text_cnn(conv)(x, layers, classifier)
    steps = _taken(x, one)
    if one.tables is None or classifier is None or any(part.dtype != one.tables.dtype for part in classifier):
        maxima = _maxima(steps, layers)
        return Encoded(None, max=maxima, scores=None if classifier is None else product(maxima, *classifier))
    weight, bias = (part.contiguous() for part in classifier)
    maxima, scores = _room(steps, layers), one.bias.new_empty(x.rows, weight.shape[1], dtype=torch.float32)
    gather(steps, layers, Target(maxima=maxima), (weight, bias), scores)
    return Encoded(None, max=maxima, scores=scores)


@dataclass(frozen=True, slots=True)
class Added:
    """What is added to the steps that a layer gives, and the activation after that."""

    steps: Steps | None = None
    activation: str = "none"


NOTHING = Added()


def _alike(layer: ConvWeights, other: ConvWeights) -> bool:
    """Whether their windows begin in the same places, so that they may go over the steps in one launch."""
    shapes = [(one.left, one.right, one.dilation) for one in (layer, other)]
    return layer is other or (shapes[0] == shapes[1] and layer.stride == other.stride == 1)


def _takes(weights: ConvWeights) -> bool:
    """Whether the kernels run it: tables that are added up have no gates, and filters that are multiplied are not too wide."""
    return weights.activation not in GATED if weights.tables is not None else weights.shape[0] <= WIDEST


def _taken(x: Ragged, weights: ConvWeights) -> Steps:
    """The inputs as the kernels read them."""
    storage = weights.filters.dtype
    if weights.tables is not None:
        return Steps(x.data.new_empty(0), x.offsets, ids=x.data.contiguous())
    if weights.embedding is None:
        return Steps(in_pairs(x.data.to(storage)), x.offsets)
    vectors = weights.embedding
    embedding = kept(weights.packed, "embedding", lambda: in_pairs(vectors.to(storage)))
    return Steps(embedding, x.offsets, ids=x.data.contiguous())


def _added(entered: Steps, block: ConvBlock, needed: Thinned) -> Added:
    """What a block adds to what its last layer gives."""
    if not block.residual:
        return NOTHING
    if block.projection is None:
        return Added(entered, block.activation)
    return Added(_between(entered, block.projection, STATELESS, needed, NOTHING), block.activation)


def _between(x: Steps, weights: ConvWeights, context: Context, needed: Thinned, added: Added) -> Steps:
    """The steps that the next layer takes, as wide as it reads them: what stands beside the outputs is zero."""
    if weights.tables is not None:
        steps = _summed(x, weights, needed)
        return Steps(in_pairs(steps.to(weights.tables.dtype)), _offsets_after(x, weights), needed)
    count = x.rows * needed.most if needed.most else x.tokens if weights.keeps_steps else _most_windows(x, weights)
    steps = weights.filters.new_empty(count, round_up(weights.outputs, PIECE))
    offsets = _offsets_after(x, weights)
    target = Target(steps, offsets, needed, residual=added.steps, after=added.activation)
    convolve(x, [weights], target, context, followed=True)
    return Steps(steps, offsets, needed, exact=x.exact and weights.keeps_steps, known=weights.keeps_steps)


def _given(x: Steps, weights: ConvWeights, want: Outputs, context: Context, needed: Thinned, added: Added = NOTHING) -> Encoded:
    """What leaves the device; the state is None."""
    offsets = _offsets_after(x, weights)
    if want == MAXIMUM and weights.activation == "relu" and added is NOTHING:
        return Encoded(None, max=_maxima(x, [weights], context), offsets=offsets)
    if weights.tables is not None:
        steps = _summed(x, weights, needed)
    else:
        steps = weights.bias.new_empty(_count(x, weights, needed), weights.outputs, dtype=torch.float32)
        convolve(x, [weights], Target(steps, offsets, needed, residual=added.steps, after=added.activation), context)
    if needed.most:
        return Encoded(None, last=steps, offsets=offsets)
    if want == EVERY_STEP:
        return Encoded(None, steps, offsets=offsets)
    return replace(pooled(steps, offsets, want, directions=1), offsets=offsets)


def _maxima(x: Steps, layers: Sequence[ConvWeights], context: Context = STATELESS) -> Tensor:
    """Over time, of all layers side by side, (rows, columns) float32; they have ReLU."""
    maxima = _room(x, layers)
    if layers[0].tables is None:
        convolve(x, layers, Target(maxima=maxima), context)
    else:
        gather(x, layers, Target(maxima=maxima))
    return maxima


def _room(x: Steps, layers: Sequence[ConvWeights]) -> Tensor:
    """For the maxima."""
    return layers[0].bias.new_empty(x.rows, sum(layer.outputs for layer in layers), dtype=torch.float32)


def _summed(x: Steps, weights: ConvWeights, needed: Thinned) -> Tensor:
    """Every step that is needed, float32, of rows of tables."""
    steps = weights.bias.new_empty(_count(x, weights, needed), weights.outputs, dtype=torch.float32)
    gather(x, [weights], Target(steps, _offsets_after(x, weights), needed))
    return steps


def in_pairs(values: Tensor) -> Tensor:
    """(..., columns) as the kernel reads its inputs, at least two of them at a time: padded with zeros if need be."""
    return _padded(values, round_up(values.shape[-1], 2))


def _padded(values: Tensor, columns: int) -> Tensor:
    """(..., columns) where the kernel can read it: padded with zeros, or copied, if need be."""
    odd = columns - values.shape[-1]
    whole = (functional.pad(values, (0, odd)) if odd else values).contiguous()
    return whole if whole.data_ptr() % LEAST_PIECE_BYTES == 0 else whole.clone()


def _most_windows(x: Steps, weights: ConvWeights) -> int:
    return most_windows(x.tokens, x.rows, weights.left + weights.right, weights.reach, weights.stride)


def _count(x: Steps, weights: ConvWeights, needed: Thinned) -> int:
    """Steps that come out; where only the lengths tell, they are looked at, which waits for the device."""
    if needed.most:
        return x.rows * needed.most
    if weights.keeps_steps and x.exact:
        return x.tokens
    return int(weights.steps(Ragged(x.data, x.offsets).lengths).sum())


def _offsets_after(x: Steps, weights: ConvWeights) -> Tensor:
    return x.offsets if weights.keeps_steps else window_offsets(x.offsets, weights)


def _context(x: Steps, weights: ConvWeights, state: ConvState | None) -> tuple[Context, Tensor | None]:
    """What a launch reads and writes beside its rows, and where what stands before their next chunks is then: in a slab, unless it is
    laid out in another way than the kernel's, or an array of its own."""
    if not weights.left or x.ids is not None:
        return STATELESS, None
    before = None if state is None else _padded(state.by_row().left.to(x.data.dtype), x.data.shape[1])
    if state is not None and state.slots is not None and _in_place(state.left, x.data):
        return Context(before, state.left, as_lines(state.slots)), state.left
    after = x.data.new_empty(x.rows, weights.left, x.data.shape[1])
    return Context(before, after), after


def _in_place(slab: Tensor, data: Tensor) -> bool:
    """Whether a kernel can write into a slab."""
    alike = slab.dtype == data.dtype and slab.shape[2] == data.shape[1]
    return alike and slab.is_contiguous() and slab.data_ptr() % LEAST_PIECE_BYTES == 0


def _state(after: Tensor | None, weights: ConvWeights, state: ConvState | None, x: Ragged) -> ConvState:
    """In its slots, where the one before has such."""
    inputs = weights.filters.shape[1]
    left = weights.filters.new_empty(x.rows, weights.left, inputs) if after is None else after[..., :inputs]
    if state is None or state.slots is None:
        return ConvState(left)
    if after is not None and after is not state.left:
        state.left.index_copy_(0, state.slots.long(), left.to(state.left.dtype))
    return moved_on(state)
