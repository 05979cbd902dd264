"""torch.nn.LSTM and torch.nn.GRU: cuDNN on a GPU, oneDNN or torch's own loop on a CPU. Padded, and as a packed sequence."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from kernels.bench.baselines.baseline import Call, last, pad
from kernels.bench.given import Given
from kernels.contract import GRUWeights, LSTMWeights


def padded(given: Given) -> Call:
    """Steps beyond a row's end are computed, and the row's last step is taken out afterwards; or all of rows of equal length."""
    layer, data = _layer(given), pad(given)
    if given.want == "steps":
        return Call(lambda: layer(data)[0], lambda steps: steps.transpose(0, 1).flatten(0, 1))
    take = last(given)
    return Call(lambda: take(layer(data)[0]))


def packed(given: Given) -> Call:
    """Packing takes time as well, but it is left out, as if the data had come packed."""
    layer, data = _layer(given), pack_padded_sequence(pad(given), torch.tensor(given.lengths), enforce_sorted=False)

    def run() -> Tensor:
        state = layer(data)[1]
        hidden: Tensor = state[0] if isinstance(state, tuple) else state
        return hidden[0]

    return Call(run)


def _layer(given: Given) -> torch.nn.RNNBase:
    """The gate blocks are in torch's order already. torch has two biases, of which only the GRU needs the second."""
    weights: LSTMWeights | GRUWeights = given.weights[0]
    assert weights.input is not None and weights.bias is not None
    size, like = (weights.input.shape[0], weights.hidden), {"device": weights.bias.device, "dtype": weights.bias.dtype}
    second = torch.zeros_like(weights.bias)
    layer: torch.nn.RNNBase
    if isinstance(weights, GRUWeights):
        assert weights.recurrent_bias is not None
        second[2 * weights.hidden :] = weights.recurrent_bias
        layer = torch.nn.GRU(*size, **like)
    else:
        layer = torch.nn.LSTM(*size, **like)
    own = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
    for parameter, values in zip(own, (weights.input.T, weights.recurrent.T, weights.bias, second), strict=True):
        assert isinstance(parameter, Tensor)
        parameter.copy_(values)
    return layer.eval().requires_grad_(False)
