"""A temporal convolutional network as one writes it in torch: each layer padded on the left, convolved and activated, then what came in
added (Bai et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d
from torch.nn.functional import pad as padded

from kernels.bench.baselines.baseline import Call, pad
from kernels.bench.baselines.conv.batch import until
from kernels.bench.given import Given
from kernels.contract import ConvBlock


def layer_by_layer(given: Given) -> Call:
    """(rows, channels, steps) throughout; padding after a row's end is seen by no step of it."""
    blocks: tuple[ConvBlock, ...] = given.weights
    data = pad(given).permute(1, 2, 0).contiguous()
    filters = [[(layer, layer.filters.permute(2, 1, 0).contiguous()) for layer in block.layers] for block in blocks]

    def run() -> Tensor:
        steps = data
        for block in filters:
            entered = steps
            for layer, taps in block:
                steps = conv1d(padded(steps, (layer.left, 0)), taps, layer.bias, dilation=layer.dilation).relu_()
            steps = (steps + entered).relu_()
        return steps

    if given.want == "steps":
        own = until(given, given.lengths, data.shape[2])
        return Call(run, lambda answer: answer.transpose(1, 2)[own])
    last = torch.tensor(given.lengths, device=data.device)[:, None, None] - 1
    return Call(lambda: run().take_along_dim(last, dim=2)[..., 0])
