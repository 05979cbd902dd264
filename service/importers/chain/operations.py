"""The operations of sequence models on signals. Sources translate their own operators into these.

Every function raises ImportRefused for a computation that no layer of model.toml has. `at` is the axis of columns on which an operation
works; all other axes of columns have one entry. `label` names the operation of the source, and `origins` the source's tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from service.importers.chain.attention import attention_pool, is_attended, step_weights
from service.importers.chain.combining import LONGEST_FUNCTION, combine, levels
from service.importers.chain.functions import Function, Numbers, affine, named
from service.importers.chain.joining import in_order, joined
from service.importers.chain.nodes import (
    NO_ORIGINS,
    RECURRENT,
    Input,
    Layer,
    Mapped,
    Node,
    Pooled,
    Settled,
    check_matrix,
    selection,
)
from service.importers.chain.settling import settled
from service.importers.chain.signal import UNIT, Columns, Role, Signal
from service.importers.chain.windows import Window
from service.importers.draft import Array, ImportRefused


def embedding(ids: Signal, table: Array, label: str, origins: frozenset[str]) -> Signal:
    """Look up ids. table: (vocabulary, width). The result has a last axis of columns."""
    node, row_of_id = _ids(ids)
    rows = row_of_id(np.arange(len(table), dtype=np.float64)[:, None])[:, 0].astype(np.int64)
    if ((rows < 0) | (rows >= len(table))).any():
        raise ImportRefused("it computes with token ids, and some of the results are not rows of the table")
    layer = Layer(node, {"kind": "embedding", "width": table.shape[1]}, {"weight": table[rows]}, table.shape[1], label, origins)
    return ids.with_units([ids.rank]).over(layer, ids.rank)


def dense(x: Signal, weight: Array, bias: Array, label: str, origins: frozenset[str] = NO_ORIGINS) -> Signal:
    """Multiply vectors by a matrix. weight: (inputs, width); bias: (width,)."""
    node, columns = source(x)
    width = weight.shape[1]
    arrays = {"weight": scattered(weight, columns, node.width), "bias": bias}
    table = {"kind": "dense", "width": width, "activation": "none"}
    return x.over(Layer(node, table, arrays, width, label, origins), x.rank - 1)


def conv(
    x: Signal,
    filters: Array,
    bias: Array,
    label: str,
    origins: frozenset[str] = NO_ORIGINS,
    *,
    at: int,
    window: Window,
    groups: int = 1,
) -> Signal:
    """Convolve over time. filters: (width, inputs / groups, filters)."""
    if x.is_reversed:
        raise ImportRefused("it convolves steps in reverse order: convolve before reversing them")
    unpadded, window = _with_pads(x, window)
    node, columns = source(unpadded, at)
    if groups == 1:
        filters = scattered(filters, columns, node.width, rows=1)
    elif not in_order(columns, node.width):
        node = selection(node, columns, label)
    maps = filters.shape[2]
    table = {"kind": "conv", "filters": maps, **window.table(), "activation": "none"} | (
        {"groups": groups} if groups > 1 else {}
    )
    layer = Layer(node, table, {"filters": filters, "bias": bias}, maps, label, origins)
    return _windows(unpadded, window).over(layer, at)


def pool_windows(x: Signal, reduce: str, label: str, *, window: Window, count_padding: bool = False) -> Signal:
    """Take the maximum or mean of windows of steps."""
    if x.is_reversed or x.pads != (0, 0):
        raise ImportRefused(
            "it pools windows of steps that were padded or reversed before: give the pads to the pooling operation"
        )
    node, columns = joined(x)
    table = {"kind": "pool", "reduce": reduce, **window.table()} | ({"count_padding": True} if count_padding else {})
    layer = Layer(node, table, {}, node.width, label)
    return replace(_windows(x, window), parts=(layer,), columns=columns.reshape(x.columns.shape))


def pool_steps(x: Signal, pool: str, *, keep_axis: bool) -> Signal:
    """Reduce all steps of each sequence to one vector. pool: a pool of model.toml."""
    if x.pads != (0, 0):
        raise ImportRefused("it pools padding steps: a Pad may only precede a convolution")
    ends = {"first": "last_step", "last_step": "first"}
    pool = ends.get(pool, pool) if x.is_reversed else pool
    index = x.steps_axis
    axes = (*x.axes[:index], *([UNIT] if keep_axis else []), *x.axes[index + 1 :])
    columns = x.columns.reshape([one.size for one in axes if one.is_columns])
    parts = tuple(attention_pool(part) if is_attended(part, pool) else Pooled(part, (pool,)) for part in x.parts)
    return replace(x, axes=axes, columns=columns, parts=parts, is_reversed=False)


def cut_steps(x: Signal, first: int, last: int) -> Signal:
    """Leave out steps at the ends of every sequence, as after a causal convolution that was padded on both sides."""
    if x.is_reversed:
        first, last = last, first
    cut = x.map_parts(lambda part: _without_outputs(part, first, last))
    return cut.with_step_count(x.shape[x.steps_axis] - first - last)


def pad_steps(x: Signal, first: int, last: int) -> Signal:
    """Add zero steps before and after every sequence, for the convolution that follows."""
    before, after = (last, first) if x.is_reversed else (first, last)
    padded = replace(x, pads=(x.pads[0] + before, x.pads[1] + after))
    return padded.with_step_count(x.shape[x.steps_axis] + first + last)


def take(x: Signal, at: int, chosen: int | slice) -> Signal:
    """Take an entry or a slice of an axis: columns, the first or the last step, steps without some at the ends, or in reverse order."""
    size = x.shape[at]
    if isinstance(chosen, int) and not -size <= chosen < size:
        raise ImportRefused(f"it takes the entry {chosen} of {size}")
    indexes = range(size)[chosen] if isinstance(chosen, slice) else range(size)[slice(chosen % size, chosen % size + 1)]
    is_whole = isinstance(chosen, slice) and len(indexes) == size
    if is_whole and indexes.step == 1:
        return x
    if x.axes[at].is_columns:
        taken = x.take(np.array(indexes, np.int64), at)
        return taken if isinstance(chosen, slice) else taken.without_axes([at])
    if not x.is_on(at, Role.STEPS):
        what = "takes some of the" if isinstance(chosen, slice) else "works on the axis of"
        raise ImportRefused(f"it {what} {x.axes[at]}: every sequence is computed")
    if is_whole and indexes.step == -1:
        return reverse_steps(x)
    if len(indexes) == 1:
        if indexes[0] not in (0, size - 1):
            step = chosen if isinstance(chosen, int) else indexes[0]
            raise ImportRefused(f"it takes the step {step}: a model takes the first or the last step")
        return pool_steps(x, "last_step" if indexes[0] else "first", keep_axis=isinstance(chosen, slice))
    if indexes.step != 1 or not indexes:
        raise ImportRefused("it takes some of the steps: a model takes the first or the last step")
    return cut_steps(x, indexes[0], size - 1 - indexes[-1])


def reverse_steps(x: Signal) -> Signal:
    """Reverse the order of the steps of every sequence."""
    return replace(x, is_reversed=not x.is_reversed)


def apply(x: Signal, function: Function, label: str, origins: frozenset[str] = NO_ORIGINS) -> Signal:
    """Apply a function to every number. A function that differs by column takes the columns of the signal."""
    if x.pads != (0, 0):
        raise ImportRefused("its input was padded: only a convolution takes padded steps")
    if function.by_column:
        return _by_column(x, function, label, origins)
    return x.map_parts(lambda part: mapped(part, function, label, origins))


def mapped(node: Node, function: Function, label: str, origins: frozenset[str]) -> Node:
    """Return a function of a node."""
    if isinstance(node, Mapped) and _operations(node) + function.size > LONGEST_FUNCTION:
        node = settled(node)
    return Mapped(node, function, label, origins)


def with_constant(
    x: Signal,
    array: Array,
    calculate: Callable[[Numbers, Numbers], Numbers],
    label: str,
    origins: frozenset[str] = NO_ORIGINS,
    *,
    is_affine: bool,
) -> Signal:
    """Apply a calculation with a constant for all numbers, or a constant for each column."""
    x, numbers = _constants_by_column(x, array.astype(np.float64))
    if (numbers == numbers[0]).all():
        function = Function(lambda x: np.asarray(calculate(x, numbers[0]), np.float64), is_affine=is_affine)
    elif is_affine:
        function = Function(lambda x: np.asarray(calculate(x, numbers), np.float64), is_affine=True, by_column=True)
    else:
        raise ImportRefused("it computes something else than a sum or product with a constant for each column")
    return apply(x, function, label, origins)


def _constants_by_column(x: Signal, array: Array) -> tuple[Signal, Numbers]:
    """Return a signal in the shape of its result, and the constant for each of its columns."""
    if not array.size:
        raise ImportRefused("it computes with an empty tensor")
    rank = max(x.rank, array.ndim)
    x = x.with_units(range(rank - x.rank))
    array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    for index, one in enumerate(x.axes):
        if not one.is_columns and array.shape[index] != 1:
            first = array.take([0], axis=index)
            if (array != first).any():
                raise ImportRefused(f"it computes with a constant for each of the {one}: a model takes sequences of any length")
            array = first
    x = x.expand(np.broadcast_shapes(x.shape, array.shape))
    columns = array.reshape([size for size, one in zip(array.shape, x.axes, strict=True) if one.is_columns])
    return x, np.broadcast_to(columns, x.columns.shape).ravel()


def prelu(x: Signal, slopes: Array, label: str, origins: frozenset[str]) -> Signal:
    """Multiply numbers below zero by a slope."""
    if (slopes != slopes.ravel()[0]).any():
        raise ImportRefused("it has a slope for each column: only one slope for all columns can be imported")
    return apply(x, named("leaky_relu", alpha=float(slopes.ravel()[0])), label, origins)


def glu(x: Signal, at: int, label: str) -> Signal:
    """Multiply the first half of the columns of an axis by the logistic function of the second half."""
    half = x.shape[at] // 2
    value, gate = (take(x, at, slice(start, start + half)) for start in (0, half))
    return combine(value, apply(gate, named("sigmoid"), label), "multiply", label)


def mean(signals: Sequence[Signal], label: str) -> Signal:
    """Return the mean of several signals."""
    total = reduce(lambda x, y: combine(x, y, "add", label), signals)
    return apply(total, affine(1 / len(signals), 0.0), label)


def layer_norm(x: Signal, gain: Array, offset: Array, epsilon: float, label: str, origins: frozenset[str]) -> Signal:
    """Normalise every vector along the last axis."""
    node = whole(x, label)
    below, pool = _step_of(node)
    table = {"kind": "layer_norm", "epsilon": epsilon}
    layer = Layer(below, table, {"norm": np.stack([gain, offset])}, node.width, label, origins)
    return x.over(layer if pool is None else Pooled(layer, (pool,)), x.rank - 1)


def _step_of(node: Settled) -> tuple[Settled, str | None]:
    """Return the steps that contain a vector, and the pool that takes it: heads have no norm, but each step can have one."""
    if not isinstance(node, Pooled) or len(node.pools) > 1:
        return node, None
    below, pool = settled(node.below), node.pools[0]
    if pool == "last" and isinstance(below, Layer) and below.kind in RECURRENT:
        if len(below.directions) > 1:
            return node, None
        pool = "first" if below.directions == ("backward",) else pool
    return (below, pool) if pool in ("first", "last", "last_step") else (node, None)


def softmax(x: Signal, label: str, *, at: int, log: bool = False) -> Signal:
    """Return the softmax of every vector, or its logarithm. Only the last operation of a model can be one, or an attention pool has it."""
    if x.is_on(at, Role.STEPS) and not log:
        return step_weights(x, label)
    if not x.axes[at].is_columns:
        raise ImportRefused(f"it works on the axis of {x.axes[at]}: a model has a softmax over labels")
    node = whole(x, label, at)
    return x.over(Layer(node, {"kind": "softmax", "log": log}, {}, node.width, label), at % x.rank)


def normalize(x: Signal, label: str, *, at: int) -> Signal:
    """Scale every vector to length 1. Only the last operation of a model can do so."""
    node = whole(x, label, at)
    return x.over(Layer(node, {"kind": "normalize"}, {}, node.width, label), at % x.rank)


def product_over_steps(first: Signal, second: Signal, label: str) -> Signal:
    """Return (..., 1, steps) @ (..., steps, columns) or (..., columns, steps) @ (..., steps, 1), as attention pools have it."""
    if first.rank != second.rank or first.rank < 2 or not (first.is_on(-1, Role.STEPS) and second.is_on(-2, Role.STEPS)):
        raise ImportRefused(
            "it multiplies two tensors that depend on the input, which only an attention pool does, over the steps"
        )
    exchange = [*range(first.rank - 2), first.rank - 1, first.rank - 2]
    pooled = pool_steps(combine(first.transpose(exchange), second, "multiply", label), "sum", keep_axis=True)
    return pooled if first.shape[-2] == 1 else pooled.transpose(exchange)


def source(x: Signal, at: int = -1) -> tuple[Settled, Columns]:
    """Return the node that has the columns of a signal along one axis, and their indexes in it."""
    at %= x.rank
    if x.pads != (0, 0):
        raise ImportRefused("its input was padded: only a convolution takes padded steps")
    if not x.axes[at].is_columns or any(one.is_columns and one.size > 1 for index, one in enumerate(x.axes) if index != at):
        raise ImportRefused(f"it works on the axis {at} of a tensor with the axes {', '.join(x.roles)} and the shape {x.shape}")
    return joined(x)


def whole(x: Signal, label: str, at: int = -1) -> Settled:
    """Return a node with exactly the columns of a signal, in its order."""
    node, columns = source(x, at)
    return node if in_order(columns, node.width) else selection(node, columns, label)


def scattered(matrix: Array, columns: Columns, width: int, *, rows: int = 0) -> Array:
    """Return a matrix over all columns of a node that computes the same as `matrix` over some of them.

    rows: the axis of the matrix that counts its inputs.
    """
    if in_order(columns, width):
        return matrix
    check_matrix(width, matrix.size // max(1, matrix.shape[rows]))
    full = np.zeros((width, *np.delete(matrix.shape, rows)), matrix.dtype)
    np.add.at(full, columns, np.moveaxis(matrix, rows, 0))
    return np.moveaxis(full, 0, rows)


def is_of_ids(x: Signal) -> bool:
    """Whether a signal is a function of the token ids of the input."""
    node, _ = levels(x.parts[0])[-1]
    return len(x.parts) == 1 and isinstance(node, Input) and node.is_ids


def _ids(x: Signal) -> tuple[Input, Callable[[Numbers], Numbers]]:
    """Return the input of token ids, and the function of them that a signal has."""
    node, function = levels(x.parts[0])[-1]
    if not isinstance(node, Input) or not is_of_ids(x) or x.columns.size != 1:
        raise ImportRefused("it looks up numbers that are not the token ids of the input")
    return node, function.apply


def _with_pads(x: Signal, window: Window) -> tuple[Signal, Window]:
    """Return a signal without its padding steps, and a window that pads it."""
    if x.pads == (0, 0):
        return x, window
    unpadded = replace(x, pads=(0, 0)).with_step_count(x.shape[x.steps_axis] - sum(x.pads))
    return unpadded, window.padded_by(x.pads)


def _windows(x: Signal, window: Window) -> Signal:
    """Return a signal with as many steps as windows."""
    return x.with_step_count(window.outputs(x.shape[x.steps_axis]))


def _without_outputs(node: Node, first: int, last: int) -> Node:
    """Return a convolution, and functions of it, without its first and last outputs: it is padded by fewer steps."""
    if isinstance(node, Mapped):
        return Mapped(_without_outputs(node.below, first, last), node.function, node.label, node.origins)
    if isinstance(node, Layer) and node.kind == "conv":
        window = Window.of(node.table)
        pads = window.pads[0] - first * window.stride, window.pads[1] - last * window.stride
        if not window.by_length and min(pads) >= 0:
            kept = {key: value for key, value in node.table.items() if key not in ("padding", "pads")}
            return replace(node, table={**kept, **replace(window, pads=pads).table()})
    raise ImportRefused(
        "it leaves out steps of every sequence, and only the padding of a convolution can be left out: a model takes the first or the "
        "last step"
    )


def _by_column(x: Signal, function: Function, label: str, origins: frozenset[str]) -> Signal:
    """Apply a factor and an offset for each column of a signal to the columns of its parts."""
    factor, offset = function.factor_and_offset(x.columns.size)
    if not (np.isfinite(factor).all() and np.isfinite(offset).all()):
        raise ImportRefused("it multiplies by numbers, or adds numbers, that are not finite")
    columns = x.columns.ravel()
    total = sum(part.width for part in x.parts)
    factors, offsets = np.ones(total), np.zeros(total)
    factors[columns], offsets[columns] = factor, offset
    if (factors[columns] != factor).any() or (offsets[columns] != offset).any():
        node, columns = joined(x)
        copied = replace(x, parts=(selection(node, columns, label),), columns=np.arange(columns.size).reshape(x.columns.shape))
        return _by_column(copied, function, label, origins)
    bounds = np.cumsum([0, *(part.width for part in x.parts)])
    parts = [
        mapped(part, affine(factors[begin:end], offsets[begin:end]), label, origins)
        for part, begin, end in zip(x.parts, bounds[:-1], bounds[1:], strict=True)
    ]
    return replace(x, parts=tuple(parts))


def _operations(node: Node) -> int:
    total = 0
    while isinstance(node, Mapped):
        total += node.function.size
        node = node.below
    return total
