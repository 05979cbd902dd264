"""Reads the variables of TensorFlow 1 from an .npz, and finds the recurrent layers, matrices and filters that they belong to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from service.importers.draft import Array, ImportRefused
from service.modeling.layers import kinds_by_name
from service.modeling.npz import read_npz

OF_TRAINING = re.compile(
    r"(^|/)(Adam|Momentum|RMSProp|Adagrad|Adadelta|ExponentialMovingAverage)(_\d+)?$|(beta\d_power|global_step)"
)
"""Variables of optimizers, and counters."""
KINDS = kinds_by_name("tensorflow 1")
CELL = re.compile(rf"({'|'.join(KINDS)})(_\d+)?")
LEVEL = re.compile(r"cell_(\d+)")
WRAPPERS = ("rnn", "multi_rnn_cell", "stack_bidirectional_rnn", "bidirectional_rnn")
DIRECTIONS = {"fw": "forward", "bw": "backward"}


@dataclass(slots=True)
class Cell:
    """The variables of one level in one direction. kind: of the cell, such as gru_cell; variables: by their names within the cell."""

    kind: str
    variables: dict[str, Array] = field(default_factory=dict)


@dataclass(slots=True)
class LayerVariables:
    """Variables that make one layer. cells: by level and direction, if it is recurrent; variables: others, by the last part of their names;
    names: the whole names; stacks: whether each direction is a separate stack of levels."""

    name: str
    cells: dict[tuple[int, str], Cell] = field(default_factory=dict)
    variables: dict[str, Array] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    stacks: bool = False

    @property
    def matrix(self) -> Array:
        """The weights of an embedding, a dense layer or a convolution."""
        found = [array for leaf, array in self.variables.items() if leaf != "bias"]
        if len(found) != 1:
            raise ImportRefused(
                f"{self.name} has the variables {', '.join(self.names)}, and one matrix is needed, with or without a bias"
            )
        return found[0]


def read_layers(file: Path) -> dict[str, LayerVariables]:
    """Return the layers in a file by name, in its order; raises ImportRefused for arrays that are not weights."""
    layers: dict[str, LayerVariables] = {}
    for written, array in read_npz(file).items():
        name = written.removesuffix(":0")
        if not OF_TRAINING.search(name):
            _add(layers, name, _checked(name, array))
    if not layers:
        raise ImportRefused(f"{file} has no variables: write them with numpy.savez(FILE, **variables)")
    return layers


def _add(layers: dict[str, LayerVariables], name: str, array: Array) -> None:
    parts = name.split("/")
    at = next((index for index, part in enumerate(parts) if CELL.fullmatch(part)), None)
    if at is None:
        place, _, leaf = name.rpartition("/")
        leaf, place = (
            (leaf, place) if leaf in ("kernel", "bias", "embeddings", "weights", "biases") and place else ("weights", name)
        )
        layer = layers.setdefault(place, LayerVariables(place))
        layer.variables["bias" if leaf == "biases" else leaf] = array
    else:
        scope = parts[:at]
        outer = _outer_scope(scope)
        layer = layers.setdefault(outer, LayerVariables(outer))
        level = next((int(found[1]) for part in scope if (found := LEVEL.fullmatch(part))), 0)
        direction = next((DIRECTIONS[part] for part in scope if part in DIRECTIONS), "forward")
        layer.stacks |= level > 0 and _is_stack(scope)
        match = CELL.fullmatch(parts[at])
        assert match is not None, "it was found by this pattern"
        layer.cells.setdefault((level, direction), Cell(match[1])).variables["/".join(parts[at + 1 :])] = array
    layer.names.append(name)


def _outer_scope(scope: list[str]) -> str:
    """Return the scope around the wrappers of a cell, or the wrapper if there is none."""
    kept = next((index for index, part in enumerate(scope) if part in WRAPPERS), len(scope))
    return "/".join(scope[:kept]) or "/".join(scope[:1]) or "rnn"


def _is_stack(scope: list[str]) -> bool:
    """Whether a direction has several levels: its name then stands before the number of the level."""
    directions = [index for index, part in enumerate(scope) if part in DIRECTIONS]
    levels = [index for index, part in enumerate(scope) if LEVEL.fullmatch(part)]
    return bool(directions and levels) and directions[0] < levels[0]


def _checked(name: str, array: Array) -> Array:
    if array.dtype.kind != "f":
        raise ImportRefused(
            f"{name} has the dtype {array.dtype}, and weights are floating-point numbers: leave it out of the file"
        )
    if not array.size:
        raise ImportRefused(f"{name} has the shape {array.shape}, which has no numbers")
    if not np.isfinite(array).all():
        raise ImportRefused(f"{name} has values that are not finite: repair the checkpoint")
    return np.asarray(array, np.float32)


def within(layers: Mapping[str, LayerVariables], name: object) -> LayerVariables:
    """Return the layer of this name, or the only layer with a name that starts with it."""
    found = [layer for key, layer in layers.items() if key == name] or [
        layer for key, layer in layers.items() if key.startswith(f"{name}/")
    ]
    if len(found) != 1:
        raise ImportRefused(f"{len(found)} layers are named {name!r} or start with it: the layers are {', '.join(layers)}")
    return found[0]
