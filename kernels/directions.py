"""Compositions of one layer in one direction: two directions over the same rows, with outputs joined as [forward | backward] along the
width, and levels, of which each reads the steps of the level below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.ragged import Encoded, Outputs, Ragged, RunKernel, reversal_index


def compose_directions(run: RunKernel) -> RunKernel:
    """Return a function that runs the forward direction and then the backward direction, on reversed rows, with `run`.

    The function takes the weights as a pair (forward, backward). It takes and returns the states as such a pair; states may be None. In
    both directions, the outputs of the steps are in the order of the tokens.
    """

    def run_both(x: Ragged, weights: tuple[Any, Any], states: tuple[Any, Any] | None, *, want: Outputs) -> Encoded:
        before = (None, None) if states is None else states
        forward = run(x, weights[0], before[0], want=want)
        backward = run(x.reversed(), weights[1], before[1], want=want)
        if backward.steps is not None:
            index = reversal_index(x.offsets, len(backward.steps))
            backward = replace(backward, steps=backward.steps.index_select(0, index))
        return replace(join_outputs((forward, backward)), state=(forward.state, backward.state))

    return run_both


def compose_levels(run: RunKernel) -> RunKernel:
    """Return a function that runs one level after the other with `run`.

    The function takes the weights of each level, from the first. It takes and returns a state for each level; states may be None. The
    outputs are those of the last level.
    """

    def run_levels(x: Ragged, weights: Sequence[Any], states: Sequence[Any] | None, *, want: Outputs) -> Encoded:
        after: list[Any] = []
        for layer, state in zip(weights, states or [None] * len(weights), strict=True):
            encoded = run(x, layer, state, want=want if layer is weights[-1] else Outputs(steps=True))
            after.append(encoded.state)
            if encoded.steps is not None:
                x = Ragged(encoded.steps, x.offsets)
        return replace(encoded, state=tuple(after))

    return run_levels


def join_outputs(parts: Sequence[Encoded]) -> Encoded:
    """Join outputs of the same rows along their width. The state is the first part's."""
    if len(parts) == 1:
        return parts[0]

    def join(name: str) -> Tensor | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else torch.cat(arrays, dim=1)

    return Encoded(parts[0].state, *(join(name) for name in ("steps", "last", "mean", "max")))
