"""torch.nn.LSTM and torch.nn.GRU, padded and packed: cuDNN on a GPU, oneDNN or torch's own loop on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from kernels.bench.baselines.baseline import TimedCall, embedded, last, pad
from kernels.bench.case import BenchCase
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMWeights
from kernels.ragged import state_arrays


def padded(case: BenchCase) -> TimedCall:
    """Compute the padding as well, then take the last step of each row, or every step or both directions of rows with equal lengths.

    States are gathered from their slots before the clock starts, and stay as the layer returns them.
    """
    over_vectors, vectors, expected = embedded(case)
    layer, data = _layer(over_vectors), pad(case)
    if case.workload.directions == 2:
        assert not case.ragged, "the backward direction would begin in the padding"
        return TimedCall(lambda: _last_state(layer, data))
    if case.want == "steps":
        return TimedCall(lambda: layer(data)[0], lambda steps: steps.transpose(0, 1).flatten(0, 1))
    take, state = last(case), _state(case)
    return TimedCall(lambda: take(layer(vectors(data), state)[0]), expected=expected)


def _state(case: BenchCase) -> Any:
    """Return the state that the rows start from as torch's layer takes it, (1, rows, hidden), or None for zeros."""
    if case.state is None:
        return None
    before = case.state.by_row()
    hidden, *cell = (getattr(before, name)[None].to(case.x.data.dtype) for name in state_arrays(before))
    return (hidden, *cell) if cell else hidden


def packed(case: BenchCase) -> TimedCall:
    """The data are packed before the clock starts."""
    over_vectors, vectors, expected = embedded(case)
    layer, data = _layer(over_vectors), pack_padded_sequence(pad(case), torch.tensor(case.lengths), enforce_sorted=False)
    return TimedCall(lambda: _last_state(layer, vectors(data)), expected=expected)


def _last_state(layer: torch.nn.RNNBase, data: Tensor | PackedSequence) -> Tensor:
    """Return the hidden state of the last level after each row, of both directions joined."""
    state = layer(data)[1]
    hidden: Tensor = state[0] if isinstance(state, tuple) else state
    return torch.cat((hidden[-2], hidden[-1]), dim=1) if layer.bidirectional else hidden[-1]


def _layer(case: BenchCase) -> torch.nn.RNNBase:
    """Return torch's layer, or stack of layers, with our weights, which have the same gate order."""
    levels, first = case.levels, case.levels[0][0]
    layer: torch.nn.RNNBase = (torch.nn.GRU if isinstance(first, GRUWeights) else torch.nn.LSTM)(
        first.input.shape[0],
        first.hidden,
        num_layers=len(levels),
        bidirectional=len(levels[0]) == 2,
        device=first.bias.device,
        dtype=first.bias.dtype,
    )
    for number, level in enumerate(levels):
        for weights, direction in zip(level, ("", "_reverse"), strict=False):
            _copy_weights(weights, layer, f"_l{number}{direction}")
    return layer.eval().requires_grad_(False)


def _copy_weights(weights: LSTMWeights | GRUWeights, layer: torch.nn.RNNBase, suffix: str) -> None:
    """Copy the weights of one direction of a level to torch's parameters with this suffix."""
    assert weights.input is not None and weights.bias is not None
    arrays = {
        "weight_ih": weights.input.T,
        "weight_hh": weights.recurrent.T,
        "bias_ih": weights.bias,
        "bias_hh": second_bias(weights),
    }
    for name, values in arrays.items():
        getattr(layer, f"{name}{suffix}").copy_(values)


def second_bias(weights: LSTMWeights | GRUWeights) -> Tensor:
    """Return the bias of the recurrent product, which other libraries have for every gate. Only the GRU uses it, for its new gate."""
    assert weights.bias is not None
    bias = torch.zeros_like(weights.bias)
    if isinstance(weights, GRUWeights):
        assert weights.recurrent_bias is not None
        bias[2 * weights.hidden :] = weights.recurrent_bias
    return bias
