"""The layers of model.toml as operators over (batch, steps, width)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from service.exporters.model import ExportedPart
from service.exporters.onnx.activations import activated
from service.exporters.onnx.graph import ExportedGraph
from service.importers.draft import Array
from service.modeling.spec.activations import RELU, Activation
from service.modeling.spec.layers import (
    BatchNormLayer,
    ConvLayer,
    Layer,
    LayerNormLayer,
    PoolLayer,
    TCNLayer,
    TextCNNLayer,
    WindowLayer,
)

CHANNELS_FIRST = [0, 2, 1]
"""The order of axes that convolutions and window pools of ONNX have: (batch, width, steps)."""


def takes_batches(layer: Layer) -> bool:
    """Whether a layer computes the steps of each sequence in a padded batch and keeps their number."""
    if isinstance(layer, ConvLayer):
        return layer.stride == 1 and sum(layer.padding_steps) == layer.reach - 1
    return not isinstance(layer, PoolLayer)


def product(graph: ExportedGraph, part: ExportedPart, x: str, prefix: str = "") -> str:
    """Add a product with weights and a bias at every step."""
    weight, bias = (graph.weight(f"{prefix}{name}", part.numpy(f"{prefix}{name}")) for name in ("weight", "bias"))
    return graph.add("Add", graph.add("MatMul", x, weight), bias)


def layer_norm(graph: ExportedGraph, layer: LayerNormLayer, part: ExportedPart, x: str) -> str:
    gain, offset = part.numpy("norm")
    return graph.add("LayerNormalization", x, graph.weight("gain", gain), graph.weight("offset", offset), epsilon=layer.epsilon)


def batch_norm(graph: ExportedGraph, layer: BatchNormLayer, part: ExportedPart, x: str) -> str:
    return _transposed(graph, _normalized(graph, part, _transposed(graph, x), layer.epsilon))


def conv(graph: ExportedGraph, layer: ConvLayer, part: ExportedPart, x: str) -> str:
    x = graph.replace_padding(x, 0.0) if graph.has_batch and layer.padding_steps[1] else x
    y = _convolved(graph, part, "", _transposed(graph, x), group=layer.groups, **_window(layer, part))
    y = _normalized(graph, part, y, layer.epsilon) if layer.batch_norm else y
    if layer.activation.kind not in ("glu", "gated_tanh"):
        return _transposed(graph, activated(graph, Activation(**dict(layer.activation)), y))
    value = graph.add("Split", y, axis=1, num_outputs=2, outputs=2)
    gate = graph.add("Sigmoid", f"{value}.1")
    value = graph.add("Tanh", value) if layer.activation.kind == "gated_tanh" else value
    return _transposed(graph, graph.add("Mul", value, gate))


def pool(graph: ExportedGraph, layer: PoolLayer, part: ExportedPart, x: str) -> str:
    """ONNX pads a maximum with nothing, as a model does."""
    counts = {"count_include_pad": int(layer.count_padding)} if layer.reduce == "mean" else {}
    operator = "MaxPool" if layer.reduce == "max" else "AveragePool"
    return _transposed(graph, graph.add(operator, _transposed(graph, x), **_window(layer, part), **counts))


def tcn(graph: ExportedGraph, layer: TCNLayer, part: ExportedPart, x: str) -> str:
    x = _transposed(graph, x)
    for level in range(layer.levels):
        graph.start(f"{part.place}.{level}")
        dilation, y = 2**level, x
        for position in (0, 1):
            pads = [(layer.width - 1) * dilation, 0]
            y = _convolved(graph, part, f"{level}.{position}.", y, pads=pads, dilations=[dilation])
            y = graph.add("Relu", y)
        if f"{level}.projection.bias" in part.arrays:
            x = _convolved(graph, part, f"{level}.projection.", x)
        x = graph.add("Relu", graph.add("Add", y, x))
    return _transposed(graph, x)


def text_cnn(graph: ExportedGraph, layer: TextCNNLayer, part: ExportedPart, x: str) -> str:
    """Return one vector for each sequence."""
    x = _transposed(graph, graph.replace_padding(x, 0.0))
    pooled = []
    for width in layer.widths:
        y = activated(graph, RELU, _convolved(graph, part, f"{width}.", x, pads=[layer.padding] * 2))
        y = graph.replace_padding(y, 0.0, steps=2, plus=2 * layer.padding - width + 1)
        pooled.append(graph.add("ReduceMax", y, graph.integers(2), keepdims=0))
    return graph.add("Concat", *pooled, axis=1)


def _filters(part: ExportedPart, prefix: str) -> Array:
    """Return (maps, inputs, width), computed from direction and magnitude if the convolution has a weight norm."""
    if f"{prefix}filters" in part.arrays:
        return part.numpy(f"{prefix}filters").transpose(2, 1, 0)
    direction = part.numpy(f"{prefix}direction").astype(np.float64)
    length = np.sqrt(np.square(direction).sum(axis=(0, 1)))
    whole: Array = direction * part.numpy(f"{prefix}magnitude") / length
    return whole.astype(np.float32).transpose(2, 1, 0)


def _convolved(graph: ExportedGraph, part: ExportedPart, prefix: str, x: str, **attributes: Any) -> str:
    name = prefix.replace(".", "_")
    filters, bias = _filters(part, prefix), part.numpy(f"{prefix}bias")
    return graph.add("Conv", x, graph.weight(f"{name}filters", filters), graph.weight(f"{name}bias", bias), **attributes)


def _normalized(graph: ExportedGraph, part: ExportedPart, x: str, epsilon: float) -> str:
    rows = zip(("gain", "offset", "mean", "variance"), part.numpy("norm"), strict=True)
    return graph.add("BatchNormalization", x, *(graph.weight(name, row) for name, row in rows), epsilon=epsilon)


def _window(layer: WindowLayer, part: ExportedPart) -> dict[str, Any]:
    """Return the attributes of a window."""
    sizes: dict[str, Any] = {"kernel_shape": [layer.width], "strides": [layer.stride], "dilations": [layer.dilation]}
    if not layer.pads_by_length:
        return {**sizes, "pads": list(layer.padding_steps)}
    part.refuse(
        layer.dilation > 1,
        f'padding is "{layer.padding}" with a stride and a dilation, and ONNX Runtime does not run both',
        "Set pads instead of padding",
    )
    return {**sizes, "auto_pad": "SAME_UPPER" if layer.padding == "same_upper" else "SAME_LOWER"}


def _transposed(graph: ExportedGraph, x: str) -> str:
    """Exchange the axes of steps and width."""
    return graph.add("Transpose", x, perm=CHANNELS_FIRST)


LAYERS: dict[str, Callable[[ExportedGraph, Any, ExportedPart, str], str]] = {
    "embedding": lambda graph, _, part, x: graph.add("Gather", graph.weight("weight", part.numpy("weight")), x, axis=0),
    "dense": lambda graph, layer, part, x: activated(graph, layer.activation, product(graph, part, x)),
    "activation": lambda graph, layer, _, x: activated(graph, layer.activation, x),
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "conv": conv,
    "pool": pool,
    "tcn": tcn,
    "text_cnn": text_cnn,
}
"""The function for each kind of layer that is not recurrent."""
