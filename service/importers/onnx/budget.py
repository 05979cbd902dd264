"""Bounds the numbers that the interpretation of a graph computes and copies: a small file must not fill the memory."""

from __future__ import annotations

import math

from onnx import TensorProto

from service.importers.draft import Array, ImportRefused

LARGEST = 1 << 24
"""Numbers of a computed tensor, unless an input is as large."""
FREE = 1 << 25
COPIES = 64
"""How often it may read or compute as many numbers as its weights have, in all readings of its inputs together."""


class Budget:
    """The numbers that a graph or a program may read and compute, beyond which it is refused. source: its name in the message."""

    def __init__(self, weights: int, source: str) -> None:
        self._source = source
        self._limit = FREE + COPIES * weights
        self._spent = 0

    def spend(self, numbers: int) -> None:
        self._spent += numbers
        if self._spent > self._limit:
            raise ImportRefused(
                f"the {self._source} copies and computes more than {self._limit} numbers, far more than its weights: export the model again"
            )


def number_count(tensor: TensorProto) -> int:
    """Return how many numbers a tensor of a file has, by its data."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return max(0, int(math.prod(tensor.dims)))
    return (
        len(tensor.raw_data) // 2
        + len(tensor.float_data)
        + len(tensor.int32_data)
        + len(tensor.int64_data)
        + len(tensor.double_data)
    )


def stored(array: Array) -> int:
    """Return how many numbers an array takes in memory: repeated numbers count once."""
    return math.prod(size for size, stride in zip(array.shape, array.strides, strict=True) if stride)


def check_size(shape: tuple[int, ...]) -> None:
    """Raise ImportRefused for the shape of a constant that is too large to compute with."""
    if math.prod(shape) > LARGEST or min(shape, default=0) < 0:
        raise ImportRefused(f"it makes a constant of the shape {shape}, and the limit is {LARGEST} numbers")
