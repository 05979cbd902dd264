"""Stacks of convolutions and text CNNs, run layer by layer, for backends that only run single convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, repeat

import numpy as np
import torch
from torch import Tensor

from kernels.conv.types import ACTIVATIONS, ConvBlock, ConvState, ConvWeights
from kernels.directions import join_outputs
from kernels.framework import linear
from kernels.pooling import pool_steps
from kernels.ragged import Encoded, Outputs, Ragged, start_offsets

Run = Callable[..., Encoded]
LAST, STEPS = Outputs(last=True), Outputs(steps=True)


def stack_of(run: Run) -> Run:
    """Return a function that runs the blocks of a stack layer by layer with `run`. Residuals are added in float32."""

    def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
        if wants_only_last_step(blocks, states, want):
            x = last_steps(x, receptive_field(blocks))
        return _run_blocks(run, x, blocks, states, want)

    return stack


def text_cnn_of(run: Run) -> Run:
    """Return a function that runs a text CNN layer by layer with `run`."""

    def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
        parts = [run(x, layer, None, want=Outputs(max=True)) for layer in layers]
        maxima = join_outputs(parts).max
        assert maxima is not None
        return Encoded(None, max=maxima, scores=None if classifier is None else linear(maxima, *classifier))

    return text_cnn


def keep_steps(blocks: Sequence[ConvBlock]) -> bool:
    """Return whether the stack has one output step for every input step."""
    return all(layer.keeps_steps for block in blocks for layer in block.layers)


def wants_only_last_step(blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, want: Outputs) -> bool:
    """Return whether only the last step is wanted and the steps that it depends on are known in advance."""
    return want == LAST and states is None and keep_steps(blocks)


def receptive_field(blocks: Sequence[ConvBlock]) -> int:
    """Return the number of input steps, counted back from the last, that the last output step depends on."""
    return 1 + sum(layer.left for block in blocks for layer in block.layers)


def last_steps(x: Ragged, steps: int) -> Ragged:
    """Return the last `steps` steps of each row, or the whole row if it is shorter. The offsets are computed on the host."""
    kept = np.minimum(x.lengths, steps)
    if (kept == x.lengths).all():
        return x
    first = start_offsets(x.lengths) + x.lengths - kept
    tokens = np.repeat(first - start_offsets(kept), kept) + np.arange(kept.sum())
    offsets = np.append(0, kept.cumsum())
    index, device_offsets = (torch.from_numpy(array).to(x.data.device) for array in (tokens, offsets))
    return Ragged(x.data.index_select(0, index), device_offsets)


def _run_blocks(run: Run, x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, want: Outputs) -> Encoded:
    """Run all blocks. The state is a tuple with one entry per layer; the offsets are None where every layer keeps its steps."""
    states_before = repeat(None) if states is None else iter(states)
    states_after: list[ConvState | None] = []
    for block, block_want in zip(blocks, _steps_until_last(want, len(blocks)), strict=True):
        encoded = _run_block(run, x, block, tuple(islice(states_before, len(block.layers))), block_want)
        states_after += encoded.state
        x = _next_input(encoded, x)
    return replace(
        encoded,
        state=None if states is None else tuple(states_after),
        offsets=None if keep_steps(blocks) else encoded.offsets,
    )


def _run_block(run: Run, x: Ragged, block: ConvBlock, states: Sequence[ConvState | None], want: Outputs) -> Encoded:
    """Run one block. The state is a tuple with one entry per layer."""
    block_input, states_after = x, []
    wants = _steps_until_last(STEPS if block.residual else want, len(block.layers))
    for layer, state, layer_want in zip(block.layers, states, wants, strict=True):
        encoded = run(x, layer, state, want=layer_want)
        states_after.append(encoded.state)
        x = _next_input(encoded, x)
    return replace(
        _add_residual(run, block_input, x.data, block, want) if block.residual else encoded, state=tuple(states_after)
    )


def _add_residual(run: Run, block_input: Ragged, convolved: Tensor, block: ConvBlock, want: Outputs) -> Encoded:
    """Return the wanted outputs of activation(convolved + block input). The input is projected if the block has a projection."""
    residual = block_input
    if block.projection is not None:
        residual = _next_input(run(block_input, block.projection, None, want=STEPS), block_input)
    steps = ACTIVATIONS[block.activation](convolved + residual.data.to(convolved.dtype))
    return replace(pool_steps(steps, block_input.offsets, want, directions=1), offsets=block_input.offsets)


def _steps_until_last(want: Outputs, count: int) -> list[Outputs]:
    """Return the outputs to request from each of `count` consecutive layers: `want` from the last layer, all steps from the others."""
    return [STEPS] * (count - 1) + [want]


def _next_input(encoded: Encoded, x: Ragged) -> Ragged:
    """Return the input of the next layer. After the last layer there may be no steps, and `x` is returned unused."""
    if encoded.steps is None:
        return x
    return Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets)
