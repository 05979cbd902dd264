"""Shared by the references of all families: pooling the steps row by row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.norm import EPSILON
from kernels.ragged import Encoded, Outputs, Ragged


def reference_norm(values: Tensor, norm: Tensor | None, epsilon: float = EPSILON) -> Tensor:
    """Return a vector, or (n, width) vectors, after a layer norm, (2, width) gain and offset, if there is one."""
    if norm is None:
        return values
    centred = values - values.mean(-1, keepdim=True)
    normalised: Tensor = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm[0] + norm[1]
    return normalised


def reference_gate_inputs(x: Ragged, weights: Any) -> Tensor:
    """Return the gate inputs of all tokens of an LSTM, a GRU or an RNN: (tokens, gates x hidden)."""
    if weights.input is None or weights.bias is None:
        return x.data
    gates: Tensor = reference_norm(x.data @ weights.input, weights.input_norm, weights.epsilon) + weights.bias
    return gates


def select_outputs(
    steps: Tensor, offsets: Tensor, want: Outputs, *, state: Any, last: Tensor | None = None, new_offsets: bool = False
) -> Encoded:
    """Return the requested outputs of steps, (tokens, width).

    last: the hidden state after each row in families that have one; otherwise the output is the last step, or zero for a row without
    steps. new_offsets: the offsets differ from the offsets of the input, so the result contains them.
    """
    rows = [steps[begin:end] for begin, end in pairwise(offsets.tolist())]
    zero = steps.new_zeros(steps.shape[1])

    def by_row(pool: Any) -> Tensor:
        return torch.stack([pool(row) if len(row) else zero for row in rows]) if rows else steps.new_zeros(0, steps.shape[1])

    return Encoded(
        state=state,
        steps=steps if want.steps else None,
        last=(by_row(lambda row: row[-1]) if last is None else last) if want.last else None,
        mean=by_row(lambda row: row.mean(0)) if want.mean else None,
        max=by_row(lambda row: row.amax(0)) if want.max else None,
        offsets=offsets if new_offsets else None,
    )
