"""Translates nn.LSTM, nn.GRU and nn.RNN of torch. The gate orders equal model.toml's, and a GRU keeps the bias of its new gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from service.importers.chain.recurrent import add_starts, final_state, start_states, step_outputs
from service.importers.chain.recurrent import recurrent as run
from service.importers.chain.signal import Role, concatenate
from service.importers.chain.values import FinalCell
from service.importers.draft import Array, ImportRefused
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
    count = 2 if operation["bidirectional"] else 1
    weights = [_weights(operation, kind, index) for index in range(int(operation["num_layers"]) * count)]
    given = operation["hx"]
    states: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    starts = start_states(kind, weights[0], states, len(weights), operation.call.name, operation.reading)
    options = {"activation": "relu"} if operation.call.name == "rnn_relu" else {}
    finals = []
    for first in range(0, len(weights), count):
        directions = dict(zip(DIRECTIONS, weights[first : first + count], strict=False))
        add_starts(kind, directions, starts, first)
        inputs = next((len(tensors["input"]) for tensors in directions.values() if len(tensors["input"]) != x.shape[-1]), None)
        if inputs is not None:
            raise ImportRefused(f"its weights take {inputs} columns, and its input has {x.shape[-1]} columns")
        layer, order = run(x, kind, options, directions, operation.call.name, operation.origins)
        steps, final = (outputs(x, layer, order, time_major=not batch_first) for outputs in (step_outputs, final_state))
        finals.append(final.transpose([1, 0, 2]) if batch_first else final)
        joined = steps if batch_first else steps.transpose([0, 2, 1, 3])
        x = joined.reshape([*joined.shape[:2], order.size])
    output = Packed(x, batch_first, packed.lengths) if isinstance(packed, Packed) else x
    return [output, concatenate(finals, 0), *[FinalCell(operation.call.name)] * (kind == "lstm")]


def _weights(operation: ArchiveOperation, kind: str, index: int) -> dict[str, Array]:
    """Return the tensors of one direction of a level."""
    arrays = [array_of(value, "params") for value in operation["params"]]
    biased = bool(operation["has_biases"])
    projected = kind == "lstm" and len(arrays) % (5 if biased else 3) == 0 and arrays[0].shape[0] // 4 != arrays[1].shape[1]
    per_direction = 2 + 2 * biased + projected
    direction = arrays[per_direction * index : per_direction * (index + 1)]
    if len(direction) < per_direction:
        raise ImportRefused(f"it has {len(arrays)} weights, and more are needed")
    wide, recurrent = direction[0], direction[1]
    gates = len(GATED[kind].gates)
    hidden = wide.shape[0] // gates
    biases = direction[2:4] if biased else [np.zeros(gates * hidden, np.float32)] * 2
    outputs = direction[-1].shape[0] if projected else hidden
    shapes = [(gates * hidden, wide.shape[1]), (gates * hidden, outputs), (gates * hidden,), (gates * hidden,)]
    if [array.shape for array in (wide, recurrent, *biases)] != shapes:
        raise ImportRefused(f"its weights have the shapes {[array.shape for array in direction]}, which do not fit together")
    tensors = GATED[kind].tensors("torch", wide.T, recurrent.T, *biases, keeps_last=kind == "gru")
    return {**tensors, "projection": direction[-1].T} if projected else tensors


OPERATORS: dict[str, Callable[[ArchiveOperation], Any]] = dict.fromkeys(KINDS, recurrent)
