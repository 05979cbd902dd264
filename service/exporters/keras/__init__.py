"""Writes a whole functional model of Keras 3 as a legacy .h5 file: `keras.models.load_model` reads it.

The model has no masks: it takes sequences of one length together. Its input is (batch, steps, features), or (batch, steps) token ids.
"""

from __future__ import annotations

from service.exporters.keras.activations import activated
from service.exporters.keras.layers import LAYERS, ONNX, product
from service.exporters.keras.network import Network, Tensor
from service.exporters.keras.recurrent import recurrent
from service.exporters.model import Export, Model, Part
from service.exporters.recipe import recipe
from service.modeling.spec import (
    ClassifyHead,
    EmbedHead,
    Head,
    ModelSpec,
    NextHead,
    PoolingHead,
    RegressHead,
    SpanHead,
    TagHead,
)
from service.modeling.spec.layers import GatedLayer

POOLS = {"max": "GlobalMaxPooling1D", "mean": "GlobalAveragePooling1D"}
NO_MASK = "the model has no mask: give Keras sequences of one length together, without padding"


def export(model: Model) -> Export:
    """Return the file of a model; raises ExportRefused."""
    _check_pools(model)
    spec, network = model.spec, Network(model.spec.input.features)
    x, final = network.input, None
    top = len(spec.layers) - 1
    for index, (layer, part) in enumerate(model.layers()):
        network.start(part.place)
        part.refuse(
            part.kind not in LAYERS and not isinstance(layer, GatedLayer),
            "Keras has no layer like it",
            "Export the model to PyTorch",
        )
        if isinstance(layer, GatedLayer):
            _check_order(spec, layer, part, is_top=index == top)
            ends = spec.pools if index == top else ()
            x, final = recurrent(network, layer, part, x, steps=ends != ("last",), final="last" in ends)
        else:
            x = LAYERS[part.kind](network, layer, part, x)
    output = _answer(network, spec.head, model.head(), x, final)
    return Export(network.h5(spec.name, output), recipe(spec), [NO_MASK])


def _check_pools(model: Model) -> None:
    spec, head = model.spec, model.head()
    for pool in spec.pools:
        head.refuse(pool not in ("last", *POOLS), f'pool is "{pool}", and Keras has no layer that computes it', ONNX)
    head.refuse(
        "last" in spec.pools and not isinstance(spec.layers[-1], GatedLayer),
        'pool is "last" above a layer that is not recurrent, and Keras has no layer that takes the last step',
        ONNX,
    )


def _check_order(spec: ModelSpec, layer: GatedLayer, part: Part, *, is_top: bool) -> None:
    """Raise ExportRefused for reversed steps that a layer above reads, or that are answered: Keras leaves them in reverse order."""
    part.refuse(
        layer.direction == "backward" and not (is_top and spec.pools),
        "its steps are used in the order of the input, and Keras leaves those of a backward layer in reverse order",
        ONNX,
    )


def _answer(network: Network, head: Head, part: Part, x: Tensor, final: Tensor | None) -> Tensor:
    network.start("head")
    if isinstance(head, TagHead):
        return _named(network, "softmax", product(network, part, x))
    if isinstance(head, SpanHead):
        return product(network, part, x)
    if isinstance(head, NextHead):
        return _named(network, "softmax", product(network, part, x))
    return _pooled_answer(network, head, part, x, final) if isinstance(head, PoolingHead) else x


def _pooled_answer(network: Network, head: PoolingHead, part: Part, x: Tensor, final: Tensor | None) -> Tensor:
    vector = _vector(network, head, part, x, final)
    for index, layer in enumerate(head.dense):
        vector = activated(network, layer.activation, part, product(network, part, vector, f"dense.{index}."))
    if isinstance(head, EmbedHead):
        return network.add("UnitNormalization", vector, shape=vector.shape, axis=-1) if head.normalize else vector
    logits = product(network, part, vector)
    if isinstance(head, ClassifyHead):
        return _named(network, "sigmoid" if head.multi_label else "softmax", logits)
    assert isinstance(head, RegressHead), "no other head pools"
    return activated(network, head.activation, part, logits)


def _vector(network: Network, head: PoolingHead, part: Part, x: Tensor, final: Tensor | None) -> Tensor:
    """Return the joined pools. Vectors, of a text_cnn or of a layer that returns its last output alone, are pooled already."""
    if len(x.shape) == 2:
        return x
    pooled = []
    for pool in head.pool:
        if pool == "last":
            assert final is not None, "the layer returns its states for this pool"
            pooled.append(final)
        else:
            pooled.append(network.add(POOLS[pool], x, shape=(None, x.width)))
    return pooled[0] if len(pooled) == 1 else network.add("Concatenate", *pooled, shape=(None, part.inputs * len(pooled)))


def _named(network: Network, activation: str, x: Tensor) -> Tensor:
    return network.add("Activation", x, shape=x.shape, activation=activation)
