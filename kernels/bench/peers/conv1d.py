"""torch's conv1d over a padded batch: a text CNN with ReLU and the maximum over time, or a dense layer that gives every step."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.given import Given
from kernels.bench.peers.peer import Call, pad
from kernels.contract import ConvWeights


def conv1d(given: Given) -> Call:
    layers: tuple[ConvWeights, ...] = given.weights
    data = pad(given, at_least=max(layer.reach for layer in layers)).permute(1, 2, 0).contiguous()
    filters = [(layer.filters.permute(2, 1, 0).contiguous(), layer.bias, layer.left) for layer in layers]

    def convolved(filters: Tensor, bias: Tensor, left: int) -> Tensor:
        return torch.nn.functional.conv1d(data, filters, bias, padding=left).relu_()

    if given.want == "steps":
        ours = _until(given, given.lengths, data.shape[2])
        return Call(lambda: convolved(*filters[0]), lambda answer: answer.transpose(1, 2)[ours])
    if not given.ragged:
        return Call(lambda: torch.cat([convolved(*one).amax(2) for one in filters], dim=1))
    # Windows that reach into the padding must not win the maximum; after a ReLU nothing is below zero.
    whole = [[max(steps - layer.reach + 1, 0) for steps in given.lengths] for layer in layers]
    masks = [
        _until(given, counts, data.shape[2] - layer.reach + 1)[:, None] for layer, counts in zip(layers, whole, strict=True)
    ]
    both = list(zip(filters, masks, strict=True))
    return Call(lambda: torch.cat([(convolved(*one) * mask).amax(2) for one, mask in both], dim=1))


def _until(given: Given, counts: list[int], longest: int) -> Tensor:
    """(rows, longest): whether a position is one of the first so many of its row."""
    device = given.x.data.device
    return torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None]
