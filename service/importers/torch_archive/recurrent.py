"""Translates nn.LSTM, nn.GRU and nn.RNN of torch. The gate orders equal model.toml's, and a GRU keeps the bias of its new gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from service.importers.chain import operations
from service.importers.chain.signal import Role, Signal, concatenate
from service.importers.draft import Array, ImportRefused
from service.importers.onnx.recurrent import final_state, step_outputs
from service.importers.onnx.values import Constant, FinalCell, State
from service.importers.torch_archive.operation import ArchiveOperation, array_of
from service.importers.torch_archive.packing import Packed
from service.modeling.layers import GATED, kinds_by_name

KINDS = kinds_by_name("torch")
DIRECTIONS = ("forward", "backward")


def recurrent(operation: ArchiveOperation) -> list[Any]:
    """Return every step, the final hidden states of all layers, and for an LSTM their cells."""
    kind = KINDS[operation.call.name]
    packed = operation.call.get("data")
    batch_first = packed.batch_first if isinstance(packed, Packed) else bool(operation.call.get("batch_first", False))
    x = packed.steps if isinstance(packed, Packed) else operation.x
    x.expect(*((Role.BATCH, Role.STEPS) if batch_first else (Role.STEPS, Role.BATCH)), Role.COLUMNS)
    operation.reading.progress += 1  # the axes fit: other readings of the input fail here
    finals = []
    for level in range(int(operation["num_layers"])):
        x, final = _level(operation, x, kind, level, time_major=not batch_first)
        finals.append(final)
    steps = Packed(x, batch_first, packed.lengths) if isinstance(packed, Packed) else x
    hidden = concatenate(finals, 0)
    return [steps, hidden, FinalCell(operation.call.name)] if kind == "lstm" else [steps, hidden]


def _level(operation: ArchiveOperation, x: Signal, kind: str, level: int, *, time_major: bool) -> tuple[Signal, Signal]:
    """Return every step of a level, and its final hidden state, (directions, batch, hidden)."""
    count = 2 if operation["bidirectional"] else 1
    directions = {DIRECTIONS[index]: _weights(operation, kind, level * count + index) for index in range(count)}
    for name in [*directions]:
        if directions[name]["input"].shape[0] != x.shape[-1]:
            raise ImportRefused(
                f"its weights take {directions[name]['input'].shape[0]} columns, and its input has {x.shape[-1]} columns"
            )
    for index, tensors in enumerate(directions.values()):
        _add_start(operation, kind, level * count + index, tensors)
    layer, order = operations.recurrent(
        x, kind, _options(operation, kind, directions), directions, operation.call.name, operation.origins
    )
    steps = step_outputs(x, layer, order, time_major=time_major)
    final = final_state(x, layer, order, time_major=time_major)
    joined = steps.transpose([0, 2, 1, 3]) if time_major else steps
    final = final if time_major else final.transpose([1, 0, 2])
    return joined.reshape([*joined.shape[:2], order.size]), final


def _weights(operation: ArchiveOperation, kind: str, index: int) -> dict[str, Array]:
    """Return the tensors of one direction of a level."""
    arrays = [array_of(value, "params") for value in operation["params"]]
    biased = bool(operation["has_biases"])
    projected = kind == "lstm" and len(arrays) % (5 if biased else 3) == 0 and arrays[0].shape[0] // 4 != arrays[1].shape[1]
    per_direction = 2 + 2 * biased + projected
    own = arrays[per_direction * index : per_direction * (index + 1)]
    if len(own) < per_direction:
        raise ImportRefused(f"it has {len(arrays)} weights, and more are needed")
    wide, recurrent = own[0], own[1]
    gates = len(GATED[kind].gates)
    hidden = wide.shape[0] // gates
    biases = own[2:4] if biased else [np.zeros(gates * hidden, np.float32)] * 2
    outputs = own[-1].shape[0] if projected else hidden
    shapes = [(gates * hidden, wide.shape[1]), (gates * hidden, outputs), (gates * hidden,), (gates * hidden,)]
    if [array.shape for array in (wide, recurrent, *biases)] != shapes:
        raise ImportRefused(f"its weights have the shapes {[array.shape for array in own]}, which do not fit together")
    tensors = {"input": wide.T, "recurrent": recurrent.T, **GATED[kind].joined_biases(*biases, keeps_last=kind == "gru")}
    return {**tensors, "projection": own[-1].T} if projected else tensors


def _options(operation: ArchiveOperation, kind: str, directions: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
    first = directions["forward"]
    options: dict[str, Any] = {"hidden": first["input"].shape[1] // len(GATED[kind].gates)}
    options |= {"activation": "relu"} if operation.call.name == "rnn_relu" else {}
    options |= {"projection": first["projection"].shape[1]} if "projection" in first else {}
    if any("start" in tensors for tensors in directions.values()):
        options["learned_start"] = True
    return options


def _add_start(operation: ArchiveOperation, kind: str, index: int, tensors: dict[str, Array]) -> None:
    """Add initial states that are constant and not zero."""
    given = operation["hx"]
    states: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    names = GATED[kind].starts
    sizes = tensors["recurrent"].shape[0], tensors["input"].shape[1] // len(GATED[kind].gates)
    starts = {name: _start(operation, state, index, size) for name, state, size in zip(names, states, sizes, strict=False)}
    if any(start is not None for start in starts.values()) or _any_start(states):
        tensors |= {
            name: np.zeros(size) if start is None else start for (name, start), size in zip(starts.items(), sizes, strict=False)
        }


def _any_start(states: Sequence[Any]) -> bool:
    return any(isinstance(state, Constant) and bool(state.array.any()) for state in states)


def _start(operation: ArchiveOperation, state: Any, index: int, size: int) -> Array | None:
    """Return the initial state of a direction, or None if it is zero or comes with a request."""
    if isinstance(state, State):
        operation.reading.note(
            f"{operation.call.name} starts from the input {state.name}: here from zeros, or from states in the request"
        )
        return None
    if not isinstance(state, Constant):
        raise ImportRefused(
            "its initial states follow from the sequence: a model has one initial state, or takes it from a request"
        )
    array = state.array
    if array.ndim != 3 or array.shape[1] not in (1, operation.reading.batch) or array.shape[2] != size or len(array) <= index:
        raise ImportRefused(f"its initial state has the shape {array.shape}, which does not fit its weights and input")
    if (array != array[:, :1]).any():
        raise ImportRefused("its initial states differ by sequence: a model has one initial state, or takes it from a request")
    own: Array = array[index, 0]
    return own if own.any() else None


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = dict.fromkeys(KINDS, recurrent)
