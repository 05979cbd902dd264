"""Activations of model.toml as operators of ONNX."""

from __future__ import annotations

from service.exporters.onnx.graph import ExportedGraph
from service.modeling.spec.activations import ONNX, PARAMETERS, Activation

BOUNDS = {"relu6": (0.0, 6.0), "hard_tanh": (-1.0, 1.0)}


def activated(graph: ExportedGraph, activation: Activation, x: str) -> str:
    """Add an activation of every number."""
    kind, named = activation.kind, parameters(activation)
    if kind == "none":
        return x
    if kind in BOUNDS or kind == "clip":
        return graph.add("Clip", x, *map(graph.number, BOUNDS.get(kind, named.values())))
    if kind in ("gelu", "gelu_tanh"):
        return graph.add("Gelu", x, approximate="none" if kind == "gelu" else "tanh")
    if kind == "silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if kind == "scaled_tanh":
        inner = graph.add("Tanh", graph.add("Mul", x, graph.number(named["beta"])))
        return graph.add("Mul", inner, graph.number(named["alpha"]))
    if kind == "affine":
        return graph.add("Add", graph.add("Mul", x, graph.number(named["alpha"])), graph.number(named["beta"]))
    return graph.add(ONNX[kind], x, outputs=1, **named)


def parameters(activation: Activation) -> dict[str, float]:
    """Return the parameters of an activation by name, defaults included."""
    return dict(zip(PARAMETERS.get(activation.kind, {}), map(float, activation.parameters), strict=True))
