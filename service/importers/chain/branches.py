"""Joins convolutions over one input: to one convolution if each has the same number of outputs, to a text_cnn if they are pooled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from service.importers.chain.nodes import Layer, origins_of
from service.importers.chain.signal import Columns
from service.importers.chain.windows import WINDOW_KEYS, Window
from service.importers.draft import Array

WIDEST = 1024
"""Steps of a window that replaces several windows."""
Places = list[Columns]
"""For each of several nodes, the places of its columns in the node that replaces them."""


def joined_convolutions(layers: Sequence[Layer]) -> tuple[Layer, Places] | None:
    """Return one convolution with the filters of all, with zeros where a narrower window has no taps, or None.

    A filter with more zeros computes the same if all windows start together and each sequence has the same number of windows.
    """
    rest = _without_window(layers[0])
    if rest.get("groups", 1) > 1 or any(_without_window(layer) != rest for layer in layers):
        return None
    windows = [Window.of(layer.table) for layer in layers]
    first, biases = windows[0], [layer.arrays["bias"] for layer in layers]
    if all(window == first for window in windows):
        spread = [layer.arrays["filters"] for layer in layers]
        return side_by_side(layers, {**rest, **first.table()}, "filters", {"filters": spread, "bias": biases})
    if len({(window.stride, window.reach - sum(window.pads)) for window in windows}) > 1 or any(w.by_length for w in windows):
        return None
    taps = [np.arange(window.width) * window.dilation - window.pads[0] for window in windows]
    low, high = min(int(tap[0]) for tap in taps), max(int(tap[-1]) for tap in taps)
    dilation = math.gcd(*(int(position) - low for tap in taps for position in tap)) or 1
    width = (high - low) // dilation + 1
    if width > WIDEST:
        return None
    spread = []
    for layer, positions in zip(layers, taps, strict=True):
        filters = np.zeros((width, *layer.arrays["filters"].shape[1:]))
        filters[(positions - low) // dilation] = layer.arrays["filters"]
        spread.append(filters)
    pads = -low, high + 1 - first.reach + sum(first.pads)
    window = Window(len(spread[0]), first.stride, dilation, pads)
    return side_by_side(layers, {**rest, **window.table()}, "filters", {"filters": spread, "bias": biases})


def text_cnn(layers: Sequence[Layer]) -> tuple[Layer, Places] | None:
    """Return the text_cnn whose maximum over time is the joined maxima of all layers, or None.

    All widths of a text_cnn have the same number of filters. Missing filters are zeros, and no consumer reads their columns.
    """
    windows = [Window.of(layer.table) for layer in layers]
    pads = windows[0].pads
    plain = {"kind": "conv", "activation": "relu"}
    if pads[0] != pads[1] or any(window != Window(window.width, pads=pads) for window in windows):
        return None
    if any(_without_window(layer) != plain for layer in layers):
        return None
    widths = list(dict.fromkeys(window.width for window in windows))
    by_width = [[layer for layer in layers if layer.table["width"] == width] for width in widths]
    filters = max(sum(layer.width for layer in group) for group in by_width)
    arrays: dict[str, Array] = {}
    for width, group in zip(widths, by_width, strict=True):
        missing = filters - sum(layer.width for layer in group)
        for name in ("filters", "bias"):
            together = np.concatenate([layer.arrays[name] for layer in group], axis=-1)
            arrays[f"{width}.{name}"] = np.pad(together, [(0, 0)] * (together.ndim - 1) + [(0, missing)])
    table = {"kind": "text_cnn", "widths": widths, "filters": filters, "padding": pads[0]}
    places = [_place(layer, by_width, filters) for layer in layers]
    origins = origins_of(layers)
    return Layer(layers[0].below, table, arrays, filters * len(widths), layers[0].label, origins), places


def _without_window(layer: Layer) -> dict[str, Any]:
    """Return the table of a convolution without the keys of its filters and window."""
    return {key: value for key, value in layer.table.items() if key not in (*WINDOW_KEYS, "filters")}


def _place(layer: Layer, by_width: Sequence[Sequence[Layer]], filters: int) -> Columns:
    index, group = next((index, group) for index, group in enumerate(by_width) if layer in group)
    earlier = group[: group.index(layer)]
    return index * filters + sum(other.width for other in earlier) + np.arange(layer.width)


def side_by_side(
    layers: Sequence[Layer], table: dict[str, Any], size: str, arrays: Mapping[str, Sequence[Array]]
) -> tuple[Layer, Places]:
    """Return a layer with the columns of all layers in a row. size: the key with their number; arrays: of each layer, by name."""
    starts = list(accumulate((layer.width for layer in layers), initial=0))
    places = [start + np.arange(layer.width) for start, layer in zip(starts, layers, strict=False)]
    joined = {name: np.concatenate(each, axis=-1) for name, each in arrays.items()}
    first = layers[0]
    return Layer(first.below, {**table, size: starts[-1]}, joined, starts[-1], first.label, origins_of(layers)), places
