"""Activations of model.toml by their names in Keras 3, or as layers with parameters."""

from __future__ import annotations

from typing import Any

from service.exporters.keras.network import Network, Tensor
from service.exporters.model import Part
from service.modeling.spec import Activation

NAMES = {
    "none": "linear",
    **{name: name for name in ("sigmoid", "tanh", "relu", "relu6", "selu", "gelu", "silu", "softplus", "softsign")},
    **{name: name for name in ("hard_tanh", "exponential")},
}
WITH_PARAMETERS = {"elu": (1.0,), "leaky_relu": (0.2,), "hard_sigmoid": (1 / 6, 0.5)}
"""Activations that Keras has by name with these parameters only."""


def name(activation: Activation) -> str | None:
    """Return the name of an activation, or None if Keras has none with these parameters."""
    if activation.kind in WITH_PARAMETERS and activation.parameters == WITH_PARAMETERS[activation.kind]:
        return activation.kind
    return NAMES.get(activation.kind)


def activated(network: Network, activation: Activation, part: Part, x: Tensor) -> Tensor:
    """Add an activation of every number."""
    if activation.kind == "none":
        return x
    known = name(activation)
    kind, config = ("Activation", {"activation": known}) if known is not None else _layer(activation, part)
    return network.add(kind, x, shape=x.shape, **config)


def _layer(activation: Activation, part: Part) -> tuple[str, dict[str, Any]]:
    """Return the layer of an activation with parameters; raises ExportRefused if Keras has none."""
    alpha, beta = (*activation.parameters, 0.0, 0.0)[:2]
    layers: dict[str, tuple[str, dict[str, Any]]] = {
        "elu": ("ELU", {"alpha": alpha}),
        "leaky_relu": ("LeakyReLU", {"negative_slope": alpha}),
        "affine": ("Rescaling", {"scale": alpha, "offset": beta}),
    }
    if activation.kind == "thresholded_relu" and alpha >= 0:
        layers["thresholded_relu"] = ("ReLU", {"threshold": alpha})
    refuse_unknown(activation, part, activation.kind not in layers)
    return layers[activation.kind]


def refuse_unknown(activation: Activation, part: Part, condition: bool) -> None:
    part.refuse(
        condition,
        f"Keras has no activation {activation.kind} with the parameters {activation.parameters}"
        if activation.parameters
        else f"Keras has no activation {activation.kind} by name",
        "Export the model to ONNX",
    )
