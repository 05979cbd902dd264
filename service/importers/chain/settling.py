"""Turns nodes into layers of model.toml: names functions, folds factors and offsets into weights, and gives a product its activation."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from service.importers.chain.functions import MONOTONE, Function, as_written, identify
from service.importers.chain.nodes import (
    RECURRENT,
    Added,
    Input,
    Layer,
    Mapped,
    Node,
    Pooled,
    Settled,
    StepWeights,
    Weighted,
    check_matrix,
    is_vector,
)
from service.importers.chain.residuals import tcn_level
from service.importers.draft import Array, ImportRefused

EPSILON = 1e-5
_SETTLED: WeakKeyDictionary[Node, Settled] = WeakKeyDictionary()
"""Nodes that were settled, so that two consumers of a node see the same layer. No value refers to its key."""


def settled(node: Node) -> Settled:
    """Return a node as a layer, a pool or an input; raises ImportRefused for a computation that no layer of model.toml has."""
    if isinstance(node, Input | Layer):
        return node
    if node not in _SETTLED:
        _SETTLED[node] = _settle(node)
    return _SETTLED[node]


def weights_below(node: Node) -> int:
    """Return how many numbers are copied where a function is folded into the layer below it."""
    if not isinstance(node, Mapped):
        return 0
    while isinstance(node, Mapped):
        node = node.below
    return sum(array.size for array in node.arrays.values()) if isinstance(node, Layer) else 0


def _settle(node: Mapped | Added | Pooled | StepWeights | Weighted) -> Settled:
    if isinstance(node, Mapped):
        return _mapped(node)
    if isinstance(node, Pooled):
        below = settled(node.below)
        return Pooled(below, tuple(_plainest(pool, below) for pool in node.pools), node.table, node.arrays, node.origins)
    if isinstance(node, Added):
        raise _sum_refused(node)
    raise ImportRefused(
        f"{node.label} has a softmax over steps, which only an attention pool has: the sum of every step times it"
    )


def _mapped(node: Mapped) -> Settled:
    """Name as many functions as possible at once, from the lowest upwards."""
    options = [(node.below, node.function)]
    while isinstance(below := options[-1][0], Mapped):
        options.append((below.below, options[-1][1].after(below.function)))
    for base, function in reversed(options):
        if function.is_affine:
            return _scaled(settled(base), function, node)
        activation = identify(function)
        if activation is not None:
            written = as_written(activation)
            if isinstance(base, Added) and written == "relu":
                return _residual(base)
            return _activated(settled(base), written, node)
    raise ImportRefused(f"{node.label} is part of a function that no activation of model.toml computes")


def _residual(node: Added) -> Layer:
    level = tcn_level(settled(node.below), settled(node.other), node.label)
    if level is None:
        raise _sum_refused(node)
    return level


def _sum_refused(node: Added) -> ImportRefused:
    return ImportRefused(
        f"{node.label} adds two tensors. Of all layers, only a tcn does so: two causal convolutions of one width with ReLU, dilated by "
        "1, 2, 4, ..., whose input is added to their output before another ReLU"
    )


def _activated(below: Settled, activation: object, node: Mapped) -> Settled:
    if activation == "none":
        return below
    if isinstance(below, Layer) and below.is_linear and below.kind != "embedding":
        return below.changed(activation=activation, origins=node.origins)
    if isinstance(below, Pooled) and below.pools == ("max",) and activation in MONOTONE:
        return Pooled(_activated(settled(below.below), activation, node), below.pools, origins=below.origins)
    if is_vector(below):
        return diagonal(below, np.ones(below.width), np.zeros(below.width), node, activation)
    return Layer(below, {"kind": "activation", "activation": activation}, {}, below.width, node.label, node.origins)


def _scaled(below: Settled, function: Function, node: Mapped) -> Settled:
    """Multiply every column by a factor and add an offset, within the layer below if it is linear."""
    factor, offset = function.factor_and_offset(below.width)
    if (factor == 1).all() and not offset.any():
        return below
    if (factor == 0.5).all() and not offset.any():
        merged = _mean_of_directions(below, node)
        if merged is not None:
            return merged
    if isinstance(below, Layer):
        if below.is_linear:
            return below.changed(arrays=_folded(below, factor, offset), origins=node.origins)
        if below.kind in ("layer_norm", "batch_norm"):
            gain, shift, *statistics = below.arrays["norm"]
            norm = np.stack([gain * factor, shift * factor + offset, *statistics])
            return below.changed(arrays={"norm": norm}, origins=node.origins)
    if is_vector(below):
        return diagonal(below, factor, offset, node)
    if (factor == factor[0]).all() and (offset == offset[0]).all():
        activation = {"kind": "affine", "alpha": float(factor[0]), "beta": float(offset[0])}
        return Layer(below, {"kind": "activation", "activation": activation}, {}, below.width, node.label, node.origins)
    statistics = [np.zeros(below.width), np.full(below.width, 1 - EPSILON)]
    norm = np.stack([factor, offset, *statistics])
    return Layer(below, {"kind": "batch_norm", "epsilon": EPSILON}, {"norm": norm}, below.width, node.label, node.origins)


def _mean_of_directions(below: Settled, node: Mapped) -> Settled | None:
    """Return the mean of both directions of a layer for half of their sum, or None. A pool of halves is half of a pool of sums."""
    if isinstance(below, Pooled) and "attention" not in below.pools:
        merged = _mean_of_directions(settled(below.below), node)
        return None if merged is None else Pooled(merged, below.pools, below.table, below.arrays, below.origins)
    if isinstance(below, Layer) and below.kind in RECURRENT and below.table.get("merge") == "sum":
        return below.changed(merge="mean", origins=node.origins)
    return None


def diagonal(below: Settled, factor: Array, offset: Array, node: Mapped, activation: object = "none") -> Layer:
    """Return a dense layer with a factor for each column: heads have no other layer between the pool and their own product."""
    check_matrix(below.width, below.width)
    table = {"kind": "dense", "width": below.width, "activation": activation}
    return Layer(below, table, {"weight": np.diag(factor), "bias": offset}, below.width, node.label, node.origins)


def _folded(layer: Layer, factor: Array, offset: Array) -> dict[str, Array]:
    """Return the arrays of a linear layer after its result is multiplied by a factor and moved by an offset."""
    if layer.kind == "embedding":
        return {"weight": layer.arrays["weight"] * factor + offset}
    matrix = "weight" if layer.kind == "dense" else "filters"
    return {matrix: layer.arrays[matrix] * factor, "bias": layer.arrays["bias"] * factor + offset}


def _plainest(pool: str, below: Settled) -> str:
    """Return "last" for the first or last step that is the end of the only direction: a stream can then continue."""
    if isinstance(below, Layer) and below.kind in RECURRENT:
        ends = {"forward": "last_step", "backward": "first"}
        return "last" if len(below.directions) == 1 and pool == ends[below.directions[0]] else pool
    return "last" if pool == "last_step" and not _reads_backward(below) else pool


def _reads_backward(node: Node) -> bool:
    while not isinstance(node, Input):
        if isinstance(node, Layer) and "backward" in node.directions:
            return True
        node = node.below
    return False
