"""Translates LSTM, GRU and RNN of ONNX.

Gate blocks are stacked along the first axis of a matrix, and along the last axis in a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from service.importers.chain.functions import as_written
from service.importers.chain.recurrent import add_starts, final_state, start_states, step_outputs
from service.importers.chain.recurrent import recurrent as run
from service.importers.chain.signal import Role
from service.importers.chain.values import Constant, FinalCell, Lengths, Value
from service.importers.draft import Array, ImportRefused
from service.importers.onnx.operation import Operation
from service.modeling.layers import GATED, kinds_by_name
from service.modeling.spec.activations import ONNX_RECURRENT, PARAMETERS

DIRECTIONS = {"forward": ("forward",), "reverse": ("backward",), "bidirectional": ("forward", "backward")}
KINDS = kinds_by_name("onnx")
ACTIVATIONS = {name.lower(): kind for kind, name in ONNX_RECURRENT.items()}
_, W, R, B, LENGTHS, HIDDEN, CELL, PEEPHOLES = range(8)


def recurrent(operation: Operation) -> list[Value]:
    """Return every step, the final hidden state, and the final cell state."""
    x, kind = operation.signal, KINDS[operation.node.op_type]
    time_major = not operation.attributes.get("layout", 0)
    x.expect(*((Role.STEPS, Role.BATCH) if time_major else (Role.BATCH, Role.STEPS)), Role.COLUMNS)
    operation.reading.progress += 1  # the axes fit: other readings of the input fail here
    _check_lengths(operation)
    names = DIRECTIONS.get(operation.attributes.get("direction", "forward"))
    if names is None:
        raise ImportRefused(f"its direction is {operation.attributes['direction']!r}")
    directions = {name: _weights(operation, index, len(names)) for index, name in enumerate(names)}
    states = [_state(operation, number, time_major=time_major) for number in (HIDDEN, CELL)]
    first = next(iter(directions.values()))
    add_starts(kind, directions, start_states(kind, first, states, len(names), operation.label, operation.reading))
    options = _options(operation, directions)
    layer, order = run(x, kind, options, directions, operation.label, operation.origins)
    final = final_state(x, layer, order, time_major=time_major)
    return [step_outputs(x, layer, order, time_major=time_major), final, FinalCell(operation.label)]


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
    kind = GATED[KINDS[operation.node.op_type]]
    gates = len(kind.gates)
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
    resets_after = kind.name == "gru" and bool(operation.attributes.get("linear_before_reset", 0))
    tensors = kind.tensors("onnx", w.T, r.T, *np.split(b, 2), keeps_last=resets_after)
    if kind.name == "lstm":
        tensors |= _peepholes(operation, index, count, hidden)
    return _coupled(operation, tensors, hidden) if operation.attributes.get("input_forget", 0) else tensors


def _of_direction(operation: Operation, number: int, name: str, index: int, count: int) -> Array:
    array = operation.weights(number, name)
    if array.ndim < 2 or array.shape[0] != count:
        raise ImportRefused(f"its weight {name} has the shape {array.shape}, and the node has {count} directions")
    of_direction: Array = array[index]
    return of_direction


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
    """Return the options of the layer in model.toml, except defaults and those that follow from its tensors."""
    kind = GATED[KINDS[operation.node.op_type]]
    found = zip(kind.activations, _activations(operation), kind.default_activations, strict=True)
    options: dict[str, Any] = {role: activation for role, activation, default in found if activation != default}
    clip = float(operation.attributes.get("clip", 0.0))
    if clip < 0:
        raise ImportRefused(f"its clip is {clip}, and the limit of gate inputs is a positive number")
    if any("peephole" in tensors for tensors in directions.values()):
        for tensors in directions.values():
            tensors.setdefault("peephole", np.zeros(3 * len(tensors["recurrent"])))
    return options | ({"clip": clip} if clip else {})


def _activations(operation: Operation) -> list[str | dict[str, Any]]:
    """Return the activations of both directions, which must agree."""
    defaults = GATED[KINDS[operation.node.op_type]].default_activations
    count = len(defaults)
    names = operation.attributes.get("activations") or defaults
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
    kind, lists = ACTIVATIONS[name.lower()], {"alpha": alphas, "beta": betas}
    values = {parameter: float(next(lists[parameter], value)) for parameter, value in PARAMETERS.get(kind, {}).items()}
    return as_written({"kind": kind, **values})


def _state(operation: Operation, number: int, *, time_major: bool) -> Value | None:
    """Return an initial state, (directions, batch, hidden)."""
    value = operation.inputs[number] if operation.has(number) else None
    return Constant(value.array.swapaxes(0, 1)) if isinstance(value, Constant) and not time_major else value


OPERATORS = dict.fromkeys(KINDS, recurrent)
