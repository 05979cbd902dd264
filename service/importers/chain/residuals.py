"""Recognises the levels of a temporal convolutional network: two causal convolutions, and a residual connection around them."""

from __future__ import annotations

from service.importers.chain.nodes import Layer, Settled
from service.importers.draft import Array


def tcn_level(first: Settled, second: Settled, label: str) -> Layer | None:
    """Return the tcn layer with relu(first + second) as its last level, or None if no tcn has this level."""
    for main, residual in ((first, second), (second, first)):
        level = _level(main, residual, label)
        if level is not None:
            return level
    return None


def _level(main: Settled, residual: Settled, label: str) -> Layer | None:
    convolutions = _two_causal_convolutions(main)
    if convolutions is None:
        return None
    lower, upper = convolutions
    below, filters, width = lower.below, lower.width, lower.table["width"]
    arrays = {f"{position}.{name}": array for position, conv in enumerate(convolutions) for name, array in conv.arrays.items()}
    origins = lower.origins | upper.origins
    if residual is not below:
        if not (isinstance(residual, Layer) and residual.below is below and _is_projection(residual, below.width)):
            return None
        arrays |= {f"projection.{name}": array for name, array in residual.arrays.items()}
        origins |= residual.origins
    dilation = lower.table.get("dilation", 1)
    if dilation == 1:
        table = {"kind": "tcn", "filters": filters, "levels": 1, "width": width}
        return Layer(below, table, _at_level(0, arrays), filters, label, origins)
    if isinstance(below, Layer) and below.kind == "tcn" and (below.width, below.table["width"]) == (filters, width):
        levels = below.table["levels"]
        if dilation == 2**levels:
            return below.changed(arrays=_at_level(levels, arrays), levels=levels + 1, origins=origins)
    return None


def _two_causal_convolutions(node: Settled) -> tuple[Layer, Layer] | None:
    """Return two convolutions of one form, lower first, if the node is the upper one."""
    if not (isinstance(node, Layer) and isinstance(node.below, Layer)):
        return None
    lower, upper = node.below, node
    options = {key: value for key, value in upper.table.items() if key != "padding"}
    plain = {"kind": "conv", "filters": upper.width, "width": upper.table.get("width"), "activation": "relu"}
    if options != plain | ({"dilation": options["dilation"]} if "dilation" in options else {}) or lower.table != upper.table:
        return None
    return (lower, upper) if upper.table["padding"] == "causal" or upper.table["width"] == 1 else None


def _is_projection(layer: Layer, inputs: int) -> bool:
    """Whether a layer only changes the number of columns. A tcn has such a layer only where the number changes."""
    return layer.table == {**_POINTWISE, "filters": layer.width} and layer.width != inputs


_POINTWISE = {"kind": "conv", "width": 1, "padding": "none", "activation": "none"}


def _at_level(level: int, arrays: dict[str, Array]) -> dict[str, Array]:
    return {f"{level}.{name}": array for name, array in arrays.items()}
