"""rnn, lstm and gru as SimpleRNN, LSTM and GRU of Keras, in Bidirectional for both directions.

Gates are along the last axis: i f c o as in a model, and z r h in a GRU, where a model has r z n.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from service.exporters.keras.activations import name, refuse_unknown
from service.exporters.keras.network import Network, Shape, Tensor
from service.exporters.model import Part
from service.importers.draft import Array
from service.modeling.spec import GatedLayer, GRULayer, LSTMLayer, RNNLayer

CLASSES = {"rnn": "SimpleRNN", "lstm": "LSTM", "gru": "GRU"}
MERGES = {"concat": "concat", "sum": "sum", "mean": "ave", "product": "mul"}
COMBINATIONS = {"concat": "Concatenate", "sum": "Add", "mean": "Average", "product": "Multiply"}
STATES = {"rnn": 1, "lstm": 2, "gru": 1}
ONNX = "Export the model to ONNX"


def recurrent(
    network: Network, layer: GatedLayer, part: Part, x: Tensor, *, steps: bool, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Add a layer; return every step, or the final state without `steps`, and the final state if both are wanted."""
    _check(layer, part)
    for level in range(layer.depth):
        network.start(f"{part.place}.{level}")
        is_top = level == layer.depth - 1
        returned = {"return_sequences": steps or not is_top, "return_state": steps and final and is_top}
        x = _level(network, layer, part, level, x, returned)
    return x, _final(network, layer, x) if steps and final else None


def _check(layer: GatedLayer, part: Part) -> None:
    of_keras = f"{CLASSES[part.kind]} of Keras"
    part.refuse(layer.layer_norm, f"layer_norm is set, and {of_keras} has no norms", "Such a model has no checkpoint elsewhere")
    part.refuse(layer.learned_start, f"learned_start is set, and {of_keras} starts from zeros", ONNX)
    part.refuse(layer.clip is not None, f"clip is {layer.clip}, and {of_keras} does not clip", ONNX)
    if isinstance(layer, LSTMLayer):
        part.refuse(layer.peepholes, f"peepholes is set, and {of_keras} has none", ONNX)
        part.refuse(
            layer.projection is not None,
            f"projection is {layer.projection}, and {of_keras} has none",
            "Export the model to PyTorch",
        )
        part.refuse(
            layer.output_activation != layer.activation,
            f"output_activation differs from activation, and {of_keras} has one for both",
            ONNX,
        )


def _level(network: Network, layer: GatedLayer, part: Part, level: int, x: Tensor, returned: dict[str, bool]) -> Tensor:
    """Add one level. The steps of a backward layer are in reverse order, which is the order in which the next level reads them."""
    width = layer.outputs
    shape: Shape = (None, None, width) if returned["return_sequences"] else (None, width)
    weights = {
        f"{direction}_{tensor}": array
        for direction in layer.directions
        for tensor, array in _weights(layer, part, f"{level}.{direction}").items()
    }
    kind = CLASSES[part.kind]
    config = {**_config(layer, part), **returned}
    if not layer.bidirectional:
        reads_backward = layer.direction == "backward" and level == 0
        return network.add(kind, x, shape=shape, weights=weights, **config, go_backwards=reads_backward)
    inner = {
        "module": "keras.layers",
        "class_name": kind,
        "config": {"name": f"{part.kind}_{level}", **config},
        "registered_name": None,
    }
    return network.add("Bidirectional", x, shape=shape, weights=weights, layer=inner, merge_mode=MERGES[layer.merge])


def _config(layer: GatedLayer, part: Part) -> dict[str, Any]:
    assert isinstance(layer, RNNLayer | LSTMLayer | GRULayer), "no other layer is gated"
    named = {"activation": layer.activation}
    if isinstance(layer, LSTMLayer | GRULayer):
        named["recurrent_activation"] = layer.gate_activation
    for activation in named.values():
        refuse_unknown(activation, part, name(activation) is None)
    config: dict[str, Any] = {"units": layer.hidden} | {key: name(activation) for key, activation in named.items()}
    return config | ({"reset_after": layer.reset_after} if isinstance(layer, GRULayer) else {})


def _weights(layer: GatedLayer, part: Part, place: str) -> dict[str, Array]:
    arrays = [_blocks(part, f"{place}.{tensor}") for tensor in ("input", "recurrent", "bias")]
    if isinstance(layer, GRULayer) and layer.reset_after:
        inner = np.zeros_like(arrays[2])
        inner[-layer.hidden :] = part.numpy(f"{place}.recurrent_bias")
        arrays[2] = np.stack([arrays[2], inner])
    return dict(zip(("kernel", "recurrent_kernel", "bias"), arrays, strict=True))


def _blocks(part: Part, tensor: str) -> Array:
    array = part.numpy(tensor)
    if part.kind != "gru":
        return array
    reset, update, new = np.split(array, 3, axis=-1)
    return np.concatenate([update, reset, new], axis=-1)


def _final(network: Network, layer: GatedLayer, x: Tensor) -> Tensor:
    """Return the final hidden state of a layer that returns its states after its steps."""
    kind = layer.kind  # type: ignore[attr-defined]  # every layer of a model has a kind
    places = [1 + STATES[kind] * index for index in range(len(layer.directions))]
    states = [Tensor(x.layer, place, (None, layer.hidden)) for place in places]
    if len(states) == 1:
        return states[0]
    return network.add(COMBINATIONS[layer.merge], *states, shape=(None, layer.outputs))
