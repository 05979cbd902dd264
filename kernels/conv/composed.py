"""Stacks of convolutions and text CNNs, layer by layer, for backends that run one convolution at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.backend import Backend
from kernels.contract import ACTIVATIONS, ConvBlock, ConvState, ConvWeights, Encoded, Outputs, Ragged, begins
from kernels.directions import side_by_side
from kernels.pooling import pooled
from kernels.walk import product

Run = Callable[..., Encoded]
LAST, STEPS = Outputs(last=True), Outputs(steps=True)


@dataclass(frozen=True, slots=True)
class ConvBackend(Backend):
    """`stack` runs all blocks at once and `text_cnn` all widths, where it can do better than one layer after the other."""

    stack: Callable[..., Any] | None = None
    text_cnn: Callable[..., Any] | None = None

    @property
    def whole_stack(self) -> Callable[..., Any]:
        """`stack`, or as `composed_stack` has it."""
        return self.stack or composed_stack(self.run)

    @property
    def whole_text_cnn(self) -> Callable[..., Any]:
        """`text_cnn`, or as `composed_text_cnn` has it."""
        return self.text_cnn or composed_text_cnn(self.run)


def composed_stack(run: Run) -> Run:
    """What `run` does of one layer, of all of them; what comes in is added in float32."""

    def stack(x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, *, want: Outputs) -> Encoded:
        if only_the_last(blocks, states, want):
            x = last_steps(x, seen_by_the_last(blocks))
        return _through(run, x, blocks, states, want)

    return stack


def composed_text_cnn(run: Run) -> Run:
    """What `run` does of one width, of all of them."""

    def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
        parts = [run(x, layer, None, want=Outputs(max=True)) for layer in layers]
        highest = side_by_side(parts).max
        assert highest is not None
        return Encoded(None, max=highest, scores=None if classifier is None else product(highest, *classifier))

    return text_cnn


def keep_steps(blocks: Sequence[ConvBlock]) -> bool:
    """Whether a row gives a step for every step."""
    return all(layer.keeps_steps for block in blocks for layer in block.layers)


def only_the_last(blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, want: Outputs) -> bool:
    """Whether nothing but the last step is asked for, and it is known which steps that one depends on."""
    return want == LAST and states is None and keep_steps(blocks)


def seen_by_the_last(blocks: Sequence[ConvBlock]) -> int:
    """Steps of the input that the last step of the output depends on, if the row has as many."""
    return 1 + sum(layer.left for block in blocks for layer in block.layers)


def last_steps(x: Ragged, steps: int) -> Ragged:
    """So many of each row, or all where it has fewer; which they are is worked out on the host."""
    kept = np.minimum(x.lengths, steps)
    if (kept == x.lengths).all():
        return x
    first = begins(x.lengths) + x.lengths - kept
    at = np.repeat(first - begins(kept), kept) + np.arange(kept.sum())
    offsets = np.append(0, kept.cumsum())
    there, ends = (torch.from_numpy(one).to(x.data.device) for one in (at, offsets))
    return Ragged(x.data.index_select(0, there), ends)


def _through(run: Run, x: Ragged, blocks: Sequence[ConvBlock], states: Sequence[ConvState] | None, want: Outputs) -> Encoded:
    """The state is the tuple of those of the layers, where some were given; the offsets are None where every layer keeps its steps."""
    before = repeat(None) if states is None else iter(states)
    after: list[ConvState | None] = []
    for block, wanted in zip(blocks, _only_steps_before(want, len(blocks)), strict=True):
        encoded = _block(run, x, block, tuple(islice(before, len(block.layers))), wanted)
        after += encoded.state
        x = _onward(encoded, x)
    return replace(
        encoded, state=None if states is None else tuple(after), offsets=None if keep_steps(blocks) else encoded.offsets
    )


def _block(run: Run, x: Ragged, block: ConvBlock, states: Sequence[ConvState | None], want: Outputs) -> Encoded:
    """The state is the tuple of those of the layers."""
    entered, after = x, []
    wants = _only_steps_before(STEPS if block.residual else want, len(block.layers))
    for layer, state, wanted in zip(block.layers, states, wants, strict=True):
        encoded = run(x, layer, state, want=wanted)
        after.append(encoded.state)
        x = _onward(encoded, x)
    return replace(_added(run, entered, x.data, block, want) if block.residual else encoded, state=tuple(after))


def _added(run: Run, entered: Ragged, convolved: Tensor, block: ConvBlock, want: Outputs) -> Encoded:
    """Every output of the activation of what was convolved and what came in."""
    came = entered if block.projection is None else _onward(run(entered, block.projection, None, want=STEPS), entered)
    steps = ACTIVATIONS[block.activation](convolved + came.data.to(convolved.dtype))
    return replace(pooled(steps, entered.offsets, want, directions=1), offsets=entered.offsets)


def _only_steps_before(want: Outputs, count: int) -> list[Outputs]:
    """What is wanted of each of so many that follow each other."""
    return [STEPS] * (count - 1) + [want]


def _onward(encoded: Encoded, x: Ragged) -> Ragged:
    """What comes next takes; after the last, when no steps are wanted, nothing does."""
    if encoded.steps is None:
        return x
    return Ragged(encoded.steps, x.offsets if encoded.offsets is None else encoded.offsets)
