"""Reference convolutions in plain PyTorch, with torch's norms, on one row at a time, and their weights in the layout of a model folder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm


def convolution(
    inputs: int, maps: int, width: int, *, dilation: int = 1, padding: str | int = 0, normed: bool = False
) -> nn.Conv1d:
    """Return a torch.nn.Conv1d. With weight norm, the magnitude differs from the norm of the direction, unlike torch's initial values."""
    conv = nn.Conv1d(inputs, maps, width, dilation=dilation, padding=padding)
    if normed:
        weight_norm(conv)
        conv.get_parameter("parametrizations.weight.original0").data.uniform_(0.5, 1.5)
    return conv


def batch_norm(maps: int) -> nn.BatchNorm1d:
    """Return a batch norm with statistics as after training."""
    norm = nn.BatchNorm1d(maps).eval()
    assert norm.running_mean is not None and norm.running_var is not None
    norm.weight.data.uniform_(0.5, 1.5)
    norm.bias.data.normal_()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


class TCNLevel(nn.Module):
    """Bai et al. 2018: two causal convolutions with ReLU, a residual connection, and another ReLU."""

    def __init__(self, inputs: int, channels: int, width: int, dilation: int, *, normed: bool) -> None:
        super().__init__()
        self.before = (width - 1) * dilation
        self.first = convolution(inputs, channels, width, dilation=dilation, normed=normed)
        self.second = convolution(channels, channels, width, dilation=dilation, normed=normed)
        self.projection = nn.Conv1d(inputs, channels, 1) if inputs != channels else None

    def forward(self, columns: Tensor) -> Tensor:
        """Return (channels, steps) of (inputs, steps)."""
        convolved = columns
        for conv in (self.first, self.second):
            convolved = conv(functional.pad(convolved, (self.before, 0))).relu()
        return (convolved + (self.projection(columns) if self.projection else columns)).relu()

    def named(self) -> dict[str, Tensor]:
        named = {**prefixed("0.", tensors(self.first)), **prefixed("1.", tensors(self.second))}
        return {**named, **(prefixed("projection.", tensors(self.projection)) if self.projection else {})}


def tensors(conv: nn.Conv1d) -> dict[str, Tensor]:
    assert conv.bias is not None
    if not hasattr(conv, "parametrizations"):
        return {"filters": conv.weight.permute(2, 1, 0), "bias": conv.bias}
    magnitude, direction = (conv.get_parameter(f"parametrizations.weight.original{which}") for which in (0, 1))
    return {"direction": direction.permute(2, 1, 0), "magnitude": magnitude.flatten(), "bias": conv.bias}


def statistics(norm: nn.BatchNorm1d) -> Tensor:
    """Return gain, offset, mean and variance, (4, maps)."""
    assert norm.running_mean is not None and norm.running_var is not None
    return torch.stack((norm.weight, norm.bias, norm.running_mean, norm.running_var))


def prefixed(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": array for name, array in named.items()}
