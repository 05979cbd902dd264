"""Translates operators of torch that move numbers and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

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
KEPT = (Lengths, Order, State, BatchSizes)
"""Values that do not change when they take another shape."""


def first_argument(operation: ArchiveOperation) -> Any:
    return next(iter(operation.call.arguments.values()))


def same(operation: ArchiveOperation) -> Any:
    return first_argument(operation)


def clone(operation: ArchiveOperation) -> Any:
    value = first_argument(operation)
    return replace(value) if isinstance(value, Signal) else value


def dropout(operation: ArchiveOperation) -> Any:
    if operation.call.get("train"):
        operation.reading.note(f"{operation.call.name} is in training mode, and a model does not drop numbers")
    return first_argument(operation)


def to(operation: ArchiveOperation) -> Any:
    """Change the type of numbers."""
    value, dtype = first_argument(operation), operation.call.get("dtype")
    if not isinstance(value, Signal) or dtype is None or dtype in FLOAT_TYPES:
        return value
    if dtype in INTEGER_TYPES or dtype in HALVES:
        return operation.onnx("Cast", value, to=HALVES.get(dtype, TensorProto.INT64))
    raise ImportRefused("it rounds numbers that depend on the input")


def select(operation: ArchiveOperation) -> Any:
    value = first_argument(operation)
    if isinstance(value, BatchSizes):
        if operation["index"] != 0:
            raise ImportRefused("it reads how many sequences have a step")
        return operation.reading.batch
    if isinstance(value, State):
        return value
    return operation.onnx("Gather", value, operation["index"], axis=operation["dim"])


def slice_(operation: ArchiveOperation) -> Any:
    start, end, step = operation["start"], operation["end"], operation["step"]
    end = (1 << 62) if end is None else end
    value = first_argument(operation)
    return operation.onnx("Slice", value, [start or 0], [end], [operation["dim"]], [1 if step is None else step])


def narrow(operation: ArchiveOperation) -> Any:
    start, length = operation["start"], operation["length"]
    return operation.onnx("Slice", first_argument(operation), [start], [start + length], [operation["dim"]])


def transpose(operation: ArchiveOperation) -> Any:
    x = operation.x
    order = list(range(x.rank))
    first, second = (checked_axis(operation[name], x.rank) for name in ("dim0", "dim1"))
    order[first], order[second] = second, first
    return x.transpose(order)


def turn(operation: ArchiveOperation) -> Any:
    x = operation.x
    return x.transpose(range(x.rank)[::-1]) if x.rank > 1 else x


def permute(operation: ArchiveOperation) -> Any:
    return operation.x.transpose([axis % operation.x.rank for axis in operation["dims"]])


def reshape(operation: ArchiveOperation) -> Any:
    value = first_argument(operation)
    if isinstance(value, KEPT):
        return value
    return operation.onnx("Reshape", value, operation.call.get("size", operation.call.get("shape")), allowzero=1)


def flatten(operation: ArchiveOperation) -> Any:
    x = operation.x
    start, end = (checked_axis(operation[name], x.rank) for name in ("start_dim", "end_dim"))
    return x.reshape([*x.shape[:start], int(np.prod(x.shape[start : end + 1])), *x.shape[end + 1 :]])


def unflatten(operation: ArchiveOperation) -> Any:
    x, at = operation.x, checked_axis(operation["dim"], operation.x.rank)
    return operation.onnx("Reshape", x, [*x.shape[:at], *operation["sizes"], *x.shape[at + 1 :]])


def squeeze(operation: ArchiveOperation) -> Any:
    """Remove axes of one entry. Axes that have more stay, as in torch."""
    x = first_argument(operation)
    if isinstance(x, KEPT):
        return x
    given = operation.call.get("dim")
    axes = range(x.rank) if given is None else [given] if isinstance(given, int) else given
    return x.without_axes([axis for axis in (checked_axis(axis, x.rank) for axis in axes) if x.axes[axis].is_unit])


def unsqueeze(operation: ArchiveOperation) -> Any:
    value = first_argument(operation)
    return value if isinstance(value, KEPT) else value.with_units([checked_axis(operation["dim"], value.rank + 1)])


def expand(operation: ArchiveOperation) -> Any:
    x = operation.x
    sizes = list(operation["size"])
    shape = [1] * (len(sizes) - x.rank) + list(x.shape)
    return operation.onnx("Expand", x, [entries if size == -1 else size for size, entries in zip(sizes, shape, strict=True)])


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


def split(operation: ArchiveOperation) -> Any:
    """split, split_with_sizes and chunk."""
    x = operation.x
    at = checked_axis(operation["dim"], x.rank)
    size = x.shape[at]
    if operation.call.name == "chunk":
        each = -(-size // operation["chunks"])
        sizes = [min(each, size - start) for start in range(0, size, each)]
    else:
        given = operation.call.get("split_size", operation.call.get("split_sizes"))
        sizes = [min(given, size - start) for start in range(0, size, given)] if isinstance(given, int) else list(given)
    return operation.onnx("Split", x, sizes, outputs=len(sizes), axis=at)


def unbind(operation: ArchiveOperation) -> Any:
    x = first_argument(operation)
    if not isinstance(x, Signal):
        raise ImportRefused("it takes apart what is no tensor of the sequence")
    at = checked_axis(operation["dim"], x.rank)
    if not x.axes[at].is_columns:
        raise ImportRefused(f"it takes apart the axis of {x.axes[at]}")
    return [operation.onnx("Gather", x, index, axis=at) for index in range(x.shape[at])]


def flip(operation: ArchiveOperation) -> Any:
    x = operation.x
    for axis in operation["dims"]:
        x = operation.onnx("Slice", x, [-1], [-(1 << 62)], [checked_axis(axis, x.rank)], [-1])
    return x


def index_select(operation: ArchiveOperation) -> Any:
    value, index = first_argument(operation), operation["index"]
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
    **dict.fromkeys(("alias", "contiguous", "cpu", "detach", "lift_fresh_copy"), same),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout"), dropout),
    **dict.fromkeys(("to", "_to_copy", "type_as", "float"), to),
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), reshape),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), split),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    "cat": cat,
    "clone": clone,
    "expand": expand,
    "expand_as": expand_as,
    "flatten": flatten,
    "flip": flip,
    "index_select": index_select,
    "narrow": narrow,
    "numpy_T": turn,
    "permute": permute,
    "select": select,
    "slice": slice_,
    "squeeze": squeeze,
    "stack": stack,
    "t": turn,
    "transpose": transpose,
    "unbind": unbind,
    "unflatten": unflatten,
    "unsqueeze": unsqueeze,
}
