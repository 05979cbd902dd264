"""torch's conv1d over a padded batch: a text CNN with ReLU and the maximum over time, over vectors or over token ids, or a dense layer that
gives every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv1d as library
from torch.nn.functional import embedding
from torch.nn.utils.rnn import pad_sequence

from kernels.bench.baselines.baseline import Call, pad
from kernels.bench.baselines.conv.batch import until, whole_windows
from kernels.bench.given import Given
from kernels.contract import ConvWeights


def conv1d(given: Given) -> Call:
    return _over(given, channels_last=False)


def channels_last(given: Given) -> Call:
    """The same numbers under the same names of axes; data and filters lie in memory with the channels beside each other."""
    return _over(given, channels_last=True)


def embedding_and_conv1d(given: Given) -> Call:
    """The vectors of token ids are looked up first, (rows, steps, inputs)."""
    layers: tuple[ConvWeights, ...] = given.weights
    table, longest = layers[0].embedding, max(*given.lengths, *(layer.reach for layer in layers))
    assert table is not None
    ids = pad_sequence(list(torch.split(given.x.data, given.lengths)), batch_first=True)
    ids = torch.nn.functional.pad(ids, (0, longest - ids.shape[1]))
    return _pooled(given, lambda: embedding(ids, table).transpose(1, 2), longest, channels_last=False)


def _over(given: Given, channels_last: bool) -> Call:
    layers: tuple[ConvWeights, ...] = given.weights
    data = _laid_out(pad(given, at_least=max(layer.reach for layer in layers)).permute(1, 0, 2), channels_last)
    if given.want == "max":
        return _pooled(given, lambda: data, data.shape[2], channels_last)
    (layer,) = layers
    taps, own = _filters(layer, channels_last), until(given, given.lengths, data.shape[2])
    return Call(lambda: library(data, taps, layer.bias, padding=layer.left).relu_(), lambda answer: answer.transpose(1, 2)[own])


def _pooled(given: Given, data: Callable[[], Tensor], longest: int, channels_last: bool) -> Call:
    """data gives (rows, inputs, longest)."""

    def prepared(layer: ConvWeights) -> Callable[[Tensor], Tensor]:
        taps = _filters(layer, channels_last)
        if not given.ragged:
            return lambda seen: library(seen, taps, layer.bias).relu_().amax(2)
        # Windows that reach into the padding must not win the maximum; after a ReLU nothing is below zero.
        own = until(given, whole_windows(given, layer), longest - layer.reach + 1)[:, None]
        return lambda seen: (library(seen, taps, layer.bias).relu_() * own).amax(2)

    pools = [prepared(layer) for layer in given.weights]

    def run() -> Tensor:
        seen = data()
        return torch.cat([pool(seen) for pool in pools], dim=1)

    return Call(run)


def _filters(layer: ConvWeights, channels_last: bool) -> Tensor:
    """(outputs, inputs, width)"""
    return _laid_out(layer.filters.permute(2, 0, 1), channels_last)


def _laid_out(values: Tensor, channels_last: bool) -> Tensor:
    """(rows, steps, channels) to (rows, channels, steps), which lie in memory as they came or as they are named."""
    return values.contiguous().transpose(1, 2) if channels_last else values.transpose(1, 2).contiguous()
