"""The reference convolution over time: one row, one position and one tap at a time. It is the oracle of every test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.conv.types import ACTIVATIONS, ConvBlock, ConvState, ConvWeights
from kernels.embedding import tap_rows
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots
from kernels.reference import select_outputs


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Run one convolution. Shapes as in `kernels.conv.types`; every output has the dtype of `weights.bias`."""
    data = _tap_inputs(x, weights)
    left = data.new_zeros(x.rows, weights.left, *data.shape[1:]) if state is None else state.left.clone()
    steps, offsets = [], [0]
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        padded = torch.cat((left[row], data[begin:end], data.new_zeros(weights.right, *data.shape[1:])))
        for first in range(0, len(padded) - weights.reach + 1, weights.stride):
            maps = weights.bias
            for tap in range(weights.filters.shape[0]):
                maps = maps + _product(padded[first + tap * weights.dilation], weights, tap)
            steps.append(weights.activated(maps))
        offsets.append(len(steps))
        left[row] = torch.cat((left[row], data[begin:end]))[end - begin :]
    packed_steps = torch.stack(steps) if steps else weights.bias.new_zeros(0, weights.outputs)
    state_after = None if weights.takes_ids else ConvState(left)
    return select_outputs(packed_steps, torch.tensor(offsets), want, state=state_after, new_offsets=True)


def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
    """Run all blocks of a stack. Shapes as in `kernels.conv.types`."""
    states_before = [None] * sum(len(block.layers) for block in blocks) if states is None else list(states)
    states_after: list[ConvState | None] = []
    all_kept = all(layer.keeps_steps for block in blocks for layer in block.layers)
    for block in blocks:
        block_input = x
        for layer in block.layers:
            encoded = with_state_slots(conv)(x, layer, states_before[len(states_after)], want=Outputs(steps=True))
            states_after.append(encoded.state)
            x = _next_input(encoded)
        if block.residual:
            residual = block_input
            if block.projection is not None:
                residual = _next_input(conv(block_input, block.projection, None, want=Outputs(steps=True)))
            x = Ragged(ACTIVATIONS[block.activation](x.data + residual.data), x.offsets)
    return select_outputs(
        x.data, x.offsets, want, state=None if states is None else tuple(states_after), new_offsets=not all_kept
    )


def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
    """Run all layers of a text CNN. Shapes as in `kernels.conv.types`."""
    parts = [conv(x, layer, None, want=Outputs(max=True)).max for layer in layers]
    maxima = torch.cat([part for part in parts if part is not None], dim=1)
    if classifier is None:
        return Encoded(None, max=maxima)
    weight, bias = classifier
    return Encoded(None, max=maxima, scores=maxima @ weight + bias)


def _tap_inputs(x: Ragged, weights: ConvWeights) -> Tensor:
    """Return the inputs that a tap reads at each step: (tokens, inputs), or (tokens,) rows of the tables, where row 0 is padding."""
    if weights.tables is not None:
        return tap_rows(x).data
    return x.data if weights.embedding is None else weights.embedding[x.data.long()]


def _product(step: Tensor, weights: ConvWeights, tap: int) -> Tensor:
    """Return the (maps,) contribution of one tap."""
    return step @ weights.filters[tap] if weights.tables is None else weights.tables[tap, step]


def _next_input(encoded: Encoded) -> Ragged:
    assert encoded.steps is not None and encoded.offsets is not None
    return Ragged(encoded.steps, encoded.offsets)
