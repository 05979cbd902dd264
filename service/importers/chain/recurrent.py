"""Runs an rnn, lstm or gru on a signal, with the outputs and the initial states that all sources share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from service.importers.chain.nodes import Layer, Pooled
from service.importers.chain.operations import scattered, source
from service.importers.chain.reading import Reading
from service.importers.chain.signal import Axis, Columns, Role, Signal, axis
from service.importers.chain.values import Constant, State
from service.importers.draft import Array, ImportRefused
from service.modeling.layers import GATED

Directions = Mapping[str, dict[str, Array]]
"""The tensors of "forward" and "backward", in the layout of model.toml."""


def recurrent(
    x: Signal,
    kind: str,
    options: Mapping[str, Any],
    directions: Directions,
    label: str,
    origins: frozenset[str],
) -> tuple[Layer, Columns]:
    """Run an rnn, lstm or gru; return the layer, and the indexes of each direction's columns in it, (directions, width).

    options: its keys in model.toml that do not follow from its tensors. Over reversed steps, "forward" is the model's backward direction,
    and the outputs are in reverse order as well.
    """
    node, columns = source(x)
    first = next(iter(directions.values()))
    vector = first["recurrent"].shape[0]
    swapped = {"forward": "backward", "backward": "forward"}
    ours = {swapped[name] if x.is_reversed else name: arrays for name, arrays in directions.items()}
    arrays: dict[str, Array] = {}
    for name in sorted(ours, reverse=True):  # forward first
        tensors = {**ours[name], "input": scattered(ours[name]["input"], columns, node.width)}
        arrays |= {f"0.{name}.{tensor}": array for tensor, array in tensors.items()}
    table = {"kind": kind, **GATED[kind].options(first), **options}
    table |= {"bidirectional": True} if len(ours) == 2 else {"direction": "backward"} if "backward" in ours else {}
    layer = Layer(node, table, arrays, vector * len(ours), label, origins)
    order = np.arange(layer.width).reshape(len(ours), vector)
    return layer, order[::-1] if x.is_reversed else order


def step_outputs(x: Signal, layer: Layer, order: Columns, *, time_major: bool) -> Signal:
    """Return every step: (steps, directions, batch, hidden), or (batch, steps, directions, hidden)."""
    directions, hidden = (axis(Role.COLUMNS, size) for size in order.shape)
    axes = (x.axes[0], directions, x.axes[1], hidden) if time_major else (x.axes[0], x.axes[1], directions, hidden)
    return replace(x, axes=axes, parts=(layer,), columns=_as_columns(order, axes))


def final_state(x: Signal, layer: Layer, order: Columns, *, time_major: bool) -> Signal:
    """Return the final hidden state: (directions, batch, hidden), or (batch, directions, hidden)."""
    directions, hidden = (axis(Role.COLUMNS, size) for size in order.shape)
    axes = (directions, x.axes[1], hidden) if time_major else (x.axes[0], directions, hidden)
    return replace(x, axes=axes, parts=(Pooled(layer, ("last",)),), columns=_as_columns(order, axes), is_reversed=False)


def start_states(
    kind: str, tensors: Mapping[str, Array], values: Sequence[object], entries: int, label: str, reading: Reading
) -> dict[str, Array | None]:
    """Return the initial states by name, (levels and directions, size), or None for zeros and for states that come with a request.

    tensors: of one direction; values: the states in the source, (levels and directions, batch, size); entries: their number.
    """
    return {
        name: _start_state(value, (entries, reading.batch, size), label, reading)
        for (name, size), value in zip(_start_sizes(kind, tensors).items(), values, strict=False)
    }


def add_starts(kind: str, directions: Directions, states: Mapping[str, Array | None], first: int = 0) -> None:
    """Add initial states to the tensors of each direction if one of them is not zero. first: the entry of the first direction."""
    if any(state is not None for state in states.values()):
        for index, tensors in enumerate(directions.values(), first):
            for name, size in _start_sizes(kind, tensors).items():
                state = states.get(name)
                tensors[name] = np.zeros(size) if state is None else state[index]


def _start_sizes(kind: str, tensors: Mapping[str, Array]) -> dict[str, int]:
    units = len(tensors["bias"]) // len(GATED[kind].gates)
    return dict(zip(GATED[kind].starts, (tensors["recurrent"].shape[0], units), strict=False))


def _start_state(value: object, shape: tuple[int, ...], label: str, reading: Reading) -> Array | None:
    if isinstance(value, State):
        reading.note(f"{label} starts from the input {value.name}: here from zeros, or from states in the request")
    if value is None or isinstance(value, State):
        return None
    if not isinstance(value, Constant):
        raise ImportRefused(
            "its initial states follow from the sequence: a model has one initial state, or takes it from a request"
        )
    state = value.array
    if state.shape not in (shape, (shape[0], 1, shape[2])):
        raise ImportRefused(f"its initial state has the shape {state.shape}, and its weights and input need {shape}")
    if (state != state[:, :1]).any():
        raise ImportRefused("its initial states differ by sequence: a model has one initial state, or takes it from a request")
    return state[:, 0] if state.any() else None


def _as_columns(order: Columns, axes: Sequence[Axis]) -> Columns:
    return order.reshape([one.size for one in axes if one.is_columns])
