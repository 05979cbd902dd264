"""Combines two signals number by number: as one function, both directions of a layer, a gate, an attention pool or a sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.importers.chain.attention import weighted
from service.importers.chain.functions import IDENTITY, Function
from service.importers.chain.joining import in_order, joined
from service.importers.chain.nodes import RECURRENT, Added, Layer, Mapped, Node, Pooled
from service.importers.chain.settling import settled
from service.importers.chain.signal import Signal
from service.importers.draft import ImportRefused

LONGEST_FUNCTION = 64
"""Elementwise operations that may together be one activation."""
OPERATIONS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
"""Operations that may combine two numbers."""


def combine(first: Signal, second: Signal, operation: str, label: str) -> Signal:
    """Return the sum, difference, product, quotient, maximum or minimum of two signals."""
    first, second = _aligned(first, second)
    for attempt in (weighted, _merged_directions, _one_function, _gated, _sum):
        result = attempt(first, second, operation, label)
        if result is not None:
            return result
    raise ImportRefused("it combines two tensors that depend on the input, which no layer of model.toml does in this way")


def _aligned(first: Signal, second: Signal) -> tuple[Signal, Signal]:
    """Return two signals with the same axes. Columns are repeated where an axis has a single entry."""
    rank = max(first.rank, second.rank)
    pair = [x.with_units(range(rank - x.rank)) for x in (first, second)]
    for one, other in (pair, pair[::-1]):
        for a, b in zip(one.axes, other.axes, strict=True):
            if a != b and not (a.is_columns and b.is_columns and 1 in (a.size, b.size)):
                raise ImportRefused(
                    f"it combines tensors with the axes {one.roles} {one.shape} and {other.roles} {other.shape}"
                )
    if pair[0].is_reversed != pair[1].is_reversed or any(x.pads != (0, 0) for x in pair):
        raise ImportRefused("it combines steps in different orders, or padding steps")
    shape = [max(a, b) for a, b in zip(pair[0].shape, pair[1].shape, strict=True)]
    return pair[0].expand(shape), pair[1].expand(shape)


def _merged_directions(first: Signal, second: Signal, operation: str, label: str) -> Signal | None:
    """Merge both directions of a recurrent layer."""
    merges = {"add": "sum", "multiply": "product"}
    if operation not in merges or any(isinstance(part, Mapped) for part in (*first.parts, *second.parts)):
        return None
    columns = np.stack([first.columns, sum(part.width for part in first.parts) + second.columns])
    together = replace(first, parts=(*first.parts, *second.parts), columns=columns)
    try:
        node, columns = joined(together)
    except ImportRefused:
        return None
    below = node.below if isinstance(node, Pooled) else node
    if not isinstance(below, Layer) or below.kind not in RECURRENT or len(below.directions) < 2 or "merge" in below.table:
        return None
    if isinstance(node, Pooled) and node.pools not in (("last",), ("last_step",), ("first",)):
        return None
    half = below.width // 2
    ends = columns.reshape(2, -1)
    if not (in_order(np.sort(ends, axis=0)[0], half) and (np.sort(ends, axis=0)[1] == half + np.arange(half)).all()):
        return None
    merged: Node = replace(below.changed(merge=merges[operation]), width=half)
    merged = Pooled(merged, node.pools) if isinstance(node, Pooled) else merged
    return replace(first, parts=(merged,), columns=np.arange(half).reshape(first.columns.shape))


def _one_function(first: Signal, second: Signal, operation: str, label: str) -> Signal | None:
    """Combine two functions of the same numbers, such as x * sigmoid(x)."""
    if len(first.parts) != len(second.parts) or not np.array_equal(first.columns, second.columns):
        return None
    parts = [_function_of_both(a, b, operation, label) for a, b in zip(first.parts, second.parts, strict=True)]
    return (
        None if any(part is None for part in parts) else replace(first, parts=tuple(part for part in parts if part is not None))
    )


def _function_of_both(first: Node, second: Node, operation: str, label: str) -> Node | None:
    over_first, over_second = levels(first), levels(second)
    for node, inner in over_first:
        for other, outer in over_second:
            if node is other:
                combined = _combined(inner, outer, operation)
                if combined.size > LONGEST_FUNCTION:
                    raise ImportRefused(
                        "it is one of too many elementwise operations: no activation of model.toml takes as many"
                    )
                return Mapped(node, combined, label)
    return None


def levels(node: Node) -> list[tuple[Node, Function]]:
    """Return each node below a function of it, with the function from it."""
    levels = [(node, IDENTITY)]
    while isinstance(below := levels[-1][0], Mapped):
        levels.append((below.below, levels[-1][1].after(below.function)))
    return levels


def _combined(first: Function, second: Function, operation: str) -> Function:
    calculate = OPERATIONS[operation]
    return Function(
        lambda x: calculate(first.apply(x), second.apply(x)),
        is_affine=operation in ("add", "subtract") and first.is_affine and second.is_affine,
        by_column=first.by_column or second.by_column,
        size=first.size + second.size + 1,
    )


def _gated(first: Signal, second: Signal, operation: str, label: str) -> Signal | None:
    """Multiply half of a convolution's maps by the sigmoid of the other half."""
    if operation != "multiply" or len(first.parts) != 1 or len(second.parts) != 1:
        return None
    for value, gate in ((first, second), (second, first)):
        node, kind = _gated_node(value.parts[0], gate.parts[0])
        if node is None or node.width != 2 * value.columns.size:
            continue
        order = np.concatenate([value.columns.ravel(), gate.columns.ravel()])
        if in_order(np.sort(order), node.width):
            arrays = {name: node.arrays[name][..., order] for name in ("filters", "bias")}
            half = node.width // 2
            layer = replace(node.changed(arrays=arrays, activation=kind, filters=half), width=half)
            return replace(value, parts=(layer,), columns=np.arange(half).reshape(value.columns.shape))
    return None


def _gated_node(value: Node, gate: Node) -> tuple[Layer | None, str]:
    """Return the convolution below both functions, and the gated activation that they make."""
    if not (isinstance(gate, Mapped) and (gate.function.activation or {}).get("kind") == "sigmoid"):
        return None, ""
    is_tanh = isinstance(value, Mapped) and (value.function.activation or {}).get("kind") == "tanh"
    base = value.below if is_tanh and isinstance(value, Mapped) else value
    node = settled(base) if base is gate.below else None
    is_conv = isinstance(node, Layer) and node.kind == "conv" and node.is_linear and node.table.get("groups", 1) == 1
    return (node if is_conv and isinstance(node, Layer) else None), "gated_tanh" if is_tanh else "glu"


def _sum(first: Signal, second: Signal, operation: str, label: str) -> Signal | None:
    """Add two nodes, such as a residual connection."""
    if operation != "add" or len(first.parts) != 1 or len(second.parts) != 1 or not first.has_steps:
        return None
    nodes = first.parts[0], second.parts[0]
    if any(not in_order(x.columns.ravel(), node.width) for x, node in zip((first, second), nodes, strict=True)):
        return None
    return first.map_parts(lambda part: Added(part, nodes[1], label))
