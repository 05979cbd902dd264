"""The layers of model.toml that are not recurrent, as layers of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.exporters.filters import filters
from service.exporters.keras.activations import activated
from service.exporters.keras.network import Network, Tensor
from service.exporters.model import Part
from service.importers.draft import Array
from service.modeling.spec import (
    Activation,
    ActivationLayer,
    BatchNormLayer,
    ConvLayer,
    DenseLayer,
    EmbeddingLayer,
    LayerNormLayer,
    PoolLayer,
    TCNLayer,
    TextCNNLayer,
)
from service.modeling.spec.activations import RELU
from service.modeling.spec.layers import WindowLayer

ONNX = "Export the model to ONNX"


def embedding(network: Network, layer: EmbeddingLayer, part: Part, x: Tensor) -> Tensor:
    table = part.numpy("weight")
    sizes = {"input_dim": len(table), "output_dim": layer.width}
    return network.add("Embedding", x, shape=(None, None, layer.width), weights={"embeddings": table}, **sizes)


def dense(network: Network, layer: DenseLayer, part: Part, x: Tensor) -> Tensor:
    return activated(network, layer.activation, part, product(network, part, x))


def product(network: Network, part: Part, x: Tensor, prefix: str = "") -> Tensor:
    """Add a product with weights and a bias, of every step or of one vector."""
    kernel, bias = part.numpy(f"{prefix}weight"), part.numpy(f"{prefix}bias")
    shape = (*x.shape[:-1], len(bias))
    return network.add("Dense", x, shape=shape, weights={"kernel": kernel, "bias": bias}, units=len(bias))


def activation(network: Network, layer: ActivationLayer, part: Part, x: Tensor) -> Tensor:
    return activated(network, layer.activation, part, x)


def layer_norm(network: Network, layer: LayerNormLayer, part: Part, x: Tensor) -> Tensor:
    gain, offset = part.numpy("norm")
    weights = {"gamma": gain, "beta": offset}
    return network.add("LayerNormalization", x, shape=x.shape, weights=weights, epsilon=layer.epsilon, axis=-1)


def batch_norm(network: Network, layer: BatchNormLayer, part: Part, x: Tensor) -> Tensor:
    return _normalized(network, part, x, layer.epsilon)


def conv(network: Network, layer: ConvLayer, part: Part, x: Tensor) -> Tensor:
    part.refuse(
        layer.activation.kind in ("glu", "gated_tanh"),
        f"the activation {layer.activation.kind} has twice as many maps, and Conv1D of Keras has no such activation",
        ONNX,
    )
    part.refuse(layer.stride > 1 and layer.dilation > 1, "Conv1D of Keras has either strides or a dilation", ONNX)
    x, padding = _padded(network, layer, part, x)
    sizes: dict[str, Any] = {
        "strides": layer.stride,
        "dilation_rate": layer.dilation,
        "groups": layer.groups,
        "padding": padding,
    }
    y = _convolved(network, part, x, layer.width, layer.maps, **sizes)
    y = _normalized(network, part, y, layer.epsilon) if layer.batch_norm else y
    return activated(network, Activation(**dict(layer.activation)), part, y)


def pool(network: Network, layer: PoolLayer, part: Part, x: Tensor) -> Tensor:
    operator = "MaxPooling1D" if layer.reduce == "max" else "AveragePooling1D"
    part.refuse(layer.dilation > 1, f"dilation is {layer.dilation}, and {operator} of Keras has none", ONNX)
    part.refuse(layer.count_padding, f"count_padding is set, and {operator} of Keras does not count padding", ONNX)
    padding = _name_of_padding(layer)
    part.refuse(
        padding not in ("valid", "same"), f'its padding is neither "none" nor "same_upper", which {operator} of Keras has', ONNX
    )
    return network.add(operator, x, shape=(None, None, x.width), pool_size=layer.width, strides=layer.stride, padding=padding)


def tcn(network: Network, layer: TCNLayer, part: Part, x: Tensor) -> Tensor:
    for level in range(layer.levels):
        network.start(f"{part.place}.{level}")
        y = x
        for position in (0, 1):
            sizes: dict[str, Any] = {"padding": "causal", "dilation_rate": 2**level}
            y = _convolved(network, part, y, layer.width, layer.filters, prefix=f"{level}.{position}.", **sizes)
            y = activated(network, RELU, part, y)
        if f"{level}.projection.bias" in part.arrays:
            x = _convolved(network, part, x, 1, layer.filters, prefix=f"{level}.projection.")
        x = activated(network, RELU, part, network.add("Add", y, x, shape=y.shape))
    return x


def text_cnn(network: Network, layer: TextCNNLayer, part: Part, x: Tensor) -> Tensor:
    """Return one vector for each sequence."""
    x = _zeros_around(network, x, layer.padding, layer.padding)
    maxima = []
    for width in layer.widths:
        y = activated(network, RELU, part, _convolved(network, part, x, width, layer.filters, prefix=f"{width}."))
        maxima.append(network.add("GlobalMaxPooling1D", y, shape=(None, layer.filters)))
    return maxima[0] if len(maxima) == 1 else network.add("Concatenate", *maxima, shape=(None, layer.outputs))


def _convolved(network: Network, part: Part, x: Tensor, width: int, maps: int, *, prefix: str = "", **config: Any) -> Tensor:
    weights = {"kernel": filters(part, prefix), "bias": part.numpy(f"{prefix}bias")}
    return network.add("Conv1D", x, shape=(None, None, maps), weights=weights, filters=maps, kernel_size=width, **config)


def _normalized(network: Network, part: Part, x: Tensor, epsilon: float) -> Tensor:
    rows: dict[str, Array] = dict(zip(("gamma", "beta", "moving_mean", "moving_variance"), part.numpy("norm"), strict=True))
    return network.add("BatchNormalization", x, shape=x.shape, weights=rows, epsilon=epsilon, axis=-1)


def _padded(network: Network, layer: WindowLayer, part: Part, x: Tensor) -> tuple[Tensor, str]:
    """Return the input of a convolution, with zeros around it where Keras has no name for the padding, and the name."""
    named = _name_of_padding(layer)
    if named is not None:
        return x, named
    part.refuse(layer.pads_by_length, f'padding is "{layer.padding}", and Keras pads as "same_upper"', ONNX)
    return _zeros_around(network, x, *layer.padding_steps), "valid"


def _name_of_padding(layer: WindowLayer) -> str | None:
    around = layer.reach - 1
    if layer.pads_by_length:
        return "same" if layer.padding == "same_upper" else None
    names = {(around // 2, around - around // 2): "same" if layer.stride == 1 else None, (around, 0): "causal", (0, 0): "valid"}
    return names.get(layer.padding_steps)


def _zeros_around(network: Network, x: Tensor, left: int, right: int) -> Tensor:
    if not left and not right:
        return x
    return network.add("ZeroPadding1D", x, shape=x.shape, padding=[left, right])


LAYERS: dict[str, Callable[[Network, Any, Part, Tensor], Tensor]] = {
    "embedding": embedding,
    "dense": dense,
    "activation": activation,
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "conv": conv,
    "pool": pool,
    "tcn": tcn,
    "text_cnn": text_cnn,
}
"""The function for each kind of layer that is not recurrent."""
