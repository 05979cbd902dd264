"""A temporal convolutional network (Bai et al. 2018) in plain torch: left padding, convolution, ReLU and residuals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d
from torch.nn.functional import pad as padded

from kernels.bench.baselines.baseline import TimedCall, pad
from kernels.bench.baselines.conv.padded_batch import until
from kernels.bench.case import BenchCase
from kernels.conv.types import ConvBlock


def layer_by_layer(case: BenchCase) -> TimedCall:
    """All arrays are (rows, channels, steps). The layers are causal, so padding after a row does not change it."""
    blocks: tuple[ConvBlock, ...] = case.weights
    data = pad(case).permute(1, 2, 0).contiguous()
    filters = [[(layer, layer.filters.permute(2, 1, 0).contiguous()) for layer in block.layers] for block in blocks]

    def run() -> Tensor:
        steps = data
        for block in filters:
            block_input = steps
            for layer, taps in block:
                steps = conv1d(padded(steps, (layer.left, 0)), taps, layer.bias, dilation=layer.dilation).relu_()
            steps = (steps + block_input).relu_()
        return steps

    if case.want == "steps":
        inside = until(case, case.lengths, data.shape[2])
        return TimedCall(run, lambda answer: answer.transpose(1, 2)[inside])
    last = torch.tensor(case.lengths, device=data.device)[:, None, None] - 1
    return TimedCall(lambda: run().take_along_dim(last, dim=2)[..., 0])
