"""Finds the single node that replaces the nodes of a signal: joined directions, branches of convolutions, or pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.importers.chain.branches import Places, joined_convolutions, side_by_side, text_cnn
from service.importers.chain.nodes import RECURRENT, Input, Layer, Node, Pooled, Settled, origins_of, same
from service.importers.chain.settling import settled
from service.importers.chain.signal import Columns, Signal
from service.importers.draft import ImportRefused


def joined(signal: Signal) -> tuple[Settled, Columns]:
    """Return the node that has every column of a signal, and the indexes of the columns in it, in the order of the signal.

    Raises ImportRefused if no single node replaces the nodes that the columns come from.
    """
    node, places = _one([settled(part) for part in signal.parts])
    return _plainest(node, np.concatenate(places)[signal.columns.ravel()])


def in_order(columns: Columns, width: int) -> bool:
    """Whether the columns are all columns of a node, in its order."""
    return len(columns) == width and bool((columns == np.arange(width)).all())


def _one(nodes: Sequence[Settled]) -> tuple[Settled, Places]:
    first = nodes[0]
    if all(same(first, node) for node in nodes):
        return first, [np.arange(first.width)] * len(nodes)
    pools = [node for node in nodes if isinstance(node, Pooled)]
    if len(pools) == len(nodes):
        return _pools(pools)
    result = _layers(nodes)
    if result is None:
        raise ImportRefused(f"it joins {_names(nodes)}, and no one layer of model.toml replaces them")
    return result


def _pools(nodes: Sequence[Pooled]) -> tuple[Settled, Places]:
    """Join pools of one node to a pool of several kinds, and pools of several nodes to a pool of the node that replaces them."""
    belows = [settled(node.below) for node in nodes]
    if all(same(below, belows[0]) for below in belows):
        return _kinds_of_pools(nodes)
    pools = nodes[0].pools
    if len(pools) > 1 or any(node.pools != pools for node in nodes):
        raise ImportRefused(f"it joins {_names(belows)}, pooled in different ways: a head pools one layer")
    result = _layers(belows)
    if result is None and pools == ("max",):
        convolutions = _over_one_node(belows, "conv")
        result = None if convolutions is None else text_cnn(convolutions)
    if result is None:
        raise ImportRefused(
            f"it joins the pools of {_names(belows)}, and no one layer of model.toml replaces them. A text_cnn has convolutions "
            'without stride or dilation and with ReLU, each with as many padding steps, and the pool "max"'
        )
    return Pooled(result[0], pools), result[1]


def _kinds_of_pools(nodes: Sequence[Pooled]) -> tuple[Pooled, Places]:
    pools = tuple(dict.fromkeys(pool for node in nodes for pool in node.pools))
    width = nodes[0].below.width
    places = [np.concatenate([pools.index(pool) * width + np.arange(width) for pool in node.pools]) for node in nodes]
    table = {key: value for node in nodes for key, value in node.table.items()}
    arrays = {name: array for node in nodes for name, array in node.arrays.items()}
    return Pooled(nodes[0].below, pools, table, arrays, origins_of(nodes)), places


def _plainest(node: Settled, columns: Columns) -> tuple[Settled, Columns]:
    """Return the pool "last" for the last step of a forward direction joined to the first step of a backward direction."""
    below = node.below if isinstance(node, Pooled) else node
    if not isinstance(node, Pooled) or not isinstance(below, Layer) or below.kind not in RECURRENT:
        return node, columns
    if len(below.directions) < 2 or "merge" in below.table:
        return node, columns
    is_end = [pool == "last" or pool == end for pool in node.pools for end in ("last_step", "first")]
    if not all(is_end[column // (below.width // 2)] for column in columns):
        return node, columns
    return Pooled(below, ("last",), origins=node.origins), columns % below.width


def _layers(nodes: Sequence[Settled]) -> tuple[Layer, Places] | None:
    """Return the layer that replaces several over one input, or None."""
    for kind, join in (("conv", joined_convolutions), ("dense", _dense_layers)):
        layers = _over_one_node(nodes, kind)
        if layers is not None:
            return join(layers)
    recurrent = [node for node in nodes if isinstance(node, Layer) and node.kind in RECURRENT]
    return _directions(recurrent) if len(recurrent) == len(nodes) else None


def _over_one_node(nodes: Sequence[Settled], kind: str) -> list[Layer] | None:
    """Return the nodes as layers if they are all of this kind, over one input."""
    layers = [node for node in nodes if isinstance(node, Layer) and node.kind == kind]
    return layers if len(layers) == len(nodes) and all(layer.below is layers[0].below for layer in layers) else None


def _directions(layers: Sequence[Layer]) -> tuple[Layer, Places] | None:
    """Join a forward and a backward layer over one input to a bidirectional layer."""
    by_direction = {layer.directions: layer for layer in layers}
    if len(layers) != 2 or by_direction.keys() != {("forward",), ("backward",)} or layers[0].below is not layers[1].below:
        return None
    forward, backward = by_direction[("forward",)], by_direction[("backward",)]
    table = {key: value for key, value in backward.table.items() if key != "direction"}
    if forward.table != table:
        raise ImportRefused(
            f"it joins {_names(layers)}, whose options differ: a bidirectional layer has the same options for both"
        )
    places = {forward: np.arange(forward.width), backward: forward.width + np.arange(backward.width)}
    both = Layer(
        forward.below,
        {**table, "bidirectional": True},
        {**forward.arrays, **backward.arrays},
        2 * forward.width,
        forward.label,
        forward.origins | backward.origins,
    )
    return both, [places[layer] for layer in layers]


def _dense_layers(layers: Sequence[Layer]) -> tuple[Layer, Places] | None:
    """Join the columns of dense layers over one input."""
    first = layers[0]
    if any(layer.table["activation"] != first.table["activation"] for layer in layers):
        return None
    arrays = {name: [layer.arrays[name] for layer in layers] for name in ("weight", "bias")}
    return side_by_side(layers, first.table, "width", arrays)


def _names(nodes: Sequence[Node]) -> str:
    return " and ".join(dict.fromkeys(_name(node) for node in nodes))


def _name(node: Node) -> str:
    if isinstance(node, Input):
        return "the input"
    return f"a pool of {_name(node.below)}" if isinstance(node, Pooled) else node.label
