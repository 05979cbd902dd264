"""Translates LSTM, GRU and RNN of ONNX.

Gate blocks are stacked along the first axis of a matrix, and along the last axis in a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from service.importers.chain import operations
from service.importers.chain.functions import as_written
from service.importers.chain.nodes import Layer, Pooled
from service.importers.chain.signal import Columns, Role, Signal, axis
from service.importers.draft import Array, ImportRefused
from service.importers.onnx.operation import Operation
from service.importers.onnx.values import Constant, FinalCell, Lengths, State, Value
from service.modeling.layers import GATED

DIRECTIONS = {"forward": ("forward",), "reverse": ("backward",), "bidirectional": ("forward", "backward")}
DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
ACTIVATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "affine": ("affine", {"alpha": 1.0, "beta": 0.0}),
    "elu": ("elu", {"alpha": 1.0}),
    "hardsigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "leakyrelu": ("leaky_relu", {"alpha": 0.01}),
    "relu": ("relu", {}),
    "scaledtanh": ("scaled_tanh", {"alpha": 1.0, "beta": 1.0}),
    "sigmoid": ("sigmoid", {}),
    "softplus": ("softplus", {}),
    "softsign": ("softsign", {}),
    "tanh": ("tanh", {}),
    "thresholdedrelu": ("thresholded_relu", {"alpha": 1.0}),
}
"""Activations by their names in lower case: their names in model.toml, and the parameters that they take from the lists of a node."""
X, W, R, B, LENGTHS, HIDDEN, CELL, PEEPHOLES = range(8)


def recurrent(operation: Operation) -> list[Value]:
    """Return every step, the final hidden state, and the final cell state."""
    x, kind = operation.signal, operation.node.op_type
    time_major = not operation.attributes.get("layout", 0)
    x.expect(*((Role.STEPS, Role.BATCH) if time_major else (Role.BATCH, Role.STEPS)), Role.COLUMNS)
    operation.reading.progress += 1  # the axes fit: other readings of the input fail here
    _check_lengths(operation)
    names = DIRECTIONS.get(operation.attributes.get("direction", "forward"))
    if names is None:
        raise ImportRefused(f"its direction is {operation.attributes['direction']!r}")
    directions = {name: _weights(operation, index, len(names)) for index, name in enumerate(names)}
    _add_starts(operation, directions, time_major=time_major)
    options = _options(operation, directions)
    layer, order = operations.recurrent(x, kind.lower(), options, directions, operation.label, operation.origins)
    final = final_state(x, layer, order, time_major=time_major)
    return [step_outputs(x, layer, order, time_major=time_major), final, FinalCell(operation.label)]


def step_outputs(x: Signal, layer: Layer, order: Columns, *, time_major: bool) -> Signal:
    """Return every step: (steps, directions, batch, hidden), or (batch, steps, directions, hidden)."""
    directions, hidden = axis(Role.COLUMNS, order.shape[0]), axis(Role.COLUMNS, order.shape[1])
    axes = (x.axes[0], directions, x.axes[1], hidden) if time_major else (x.axes[0], x.axes[1], directions, hidden)
    return _shaped(replace(x, axes=axes, parts=(layer,)), order)


def final_state(x: Signal, layer: Layer, order: Columns, *, time_major: bool) -> Signal:
    """Return the final hidden state: (directions, batch, hidden), or (batch, directions, hidden)."""
    directions, hidden = axis(Role.COLUMNS, order.shape[0]), axis(Role.COLUMNS, order.shape[1])
    axes = (directions, x.axes[1], hidden) if time_major else (x.axes[0], directions, hidden)
    return _shaped(replace(x, axes=axes, parts=(Pooled(layer, ("last",)),), is_reversed=False), order)


def _shaped(x: Signal, order: Columns) -> Signal:
    return replace(x, columns=order.reshape([one.size for one in x.axes if one.is_columns]))


def _check_lengths(operation: Operation) -> None:
    if not operation.has(LENGTHS):
        return
    lengths = operation.inputs[LENGTHS]
    if isinstance(lengths, Lengths) and lengths.plus == 0:
        operation.reading.lengths = True
    elif not (isinstance(lengths, Constant) and (lengths.array == operation.signal.shape[operation.signal.steps_axis]).all()):
        raise ImportRefused("its sequence_lens are not the lengths of the input's sequences")


def _weights(operation: Operation, index: int, count: int) -> dict[str, Array]:
    """Return the tensors of one direction, in the layout of model.toml."""
    kind = operation.node.op_type
    gates = len(GATED[kind.lower()].gates)
    w, r = (_of_direction(operation, number, name, index, count) for number, name in ((W, "W"), (R, "R")))
    hidden = r.shape[-1]
    if w.shape != (gates * hidden, operation.signal.shape[-1]) or r.shape != (gates * hidden, hidden):
        raise ImportRefused(
            f"its weights W and R have the shapes {w.shape} and {r.shape} in one direction, which do not fit its input"
        )
    if operation.attributes.get("hidden_size", hidden) != hidden:
        raise ImportRefused(f"its hidden_size is {operation.attributes['hidden_size']}, and its weights have {hidden} units")
    b = _of_direction(operation, B, "B", index, count) if operation.has(B) else np.zeros(2 * gates * hidden, np.float32)
    if b.shape != (2 * gates * hidden,):
        raise ImportRefused(
            f"its bias B has the shape {b.shape} in one direction, and its weights need {(2 * gates * hidden,)}"
        )
    of_input, of_state = (_blocks(kind, half) for half in np.split(b, 2))
    resets_after = kind == "GRU" and bool(operation.attributes.get("linear_before_reset", 0))
    tensors = {"input": _blocks(kind, w), "recurrent": _blocks(kind, r)}
    tensors |= GATED[kind.lower()].joined_biases(of_input, of_state, keeps_last=resets_after)
    if kind == "LSTM":
        tensors |= _peepholes(operation, index, count, hidden)
    return _coupled(operation, tensors, hidden) if operation.attributes.get("input_forget", 0) else tensors


def _of_direction(operation: Operation, number: int, name: str, index: int, count: int) -> Array:
    array = operation.weights(number, name)
    if array.ndim < 2 or array.shape[0] != count:
        raise ImportRefused(f"its weight {name} has the shape {array.shape}, and the node has {count} directions")
    of_direction: Array = array[index]
    return of_direction


def _blocks(kind: str, array: Array) -> Array:
    """Return gate blocks in the order of model.toml, along the last axis."""
    return GATED[kind.lower()].from_framework("onnx", array.T)


def _peepholes(operation: Operation, index: int, count: int, hidden: int) -> dict[str, Array]:
    if not operation.has(PEEPHOLES):
        return {}
    p = _of_direction(operation, PEEPHOLES, "P", index, count)
    if p.shape != (3 * hidden,):
        raise ImportRefused(f"its peepholes P have the shape {p.shape} in one direction, and its weights need {(3 * hidden,)}")
    return {"peephole": GATED["lstm"].from_framework("onnx", p, without="cell")} if p.any() else {}


def _coupled(operation: Operation, tensors: dict[str, Array], hidden: int) -> dict[str, Array]:
    """Make the forget gate one minus the input gate, as ONNX Runtime does: the logistic function of the negated input gate."""
    if _activations(operation)[0] != "sigmoid":
        raise ImportRefused("it couples the input and forget gates, and their activation is not Sigmoid: train it with Sigmoid")
    operation.reading.note(
        f"{operation.label} couples its gates: the forget gate is one minus the input gate, as in ONNX Runtime"
    )
    coupled = {}
    for name, array in tensors.items():
        of_input, _, *others = np.split(array, 3 if name == "peephole" else 4, axis=-1)
        coupled[name] = np.concatenate([of_input, -of_input, *others], axis=-1)
    return coupled


def _options(operation: Operation, directions: dict[str, dict[str, Array]]) -> dict[str, Any]:
    """Return the options of the layer in model.toml, except defaults."""
    kind = operation.node.op_type
    first = next(iter(directions.values()))
    options: dict[str, Any] = {"hidden": len(first["recurrent"])}
    for role, activation, default in zip(GATED[kind.lower()].activations, _activations(operation), DEFAULTS[kind], strict=True):
        options |= {} if activation == default.lower() else {role: activation}
    clip = float(operation.attributes.get("clip", 0.0))
    if clip < 0:
        raise ImportRefused(f"its clip is {clip}, and the limit of gate inputs is a positive number")
    options |= {"clip": clip} if clip else {}
    options |= {"reset_after": False} if kind == "GRU" and "recurrent_bias" not in first else {}
    options |= {"learned_start": True} if "start" in first else {}
    if any("peephole" in tensors for tensors in directions.values()):
        options["peepholes"] = True
        for tensors in directions.values():
            tensors.setdefault("peephole", np.zeros(3 * len(first["recurrent"])))
    return options


def _activations(operation: Operation) -> list[str | dict[str, Any]]:
    """Return the activations of both directions, which must agree."""
    kind = operation.node.op_type
    given = operation.attributes.get("activations") or []
    count = len(DEFAULTS[kind])
    names = given or list(DEFAULTS[kind])
    if len(names) % count:
        raise ImportRefused(f"it has {len(names)} activations, and {count} for each direction are needed")
    alphas, betas = (iter(operation.attributes.get(f"activation_{name}") or []) for name in ("alpha", "beta"))
    every = [_activation(name, alphas, betas) for name in names]
    if any(every[index] != every[index % count] for index in range(len(every))):
        raise ImportRefused("its directions have different activations, and a bidirectional layer has the same for both")
    return every[:count]


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float]) -> str | dict[str, Any]:
    """Return one activation, with the parameters that it takes from the lists of the node, in order."""
    if name.lower() not in ACTIVATIONS:
        raise ImportRefused(f"its activation is {name}, and those of ONNX are {', '.join(sorted(ACTIVATIONS))}")
    kind, defaults = ACTIVATIONS[name.lower()]
    lists = {"alpha": alphas, "beta": betas}
    return as_written(
        {"kind": kind, **{parameter: float(next(lists[parameter], value)) for parameter, value in defaults.items()}}
    )


def _add_starts(operation: Operation, directions: dict[str, dict[str, Array]], *, time_major: bool) -> None:
    """Add initial states that are constant and not zero to the tensors of each direction."""
    names = {"start": HIDDEN} | ({"start_cell": CELL} if operation.node.op_type == "LSTM" else {})
    states = {name: _state(operation, number, time_major=time_major) for name, number in names.items()}
    if all(state is None for state in states.values()):
        return
    for index, tensors in enumerate(directions.values()):
        hidden = len(tensors["recurrent"])
        for name, state in states.items():
            tensors[name] = np.zeros(hidden) if state is None else state[index]


def _state(operation: Operation, number: int, *, time_major: bool) -> Array | None:
    """Return an initial state, (directions, hidden), or None if it is zero or comes with a request."""
    value = operation.inputs[number] if operation.has(number) else None
    if isinstance(value, State):
        operation.reading.note(
            f"{operation.label} starts from the input {value.name}: here from zeros, or from states in the request"
        )
        return None
    if value is None:
        return None
    state = operation.constant(number, "initial state")
    x, directions, hidden = operation.signal, *operation.constant(R, "R").shape[::2]
    batch = x.shape[1 if time_major else 0]
    shape = (directions, batch, hidden) if time_major else (batch, directions, hidden)
    if state.shape not in (shape, tuple(1 if size == batch else size for size in shape)):
        raise ImportRefused(f"its initial state has the shape {state.shape}, and its weights and input need {shape}")
    if not state.any():
        return None
    state = state.astype(np.float64) if time_major else state.astype(np.float64).swapaxes(0, 1)
    if (state != state[:, :1]).any():
        raise ImportRefused("its initial states differ by sequence: a model has one initial state, or takes it from a request")
    return state[:, 0]


OPERATORS = dict.fromkeys(DEFAULTS, recurrent)
