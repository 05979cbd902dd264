"""rnn, lstm and gru as RNN, LSTM and GRU of ONNX.

A model has gate blocks along the last axis of a matrix, and ONNX along the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from service.exporters.model import ExportedPart
from service.exporters.onnx.activations import parameters
from service.exporters.onnx.graph import INPUT, ExportedGraph
from service.importers.draft import Array
from service.modeling.layers import GATED
from service.modeling.spec.activations import ONNX_RECURRENT, Activation
from service.modeling.spec.layers import GatedLayer, GRULayer, LSTMLayer

DIRECTIONS = {("forward",): "forward", ("backward",): "reverse", ("forward", "backward"): "bidirectional"}


def recurrent(graph: ExportedGraph, layer: GatedLayer, part: ExportedPart, x: str) -> tuple[str, Callable[[], str]]:
    """Add a layer over (batch, steps, inputs); return every step, (batch, steps, width), and a function that adds its
    final state, (batch, width)."""
    _check(layer, part)
    for level in range(layer.depth):
        graph.start(f"{part.place}.{level}")
        node = _node(graph, layer, part, level, graph.add("Transpose", x, perm=[1, 0, 2]))
        x = _merged(graph, layer, graph.add("Transpose", node, perm=[2, 0, 1, 3]), rank=4)
    return x, lambda: _merged(graph, layer, graph.add("Transpose", f"{node}.1", perm=[1, 0, 2]), rank=3)


def _check(layer: GatedLayer, part: ExportedPart) -> None:
    advice = "Such a model has no graph with one operator for the layer"
    part.refuse(layer.layer_norm, "layer_norm is set, and no recurrent operator of ONNX has norms", advice)
    part.refuse(
        isinstance(layer, LSTMLayer) and layer.projection is not None,
        f"projection is {getattr(layer, 'projection', None)}, and LSTM of ONNX has none",
        "Export the model to PyTorch",
    )
    for activation in _activations(layer):
        part.refuse(
            activation.kind not in ONNX_RECURRENT,
            f"recurrent operators of ONNX have no activation {activation.kind}",
            f"They have {', '.join(ONNX_RECURRENT)}",
        )


def _node(graph: ExportedGraph, layer: GatedLayer, part: ExportedPart, level: int, x: str) -> str:
    """Add the operator; return every step, (steps, directions, batch, hidden)."""
    directions = [_weights(part, f"{level}.{name}") for name in layer.directions]
    weights = {name: graph.weight(name, np.stack([each[name] for each in directions])) for name in directions[0]}
    inputs = [x, weights["W"], weights["R"], weights["B"], graph.lengths]
    kind = GATED[part.kind]
    inputs += [_start(graph, part, [f"{level}.{one}.{name}" for one in layer.directions]) for name in kind.starts]
    inputs.append(weights.get("P", ""))
    while not inputs[-1]:
        inputs.pop()
    attributes: dict[str, Any] = {"hidden_size": layer.hidden, "direction": DIRECTIONS[layer.directions]}
    attributes |= _activation_attributes(layer) | ({} if layer.clip is None else {"clip": float(layer.clip)})
    attributes |= {"linear_before_reset": int(layer.reset_after)} if isinstance(layer, GRULayer) else {}
    [operator] = kind.names["onnx"]
    return graph.add(operator, *inputs, outputs=1 + len(kind.starts), **attributes)


def _weights(part: ExportedPart, place: str) -> dict[str, Array]:
    """Return the weights of one direction of a level, by their names in ONNX."""
    names = ("input", "recurrent", "bias", "recurrent_bias", "peephole")
    kind, arrays = GATED[part.kind], {name: part.numpy(f"{place}.{name}") for name in names if f"{place}.{name}" in part.arrays}
    given, recurrent, bias = (kind.to_framework("onnx", arrays[name]) for name in names[:3])
    weights = {"W": given.T, "R": recurrent.T, "B": np.concatenate([bias, kind.recurrent_bias(arrays)])}
    return weights | ({"P": kind.to_framework("onnx", arrays["peephole"], without="cell")} if "peephole" in arrays else {})


def _start(graph: ExportedGraph, part: ExportedPart, names: Sequence[str]) -> str:
    """Return the initial states, (directions, batch, hidden), or an empty name for zeros."""
    if names[0] not in part.arrays:
        return ""
    states = np.stack([part.numpy(name) for name in names])[:, None]
    state = graph.weight(names[0].rpartition(".")[2], states)
    if not graph.has_batch:
        return state
    batch = graph.add("Gather", graph.add("Shape", INPUT), graph.integers(0), axis=0)
    size = graph.add("Concat", graph.integers(len(states)), batch, graph.integers(states.shape[2]), axis=0)
    return graph.add("Expand", state, size)


def _activations(layer: GatedLayer) -> list[Activation]:
    """Return the activations of one direction, in the order of ONNX."""
    return [getattr(layer, key) for key in GATED[layer.kind].activations]  # type: ignore[attr-defined]


def _activation_attributes(layer: GatedLayer) -> dict[str, Any]:
    """Return the attributes for activations. The lists of parameters have entries for the functions that take them only."""
    activations = _activations(layer) * len(layer.directions)
    named = [parameters(activation) for activation in activations]
    lists = {name: [one[name] for one in named if name in one] for name in ("alpha", "beta")}
    return {"activations": [ONNX_RECURRENT[activation.kind] for activation in activations]} | {
        f"activation_{name}": values for name, values in lists.items() if values
    }


def _merged(graph: ExportedGraph, layer: GatedLayer, y: str, *, rank: int) -> str:
    """Combine the directions, which the axis before the last counts. rank: number of axes."""
    axis = rank - 2
    if layer.merge == "concat":
        return graph.add("Reshape", y, graph.integers(*[0] * axis, -1))
    if layer.merge in ("sum", "mean"):
        return graph.add("ReduceSum" if layer.merge == "sum" else "ReduceMean", y, graph.integers(axis), keepdims=0)
    forward, backward = (graph.add("Gather", y, graph.number(index, np.int64), axis=axis) for index in (0, 1))
    return graph.add("Mul", forward, backward)
