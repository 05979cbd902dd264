"""torch's conv1d over a padded batch: a text CNN with ReLU and maximum over time, over vectors or token ids, a dense layer, or a TCN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d as library
from torch.nn.functional import embedding
from torch.nn.functional import pad as zero_pad
from torch.nn.utils.rnn import pad_sequence

from kernels.bench.baselines.baseline import Baseline, TimedCall, pad
from kernels.bench.baselines.comparison import square_product
from kernels.bench.case import BenchCase
from kernels.bench.workload import EMBEDDED, STACKS, Workload
from kernels.conv.types import ConvBlock, ConvWeights


def conv1d(case: BenchCase, channels_last: bool = False) -> TimedCall:
    """channels_last: data and filters with contiguous channels in memory, and the same shapes."""
    layers: tuple[ConvWeights, ...] = case.weights
    data = _in_layout(pad(case, at_least=max(layer.reach for layer in layers)).permute(1, 0, 2), channels_last)
    if case.want == "max":
        return _pooled(case, lambda: data, data.shape[2], channels_last)
    (layer,) = layers
    taps, inside = _filters(layer, channels_last), _until(case, case.lengths, data.shape[2])
    return TimedCall(
        lambda: library(data, taps, layer.bias, padding=layer.left).relu_(), lambda answer: answer.transpose(1, 2)[inside]
    )


def embedding_and_conv1d(case: BenchCase) -> TimedCall:
    """Look up the embedding first: (rows, steps, inputs)."""
    layers: tuple[ConvWeights, ...] = case.weights
    table, longest = layers[0].embedding, max(*case.lengths, *(layer.reach for layer in layers))
    assert table is not None
    ids = pad_sequence(list(torch.split(case.x.data, case.lengths)), batch_first=True)
    ids = zero_pad(ids, (0, longest - ids.shape[1]))
    return _pooled(case, lambda: embedding(ids, table).transpose(1, 2), longest, channels_last=False)


def layer_by_layer(case: BenchCase) -> TimedCall:
    """A temporal convolutional network (Bai et al. 2018).

    All arrays are (rows, channels, steps). The layers are causal, so padding after a row does not change it.
    """
    blocks: tuple[ConvBlock, ...] = case.weights
    data = pad(case).permute(1, 2, 0).contiguous()
    filters = [[(layer, layer.filters.permute(2, 1, 0).contiguous()) for layer in block.layers] for block in blocks]

    def run() -> Tensor:
        steps = data
        for block in filters:
            block_input = steps
            for layer, taps in block:
                steps = library(zero_pad(steps, (layer.left, 0)), taps, layer.bias, dilation=layer.dilation).relu_()
            steps = (steps + block_input).relu_()
        return steps

    if case.want == "steps":
        inside = _until(case, case.lengths, data.shape[2])
        return TimedCall(run, lambda answer: answer.transpose(1, 2)[inside])
    last = torch.tensor(case.lengths, device=data.device)[:, None, None] - 1
    return TimedCall(lambda: run().take_along_dim(last, dim=2)[..., 0])


def _pooled(case: BenchCase, data: Callable[[], Tensor], longest: int, channels_last: bool) -> TimedCall:
    """Pool every layer over (rows, inputs, longest), which `data` returns."""

    def prepared(layer: ConvWeights) -> Callable[[Tensor], Tensor]:
        taps = _filters(layer, channels_last)
        if not case.ragged:
            return lambda seen: library(seen, taps, layer.bias).relu_().amax(2)
        # Windows that reach into the padding must not change the maximum. After a ReLU, zeros do not.
        inside = _until(case, layer.steps(np.array(case.lengths)).tolist(), longest - layer.reach + 1)[:, None]
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


def _until(case: BenchCase, counts: list[int], longest: int) -> Tensor:
    """Return a mask (rows, longest) of the first `counts` positions of each row."""
    device = case.x.data.device
    return torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None]


def _over_vectors(workload: Workload) -> bool:
    return workload.kind in ("text-cnn", "dense-conv")


CONV = (
    Baseline("one product", square_product, condition=lambda workload: workload.kind == "product"),
    Baseline("torch conv1d", conv1d, condition=_over_vectors),
    # It is the same for both of our forms over ids, so it runs once.
    Baseline("torch conv1d", embedding_and_conv1d, condition=lambda work: (work.kind, work.form) == ("text-cnn-ids", EMBEDDED)),
    Baseline("torch conv1d", layer_by_layer, condition=lambda workload: workload.kind in STACKS),
    Baseline("channels last", partial(conv1d, channels_last=True), condition=_over_vectors),
)
