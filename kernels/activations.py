"""Activations by name, for cells and layers that do not fuse their activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu6": lambda x: x.clamp(0, 6),
    "leaky_relu": lambda x, alpha: torch.where(x < 0, alpha * x, x),
    "thresholded_relu": lambda x, alpha: torch.where(x > alpha, x, 0.0),
    "elu": lambda x, alpha: torch.where(x < 0, alpha * torch.expm1(x), x),
    "selu": functional.selu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "softsign": functional.softsign,
    "hard_sigmoid": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "hard_tanh": lambda x: x.clamp(-1, 1),
    "clip": lambda x, alpha, beta: x.clamp(alpha, beta),
    "scaled_tanh": lambda x, alpha, beta: alpha * torch.tanh(beta * x),
    "affine": lambda x, alpha, beta: alpha * x + beta,
    "exponential": torch.exp,
}
"""The functions of a tensor and of the parameters alpha and beta, named and defined as in ONNX; gelu has the error function, and alpha
and beta of clip are its minimum and maximum."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of every number. kind: a key of FUNCTIONS; parameters: its parameters, in order."""

    kind: str
    parameters: tuple[float, ...] = ()

    def __call__(self, values: Tensor) -> Tensor:
        return FUNCTIONS[self.kind](values, *self.parameters)


NONE, SIGMOID, TANH = Activation("none"), Activation("sigmoid"), Activation("tanh")
