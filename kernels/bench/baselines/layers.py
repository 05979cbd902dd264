"""torch.nn.LSTM and torch.nn.GRU, padded and packed: cuDNN on a GPU, oneDNN or torch's own loop on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from kernels.bench.agreement import expected_answer
from kernels.bench.baselines.baseline import TimedCall, last, pad, pad_ids
from kernels.bench.case import BenchCase, embedded_case
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMWeights


def padded(case: BenchCase) -> TimedCall:
    """Compute the padding as well, then take the last step of each row, or every step of rows with equal lengths."""
    layer, data = _layer(case), pad(case)
    if case.want == "steps":
        return TimedCall(lambda: layer(data)[0], lambda steps: steps.transpose(0, 1).flatten(0, 1))
    take = last(case)
    return TimedCall(lambda: take(layer(data)[0]))


def padded_over_ids(case: BenchCase) -> TimedCall:
    """An embedding of the padded token ids, then the layer."""
    embedding, embedded = embedded_case(case)
    layer, take, ids = _layer(embedded), last(case), pad_ids(case)
    return TimedCall(lambda: take(layer(functional.embedding(ids, embedding))[0]), expected=expected_answer(embedded))


def packed(case: BenchCase) -> TimedCall:
    """The data are packed before the clock starts."""
    layer, data = _layer(case), pack_padded_sequence(pad(case), torch.tensor(case.lengths), enforce_sorted=False)
    return TimedCall(lambda: _last_of_packed(layer, data))


def packed_over_ids(case: BenchCase) -> TimedCall:
    """An embedding of token ids that are packed before the clock starts, then the layer."""
    embedding, embedded = embedded_case(case)
    layer, ids = _layer(embedded), pack_padded_sequence(pad_ids(case), torch.tensor(case.lengths), enforce_sorted=False)
    return TimedCall(
        lambda: _last_of_packed(layer, ids._replace(data=functional.embedding(ids.data, embedding))),
        expected=expected_answer(embedded),
    )


def _last_of_packed(layer: torch.nn.RNNBase, data: PackedSequence) -> Tensor:
    state = layer(data)[1]
    hidden: Tensor = state[0] if isinstance(state, tuple) else state
    return hidden[0]


def _layer(case: BenchCase) -> torch.nn.RNNBase:
    """Return torch's layer with our weights, which have the same gate order."""
    weights: LSTMWeights | GRUWeights = case.weights[0]
    assert weights.input is not None and weights.bias is not None
    size, like = (weights.input.shape[0], weights.hidden), {"device": weights.bias.device, "dtype": weights.bias.dtype}
    layer: torch.nn.RNNBase = torch.nn.GRU(*size, **like) if isinstance(weights, GRUWeights) else torch.nn.LSTM(*size, **like)
    parameters = layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0
    for parameter, values in zip(
        parameters, (weights.input.T, weights.recurrent.T, weights.bias, second_bias(weights)), strict=True
    ):
        assert isinstance(parameter, Tensor)
        parameter.copy_(values)
    return layer.eval().requires_grad_(False)


def second_bias(weights: LSTMWeights | GRUWeights) -> Tensor:
    """Return the bias of the recurrent product, which other libraries have for every gate. Only the GRU uses it, for its new gate."""
    assert weights.bias is not None
    bias = torch.zeros_like(weights.bias)
    if isinstance(weights, GRUWeights):
        assert weights.recurrent_bias is not None
        bias[2 * weights.hidden :] = weights.recurrent_bias
    return bias
