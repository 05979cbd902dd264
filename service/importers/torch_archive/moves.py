"""Translates operators of torch that move numbers and compute nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor

from service.importers.chain import operations
from service.importers.chain.signal import Signal
from service.importers.chain.values import Lengths, Order, State
from service.importers.draft import ImportRefused
from service.importers.onnx.operation import checked_axis
from service.importers.torch_archive.operation import ArchiveOperation
from service.importers.torch_archive.packing import BatchSizes

INTEGER_TYPES = (3, 4)
"""int32 and int64 by their numbers in schemas of operators."""
HALVES = {5: TensorProto.FLOAT16, 15: TensorProto.BFLOAT16}
FLOAT_TYPES = (6, 7)
VIEWS = (
    *("chunk", "narrow", "numpy_T", "permute", "select", "slice", "split", "split_with_sizes", "t", "transpose", "unbind"),
)
KEPT = (Lengths, Order, State, BatchSizes)
"""Values that do not change when they take another shape."""


def clone(operation: ArchiveOperation) -> Any:
    value = operation.first
    return replace(value) if isinstance(value, Signal) else value


def dropout(operation: ArchiveOperation) -> Any:
    if operation.call.get("train"):
        operation.reading.note(f"{operation.call.name} is in training mode, and a model does not drop numbers")
    return operation.first


def to(operation: ArchiveOperation) -> Any:
    """Change the type of numbers."""
    value, dtype = operation.first, operation.call.get("dtype")
    if not isinstance(value, Signal) or dtype is None or dtype in FLOAT_TYPES:
        return value
    if dtype in INTEGER_TYPES or dtype in HALVES:
        return operation.onnx("Cast", value, to=HALVES.get(dtype, TensorProto.INT64))
    raise ImportRefused("it rounds numbers that depend on the input")


def view(operation: ArchiveOperation) -> Any:
    """Operators with results that are views of the first argument. torch tells which entries they have, on a tensor without numbers."""
    value = operation.first
    if isinstance(value, BatchSizes):
        if operation["index"] != 0:
            raise ImportRefused("it reads how many sequences have a step")
        return operation.reading.batch
    if isinstance(value, State):
        return value
    shape = operation.x.shape
    strides = [math.prod(size + 1 for size in shape[:axis]) for axis in range(len(shape))]
    views = operation.compute(torch.empty_strided(shape, strides, device="meta"))
    if isinstance(views, Tensor):
        return _viewed(operation.x, views, strides)
    return [_viewed(operation.x, each, strides) for each in views]


def _viewed(x: Signal, view: Tensor, strides: Sequence[int]) -> Signal:
    """Return the entries of a signal that a view has. strides: of the whole tensor, by which the view tells its axes and its start."""
    order = [bisect_right(strides, stride) - 1 for stride in view.stride()]
    for axis in reversed(range(x.rank)):
        start = view.storage_offset() // strides[axis] % (x.shape[axis] + 1)
        if axis in order:
            place = order.index(axis)
            step = view.stride()[place] // strides[axis]
            x = operations.take(x, axis, slice(start, start + step * view.shape[place], step))
        else:
            x = operations.take(x, axis, start)
    return x.transpose([sorted(order).index(axis) for axis in order])


def reshape(operation: ArchiveOperation) -> Any:
    """Operators that give the entries another shape."""
    return operation.first if isinstance(operation.first, KEPT) else operation.x.reshape(operation.result_shape)


def squeeze(operation: ArchiveOperation) -> Any:
    """Remove axes of one entry. Axes that have more stay, as in torch."""
    x = operation.first
    if isinstance(x, KEPT):
        return x
    given = operation.call.get("dim")
    axes = range(x.rank) if given is None else [given] if isinstance(given, int) else given
    return x.without_axes([axis for axis in (checked_axis(axis, x.rank) for axis in axes) if x.axes[axis].is_unit])


def expand_as(operation: ArchiveOperation) -> Any:
    other = operation["other"]
    return operation.onnx("Expand", operation["self"], list(other.shape if isinstance(other, Signal) else other.array.shape))


def cat(operation: ArchiveOperation) -> Any:
    return operation.onnx("Concat", *operation["tensors"], axis=operation["dim"])


def stack(operation: ArchiveOperation) -> Any:
    tensors = operation["tensors"]
    if not all(isinstance(value, Signal) for value in tensors):
        raise ImportRefused("it joins numbers that depend on the input to others that do not")
    at = checked_axis(operation["dim"], tensors[0].rank + 1)
    return operation.onnx("Concat", *(value.with_units([at]) for value in tensors), axis=at)


def flip(operation: ArchiveOperation) -> Any:
    x = operation.x
    for axis in operation["dims"]:
        x = operation.onnx("Slice", x, [-1], [-(1 << 62)], [checked_axis(axis, x.rank)], [-1])
    return x


def index_select(operation: ArchiveOperation) -> Any:
    value, index = operation.first, operation["index"]
    if isinstance(value, State | Lengths) and isinstance(index, Order):
        return value
    return operation.onnx("Gather", value, index, axis=operation["dim"])


def pad(operation: ArchiveOperation) -> Any:
    """Add zeros. torch counts axes from the last."""
    call = operation.call
    if call.get("mode", "constant") != "constant" or call.get("value"):
        raise ImportRefused("it pads with other numbers than zero")
    x, amounts = operation.x, list(call["pad"])
    axes = [x.rank - 1 - index for index in range(len(amounts) // 2)]
    return operation.onnx("Pad", x, [*amounts[::2], *amounts[1::2]], None, axes)


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = {
    **dict.fromkeys(("alias", "contiguous", "cpu", "detach", "lift_fresh_copy"), lambda operation: operation.first),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout"), dropout),
    **dict.fromkeys(("to", "_to_copy", "type_as", "float"), to),
    **dict.fromkeys(("flatten", "reshape", "unflatten", "_unsafe_view", "unsqueeze", "view"), reshape),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    "cat": cat,
    "clone": clone,
    "expand": lambda operation: operation.x.expand(operation.result_shape),
    "expand_as": expand_as,
    "flip": flip,
    "index_select": index_select,
    "squeeze": squeeze,
    "stack": stack,
}
