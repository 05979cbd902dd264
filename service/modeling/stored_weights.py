"""How the precision of a model stores its arrays in weights.safetensors.

A precision of floats stores every array in its dtype. The precision int8 stores a matrix as int8 numbers, with a float32 scale for each
column in the tensor `NAME.scale`, and every other array as float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantized import LEVELS, dequantize, quantize
from kernels.ragged import STORAGE
from service.modeling.spec import ModelSpec

INT8 = "int8"
SCALE = ".scale"
"""The end of the name of a matrix's scales."""
BATCH_NORM_ROWS = 4
"""Gain, offset, mean and variance. A layer norm has two rows."""


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor in weights.safetensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tensor_forms(spec: ModelSpec) -> dict[str, TensorForm]:
    """Return the form of every tensor in weights.safetensors, by name."""
    shapes = spec.tensors()
    if spec.precision != INT8:
        return {name: TensorForm(shape, STORAGE[spec.precision]) for name, shape in shapes.items()}
    forms = {name: TensorForm(shape, torch.float32) for name, shape in shapes.items()}
    for name in spec.matrices():
        forms[name] = TensorForm(shapes[name], torch.int8)
        forms[name + SCALE] = TensorForm(shapes[name][-1:], torch.float32)
    return forms


def to_stored(arrays: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Return the tensors that store the arrays of a model. Missing and unknown arrays stay missing and unknown."""
    if spec.precision != INT8:
        return {name: array.to(STORAGE[spec.precision]).contiguous() for name, array in arrays.items()}
    stored = {name: array.float().contiguous() for name, array in arrays.items()}
    for name in spec.matrices():
        if name in arrays:
            stored[name], stored[name + SCALE] = quantize(stored[name])
    return stored


def from_stored(stored: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Return the arrays of a model from the tensors that store them; matrices of int8 numbers become float32."""
    if spec.precision != INT8:
        return dict(stored)
    return {
        name: dequantize(stored[name], stored[name + SCALE]) if name + SCALE in stored else stored[name]
        for name in spec.tensors()
    }


def wrong_values(name: str, tensor: Tensor) -> str | None:
    """Return the error in the values of a tensor in weights.safetensors, or None."""
    if tensor.dtype == torch.int8:
        below = bool((tensor < -LEVELS).any())
        return f"has numbers below -{LEVELS}: int8 weights are from -{LEVELS} to {LEVELS}" if below else None
    if not name.endswith(SCALE):
        return _not_finite(tensor) or _not_foldable(name, tensor)
    if not bool(torch.isfinite(LEVELS * tensor).all()):
        return "has scales that are not finite, or too large for finite weights"
    return "has negative scales" if bool((tensor < 0).any()) else None


def _not_foldable(name: str, tensor: Tensor) -> str | None:
    """Return why a batch norm or the direction of a weight norm cannot become part of the filters, or None."""
    part = name.rpartition(".")[2]
    if part == "norm" and len(tensor) == BATCH_NORM_ROWS:
        negative = (tensor[3] < 0).nonzero()
        if len(negative):
            return f"has a negative variance, {float(tensor[3][negative[0]]):g} of map {int(negative[0])}: write the running variance"
    if part == "direction":
        zero = (tensor.float().abs().amax((0, 1)) == 0).nonzero()
        if len(zero):
            return (
                f"is zero for map {int(zero[0])}, and weight norm divides by its length: write the filters without weight_norm"
            )
    return None


def _not_finite(tensor: Tensor) -> str | None:
    """Return how many values of a tensor are not finite, and where the first of them is, or None."""
    wrong = ~torch.isfinite(tensor)
    if not bool(wrong.any()):
        return None
    first = wrong.nonzero()[0].tolist()
    return f"has {int(wrong.sum())} values that are not finite, the first at {first}: {float(tensor[tuple(first)])}"
