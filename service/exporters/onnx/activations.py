"""Activations of model.toml as operators of ONNX, and by their names within recurrent operators."""

from __future__ import annotations

from service.exporters.onnx.graph import ExportedGraph
from service.modeling.spec.activations import PARAMETERS, Activation

OPERATORS = {
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "relu": "Relu",
    "leaky_relu": "LeakyRelu",
    "thresholded_relu": "ThresholdedRelu",
    "elu": "Elu",
    "selu": "Selu",
    "softplus": "Softplus",
    "softsign": "Softsign",
    "hard_sigmoid": "HardSigmoid",
    "exponential": "Exp",
}
"""Activations that are one operator with attributes of the same names."""
BOUNDS = {"relu6": (0.0, 6.0), "hard_tanh": (-1.0, 1.0)}
IN_RECURRENT = {
    **{kind: operator for kind, operator in OPERATORS.items() if kind not in ("selu", "exponential")},
    "scaled_tanh": "ScaledTanh",
    "affine": "Affine",
}
"""Activations that LSTM, GRU and RNN know."""


def activated(graph: ExportedGraph, activation: Activation, x: str) -> str:
    """Add an activation of every number."""
    kind, named = activation.kind, parameters(activation)
    if kind == "none":
        return x
    if kind in BOUNDS:
        return graph.add("Clip", x, *(graph.number(bound) for bound in BOUNDS[kind]))
    if kind in ("gelu", "gelu_tanh"):
        return graph.add("Gelu", x, approximate="none" if kind == "gelu" else "tanh")
    if kind == "silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if kind == "scaled_tanh":
        inner = graph.add("Tanh", graph.add("Mul", x, graph.number(named["beta"])))
        return graph.add("Mul", inner, graph.number(named["alpha"]))
    if kind == "affine":
        return graph.add("Add", graph.add("Mul", x, graph.number(named["alpha"])), graph.number(named["beta"]))
    return graph.add(OPERATORS[kind], x, outputs=1, **named)


def parameters(activation: Activation) -> dict[str, float]:
    """Return the parameters of an activation by name, defaults included."""
    return dict(zip(PARAMETERS.get(activation.kind, {}), map(float, activation.parameters), strict=True))
