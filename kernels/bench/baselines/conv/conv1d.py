"""torch's conv1d over a padded batch: a text CNN with ReLU and maximum over time, over vectors or token ids, or a dense layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv1d as library
from torch.nn.functional import embedding
from torch.nn.utils.rnn import pad_sequence

from kernels.bench.baselines.baseline import TimedCall, pad
from kernels.bench.baselines.conv.padded_batch import until, whole_windows
from kernels.bench.case import BenchCase
from kernels.conv.types import ConvWeights


def conv1d(case: BenchCase) -> TimedCall:
    return _over(case, channels_last=False)


def channels_last(case: BenchCase) -> TimedCall:
    """Data and filters with contiguous channels in memory, and the same shapes."""
    return _over(case, channels_last=True)


def embedding_and_conv1d(case: BenchCase) -> TimedCall:
    """Look up the embedding first: (rows, steps, inputs)."""
    layers: tuple[ConvWeights, ...] = case.weights
    table, longest = layers[0].embedding, max(*case.lengths, *(layer.reach for layer in layers))
    assert table is not None
    ids = pad_sequence(list(torch.split(case.x.data, case.lengths)), batch_first=True)
    ids = torch.nn.functional.pad(ids, (0, longest - ids.shape[1]))
    return _pooled(case, lambda: embedding(ids, table).transpose(1, 2), longest, channels_last=False)


def _over(case: BenchCase, channels_last: bool) -> TimedCall:
    layers: tuple[ConvWeights, ...] = case.weights
    data = _in_layout(pad(case, at_least=max(layer.reach for layer in layers)).permute(1, 0, 2), channels_last)
    if case.want == "max":
        return _pooled(case, lambda: data, data.shape[2], channels_last)
    (layer,) = layers
    taps, inside = _filters(layer, channels_last), until(case, case.lengths, data.shape[2])
    return TimedCall(
        lambda: library(data, taps, layer.bias, padding=layer.left).relu_(), lambda answer: answer.transpose(1, 2)[inside]
    )


def _pooled(case: BenchCase, data: Callable[[], Tensor], longest: int, channels_last: bool) -> TimedCall:
    """Pool every layer over (rows, inputs, longest), which `data` returns."""

    def prepared(layer: ConvWeights) -> Callable[[Tensor], Tensor]:
        taps = _filters(layer, channels_last)
        if not case.ragged:
            return lambda seen: library(seen, taps, layer.bias).relu_().amax(2)
        # Windows that reach into the padding must not change the maximum. After a ReLU, zeros do not.
        inside = until(case, whole_windows(case, layer), longest - layer.reach + 1)[:, None]
        return lambda seen: (library(seen, taps, layer.bias).relu_() * inside).amax(2)

    pools = [prepared(layer) for layer in case.weights]

    def run() -> Tensor:
        seen = data()
        return torch.cat([pool(seen) for pool in pools], dim=1)

    return TimedCall(run)


def _filters(layer: ConvWeights, channels_last: bool) -> Tensor:
    """Return filters (outputs, inputs, width)."""
    return _in_layout(layer.filters.permute(2, 0, 1), channels_last)


def _in_layout(values: Tensor, channels_last: bool) -> Tensor:
    """Transpose (rows, steps, channels) to (rows, channels, steps), with or without moving the data."""
    return values.contiguous().transpose(1, 2) if channels_last else values.transpose(1, 2).contiguous()
