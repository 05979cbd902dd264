"""Translates operators that only move the entries of a tensor: shapes, slices, and the steps and directions that a graph takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from service.importers.chain import operations
from service.importers.chain.nodes import Input
from service.importers.chain.signal import Role, Signal, concatenate
from service.importers.chain.values import Constant, Lengths, Mask, Order, State, Value
from service.importers.draft import ImportRefused
from service.importers.onnx.budget import check_size
from service.importers.onnx.operation import Operation, checked_axis

INTEGERS = (TensorProto.INT32, TensorProto.INT64)
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *HALVES)


def same(operation: Operation) -> Value:
    """Identity, and operators that do nothing in a trained model."""
    value = operation.inputs[0]
    assert value is not None
    return value


def dropout(operation: Operation) -> Value:
    if operation.has(2) and bool(operation.constant(2, "training_mode").any()):
        operation.reading.note(f"{operation.label} is in training mode, and a model does not drop numbers")
    return same(operation)


def cast(operation: Operation) -> Value:
    value, to = operation.inputs[0], operation.attributes["to"]
    if isinstance(value, Signal) and to in HALVES:
        operation.reading.note(f"{operation.label} rounds to 16 bits, and the model computes in float32")
    if not isinstance(value, Signal) or to in FLOATS:
        return same(operation)
    node = value.parts[0]
    if to in INTEGERS and isinstance(node, Input) and node.width == 1:
        return replace(value, parts=(operation.reading.ids,))
    if operations.is_of_ids(value):
        return value
    raise ImportRefused("it rounds numbers that depend on the input")


def constant_of_shape(operation: Operation) -> Value:
    fill = operation.attributes.get("value")
    number = np.zeros(1, np.float32) if fill is None else fill
    shape = tuple(operation.integers(0, "shape"))
    check_size(shape)
    return Constant(np.broadcast_to(number.reshape(()), shape))


def shape(operation: Operation) -> Value:
    value = operation.inputs[0]
    if isinstance(value, Constant):
        sizes = value.array.shape
    elif isinstance(value, Lengths | Order):
        sizes = (operation.reading.batch,)
    else:
        sizes = operation.signal.shape
    return Constant(np.array(sizes[operation.attributes.get("start", 0) : operation.attributes.get("end")], np.int64))


def transpose(operation: Operation) -> Value:
    x = operation.signal
    return x.transpose(operation.attributes.get("perm", range(x.rank)[::-1]))


def reshape(operation: Operation) -> Value:
    x, target = operation.signal, operation.integers(1, "shape")
    keeps = not operation.attributes.get("allowzero", 0)
    sizes = [x.shape[index] if size == 0 and keeps and index < x.rank else size for index, size in enumerate(target)]
    if -1 in sizes:
        known = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = int(np.prod(x.shape)) // max(known, 1)
    return x.reshape(sizes)


def flatten(operation: Operation) -> Value:
    x = operation.signal
    at = operation.attributes.get("axis", 1) % (x.rank + 1)
    return x.reshape([int(np.prod(x.shape[:at])), int(np.prod(x.shape[at:]))])


def squeeze(operation: Operation) -> Value:
    x = operation.signal
    axes = operation.axes(x.rank)
    return x.without_axes([index for index, one in enumerate(x.axes) if one.is_unit] if axes is None else axes)


def unsqueeze(operation: Operation) -> Value:
    x = operation.signal
    given = operation.attributes.get("axes") or operation.integers(1, "axes")
    return x.with_units([checked_axis(index, x.rank + len(given)) for index in given])


def expand(operation: Operation) -> Value:
    value = operation.inputs[0]
    sizes = operation.integers(1, "shape")
    if isinstance(value, Constant):
        shape = np.broadcast_shapes(value.array.shape, tuple(sizes))
        check_size(shape)
        return Constant(np.broadcast_to(value.array, shape), value.origins)
    return operation.signal.expand(sizes)


def concat(operation: Operation) -> Value:
    signals = [value for value in operation.inputs if isinstance(value, Signal)]
    if len(signals) < len(operation.inputs):
        raise ImportRefused("it joins numbers that depend on the input to others that do not")
    return concatenate(signals, checked_axis(operation.attributes["axis"], signals[0].rank))


def split(operation: Operation) -> list[Value]:
    x = operation.signal
    at = checked_axis(operation.attributes.get("axis", 0), x.rank)
    count = len(operation.node.output)
    sizes = operation.attributes.get("split") or (operation.integers(1, "split") if operation.has(1) else None)
    if sizes is None:
        sizes = [len(part) for part in np.array_split(range(x.shape[at]), count)]
    if min(sizes) < 0 or sum(sizes) != x.shape[at]:
        raise ImportRefused(f"it splits an axis of {x.shape[at]} entries into {sizes}")
    ends = np.cumsum(sizes)
    return [_slice(x, at, int(end) - size, int(end), 1) for size, end in zip(sizes, ends, strict=True)]


def slice_(operation: Operation) -> Value:
    x = operation.signal
    names = ("starts", "ends", "axes", "steps")
    given: list[Any] = [operation.attributes.get(name) for name in names]
    for index, name in enumerate(names, start=1):
        if operation.has(index):
            given[index - 1] = operation.integers(index, name)
    starts, ends, axes, steps = given
    axes = range(len(starts)) if axes is None else axes
    for start, end, index, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        x = _slice(x, checked_axis(index, x.rank), start, end, step)
    return x


def gather(operation: Operation) -> Value:
    table, indexes = operation.inputs[0], operation.inputs[1]
    at = operation.attributes.get("axis", 0)
    if isinstance(table, Constant) and isinstance(indexes, Signal):
        return _embedding(operation, indexes, at)
    if isinstance(table, State):
        return table
    x = operation.signal
    at = checked_axis(at, x.rank)
    if isinstance(indexes, Order):
        return x.sorted_rows(at, restores=indexes.restores)
    chosen = operation.constant(1, "indices").astype(np.int64)
    if x.is_on(at, Role.STEPS):
        if chosen.size != 1:
            raise ImportRefused("it takes several steps by their numbers: a model takes the first or the last step")
        step = operations.take(x, at, int(chosen.ravel()[0]))
        return step.with_units([at]) if chosen.ndim == 1 else step
    size = x.shape[at]
    if ((chosen < -size) | (chosen >= size)).any():
        raise ImportRefused(f"it takes entries that its input of {size} entries does not have")
    return x.take(chosen % size, at)


def gather_elements(operation: Operation) -> Value:
    """Take the last step of each sequence, at its length minus one."""
    x, indexes = operation.signal, operation.inputs[1]
    at = checked_axis(operation.attributes.get("axis", 0), x.rank)
    if not (isinstance(indexes, Lengths) and indexes.plus == -1 and x.is_on(at, Role.STEPS)):
        raise ImportRefused("it takes other entries than the last step of each sequence")
    operation.reading.lengths = True
    return operations.pool_steps(x, "last_step", keep_axis=True)


def reverse_sequence(operation: Operation) -> Value:
    x, lengths = operation.signal, operation.inputs[1]
    at = checked_axis(operation.attributes.get("time_axis", 0), x.rank)
    if not x.is_on(at, Role.STEPS):
        raise ImportRefused("it reverses an axis that is not the steps")
    if isinstance(lengths, Constant) and (lengths.array != x.shape[at]).any():
        raise ImportRefused("it reverses some of the steps")
    return operations.reverse_steps(x)


def pad(operation: Operation) -> Value:
    x = operation.signal
    amounts = operation.attributes.get("pads") or operation.integers(1, "pads")
    number = float(operation.constant(2, "constant_value")) if operation.has(2) else operation.attributes.get("value", 0.0)
    if operation.attributes.get("mode", "constant") != "constant" or number:
        raise ImportRefused("it pads with other numbers than zero")
    axes = operation.integers(3, "axes") if operation.has(3) else range(x.rank)
    before, after = amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :]
    for index, first, last in zip(axes, before, after, strict=True):
        if (first or last) and not x.is_on(index, Role.STEPS):
            raise ImportRefused("it pads another axis than the steps")
        if first < 0 or last < 0:
            x = operations.cut_steps(x, max(-first, 0), max(-last, 0))
        if first > 0 or last > 0:
            x = operations.pad_steps(x, max(first, 0), max(last, 0))
    return x


def top_k(operation: Operation) -> list[Value]:
    """Sort all lengths in descending order, as torch does before it packs sequences."""
    lengths = operation.inputs[0]
    count = operation.integers(1, "K")
    if (
        not isinstance(lengths, Lengths)
        or lengths.plus
        or count != [operation.reading.batch]
        or not operation.attributes.get("largest", 1)
    ):
        raise ImportRefused("it sorts something else than the lengths of the sequences")
    return [lengths, Order()]


def scatter_elements(operation: Operation) -> Value:
    """Invert an order: write 0, 1, 2, ... to its indexes."""
    order, numbers = operation.inputs[1], operation.constant(2, "updates")
    if not isinstance(order, Order) or not np.array_equal(numbers, np.arange(operation.reading.batch)):
        raise ImportRefused("it writes numbers into a tensor, which no layer of model.toml does")
    return Order(restores=not order.restores)


def _embedding(operation: Operation, ids: Signal, at: int) -> Value:
    table = operation.weights(0, "data")
    if table.ndim != 2 or at % table.ndim != 0:
        raise ImportRefused(
            f"it looks up a table of shape {table.shape} along axis {at}: an embedding has one row for each token id"
        )
    return operations.embedding(ids, table, operation.label, operation.origins)


def _slice(x: Signal, at: int, start: int, end: int, step: int) -> Signal:
    return operations.take(x, at, slice(start, None if end < -x.shape[at] and step < 0 else end, step))


def _kept(operator: Callable[[Operation], Value]) -> Callable[[Operation], Value]:
    """Return an operator that leaves states, lengths and masks as they are."""

    def operate(operation: Operation) -> Value:
        value = operation.inputs[0]
        return value if isinstance(value, State | Lengths | Mask | Order) else operator(operation)

    return operate


def _each(operator: Callable[[Operation], list[Value]]) -> Callable[[Operation], list[Value]]:
    """Return an operator with several outputs that leaves states as they are."""

    def operate(operation: Operation) -> list[Value]:
        value = operation.inputs[0]
        return [value] * len(operation.node.output) if isinstance(value, State) else operator(operation)

    return operate


Operator = Callable[[Operation], Value | Sequence[Value]]

OPERATORS: dict[str, Operator] = {
    "Cast": cast,
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "Dropout": dropout,
    "Expand": _kept(expand),
    "Flatten": _kept(flatten),
    "Gather": gather,
    "GatherElements": gather_elements,
    "Identity": same,
    "Pad": pad,
    "Reshape": _kept(reshape),
    "ReverseSequence": reverse_sequence,
    "ScatterElements": scatter_elements,
    "Shape": shape,
    "Slice": _kept(slice_),
    "Split": _each(split),
    "Squeeze": _kept(squeeze),
    "TopK": top_k,
    "Transpose": _kept(transpose),
    "Unsqueeze": _kept(unsqueeze),
}
