"""The heads of model.toml as operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from service.exporters.model import ExportedPart
from service.exporters.onnx.activations import activated
from service.exporters.onnx.graph import ExportedGraph
from service.exporters.onnx.layers import product
from service.modeling.spec.heads import Head
from service.modeling.spec.heads.descriptor import PoolingHead

STEPS = 1
"""The axis of steps."""
LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The outputs of the layers. steps: (batch, steps, width), or (batch, width) without `has_steps`; final: adds the output
    after the whole sequence, if the last layer is recurrent."""

    steps: str
    final: Callable[[], str] | None
    has_steps: bool


def answer(graph: ExportedGraph, head: Head, part: ExportedPart, x: Encoded) -> str:
    """Add a head, and return its answer."""
    graph.start("head")
    inputs = _vector(graph, head, part, x) if head.pools else x.steps
    if "weight" in part.arrays:
        inputs = _linear(graph, part, inputs) if head.pools else product(graph, part, inputs)
    match head.score_function:
        case "softmax":
            return graph.add("Softmax", inputs, axis=-1)
        case "sigmoid":
            return graph.add("Sigmoid", inputs)
        case "unit_length":
            return graph.add("LpNormalization", inputs, axis=-1, p=2)
        case None:
            return inputs
    return activated(graph, head.score_function, inputs)


def _vector(graph: ExportedGraph, head: Head, part: ExportedPart, x: Encoded) -> str:
    vector = x.steps
    if x.has_steps:
        pooled = [_pooled(graph, pool, part, x) for pool in head.pools]
        vector = pooled[0] if len(pooled) == 1 else graph.add("Concat", *pooled, axis=1)
    vector = _or_zero(graph, vector)
    for index, layer in enumerate(head.dense if isinstance(head, PoolingHead) else ()):
        vector = activated(graph, layer.activation, _linear(graph, part, vector, f"dense.{index}."))
    return vector


def _linear(graph: ExportedGraph, part: ExportedPart, x: str, prefix: str = "") -> str:
    weights = (graph.weight(f"{prefix}{name}", part.numpy(f"{prefix}{name}")) for name in ("weight", "bias"))
    return graph.add("Gemm", x, *weights)


def _pooled(graph: ExportedGraph, pool: str, part: ExportedPart, x: Encoded) -> str:
    if pool == "max":
        return graph.add("ReduceMax", graph.replace_padding(x.steps, LOWEST), graph.integers(STEPS), keepdims=0)
    if pool in ("mean", "sum"):
        return _mean(graph, x.steps) if pool == "mean" else _sum(graph, graph.replace_padding(x.steps, 0.0))
    if pool == "first":
        return graph.add("Gather", x.steps, graph.number(0, np.int64), axis=STEPS)
    if pool == "attention":
        return _attention(graph, part, x.steps)
    return x.final() if pool == "last" and x.final is not None else _last_step(graph, x.steps, part.inputs)


def _or_zero(graph: ExportedGraph, vector: str) -> str:
    """Return zeros for the sequences of a batch that have no steps. What layers and pools compute of padding alone means nothing."""
    if not graph.has_batch:
        return vector
    has_steps = graph.add("Less", graph.number(0, np.int32), graph.add("Unsqueeze", graph.lengths, graph.integers(1)))
    return graph.add("Where", has_steps, vector, graph.number(0.0))


def _last_step(graph: ExportedGraph, x: str, width: int) -> str:
    """Return the last step of each sequence, (batch, width)."""
    if not graph.has_batch:
        return graph.add("Gather", x, graph.number(-1, np.int64), axis=STEPS)
    index = graph.add("Unsqueeze", graph.add("Sub", graph.lengths, graph.number(1, np.int32)), graph.integers(1, 2))
    indexes = graph.add("Expand", index, graph.integers(1, 1, width))
    return graph.add("Squeeze", graph.add("GatherElements", x, indexes, axis=STEPS), graph.integers(STEPS))


def _attention(graph: ExportedGraph, part: ExportedPart, x: str) -> str:
    keys = graph.add("Tanh", product(graph, part, x, "attention.")) if "attention.weight" in part.arrays else x
    scores = graph.add("MatMul", keys, graph.weight("attention.query", part.numpy("attention.query")[:, None]))
    weights = graph.add("Softmax", graph.replace_padding(scores, LOWEST), axis=STEPS)
    return _sum(graph, graph.add("Mul", x, weights))


def _sum(graph: ExportedGraph, x: str) -> str:
    return graph.add("ReduceSum", x, graph.integers(STEPS), keepdims=0)


def _mean(graph: ExportedGraph, x: str) -> str:
    if not graph.has_batch:
        return graph.add("ReduceMean", x, graph.integers(STEPS), keepdims=0)
    count = graph.add("Unsqueeze", graph.add("Cast", graph.lengths, to=TensorProto.FLOAT), graph.integers(1))
    return graph.add("Div", _sum(graph, graph.replace_padding(x, 0.0)), count)
