"""The convolution over time one row, one position and one tap at a time: the oracle of every test, for the eye."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.contract import ACTIVATIONS, GATED, ConvBlock, ConvState, ConvWeights, Encoded, Outputs, Ragged
from kernels.embedding import tap_rows
from kernels.reference import pooled
from kernels.slots import by_slot


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`; every output has the dtype of `weights.bias`."""
    data = _seen(x, weights)
    left = data.new_zeros(x.rows, weights.left, *data.shape[1:]) if state is None else state.left.clone()
    steps, ends = [], [0]
    for row, (begin, end) in enumerate(pairwise(x.offsets.tolist())):
        seen = torch.cat((left[row], data[begin:end], data.new_zeros(weights.right, *data.shape[1:])))
        for first in range(0, len(seen) - weights.reach + 1, weights.stride):
            maps = weights.bias
            for tap in range(weights.filters.shape[0]):
                maps = maps + _product(seen[first + tap * weights.dilation], weights, tap)
            steps.append(_activated(maps, weights))
        ends.append(len(steps))
        left[row] = torch.cat((left[row], data[begin:end]))[end - begin :]
    given = torch.stack(steps) if steps else weights.bias.new_zeros(0, weights.outputs)
    after = None if weights.takes_ids else ConvState(left)
    return pooled(given, torch.tensor(ends), want, state=after, new_offsets=True)


def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
    """Shapes as in `kernels.contract`."""
    before = [None] * sum(len(block.layers) for block in blocks) if states is None else list(states)
    after: list[ConvState | None] = []
    all_kept = all(layer.keeps_steps for block in blocks for layer in block.layers)
    for block in blocks:
        entered = x
        for layer in block.layers:
            encoded = by_slot(conv)(x, layer, before[len(after)], want=Outputs(steps=True))
            after.append(encoded.state)
            x = _onward(encoded)
        if block.residual:
            added = (
                entered
                if block.projection is None
                else _onward(conv(entered, block.projection, None, want=Outputs(steps=True)))
            )
            x = Ragged(ACTIVATIONS[block.activation](x.data + added.data), x.offsets)
    return pooled(x.data, x.offsets, want, state=None if states is None else tuple(after), new_offsets=not all_kept)


def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
    """Shapes as in `kernels.contract`."""
    parts = [conv(x, layer, None, want=Outputs(max=True)).max for layer in layers]
    highest = torch.cat([part for part in parts if part is not None], dim=1)
    if classifier is None:
        return Encoded(None, max=highest)
    weight, bias = classifier
    return Encoded(None, max=highest, scores=highest @ weight + bias)


def _seen(x: Ragged, weights: ConvWeights) -> Tensor:
    """What stands under the taps: (tokens, inputs), or (tokens,) rows of the tables, of which 0 is padding too."""
    if weights.tables is not None:
        return tap_rows(x).data
    return x.data if weights.embedding is None else weights.embedding[x.data.long()]


def _product(step: Tensor, weights: ConvWeights, tap: int) -> Tensor:
    """(maps,)"""
    return step @ weights.filters[tap] if weights.tables is None else weights.tables[tap, step]


def _activated(maps: Tensor, weights: ConvWeights) -> Tensor:
    if weights.activation in GATED:
        value, gate = maps[: weights.outputs], maps[weights.outputs :]
        return GATED[weights.activation](value, gate)
    return ACTIVATIONS[weights.activation](maps)


def _onward(encoded: Encoded) -> Ragged:
    assert encoded.steps is not None and encoded.offsets is not None
    return Ragged(encoded.steps, encoded.offsets)
