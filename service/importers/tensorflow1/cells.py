"""Converts the variables of recurrent cells to tensors of model.toml.

A kernel has the rows of the input, then the rows of the state. The candidate of a GRU is a separate variable.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from service.importers.draft import Array, ImportRefused, Part
from service.importers.tensorflow1.variables import KINDS, Cell, LayerVariables
from service.modeling.layers import GATED

Tensors = dict[str, Array]
PEEPHOLES = ("w_i_diag", "w_f_diag", "w_o_diag")
PROJECTION = "projection/kernel"


def recurrent(table: dict[str, Any], layer: LayerVariables, forget_bias: float) -> Part:
    """Return a recurrent layer. forget_bias: the number that its cells add to the bias of the forget gate when they compute."""
    cells = dict(sorted(layer.cells.items(), key=lambda pair: (pair[0][0], pair[0][1] == "backward")))
    levels, directions = ({place[index] for place in cells} for index in (0, 1))
    if layer.stacks or len(cells) != len(levels) * len(directions) or levels != set(range(len(levels))):
        raise ImportRefused(
            f"{layer.name} has stacks of cells whose directions are not joined at every level, or incomplete ones, which no layer of "
            "model.toml has"
        )
    kinds = {cell.kind for cell in cells.values()}
    kind = KINDS[min(kinds)]
    if len(kinds) > 1 or kind != table.get("kind", kind):
        raise ImportRefused(
            f"{layer.name} has {' and '.join(sorted(kinds))}, which is no layer of the kind {table.get('kind')}"
        )
    arrays: Tensors = {}
    for (level, direction), cell in cells.items():
        tensors = _tensors(cell, forget_bias)
        place = direction if len(directions) == 2 else table.get("direction", "forward")
        arrays |= {f"{level}.{place}.{name}": array for name, array in tensors.items()}
    found: dict[str, Any] = {"kind": kind, **GATED[kind].options(tensors)}
    found |= {"depth": len(levels)} if len(levels) > 1 else {}
    found |= {"bidirectional": True} if len(directions) == 2 else {}
    return Part({**table, **found}, arrays)


def adds_forget_bias(layer: LayerVariables) -> bool:
    """Whether the cells of a layer add a number to the bias of their forget gates, which is no variable."""
    return any(KINDS[cell.kind] == "lstm" and not _is_cudnn(cell) for cell in layer.cells.values())


def _is_cudnn(cell: Cell) -> bool:
    return cell.kind.startswith("cudnn")


def _tensors(cell: Cell, forget_bias: float) -> Tensors:
    """Return the tensors of a cell in the layout of model.toml."""
    match KINDS[cell.kind]:
        case "lstm":
            return _lstm(cell, 0.0 if _is_cudnn(cell) else forget_bias)
        case "gru":
            return _cudnn_gru(cell) if _is_cudnn(cell) else _gru(cell)
    kernel, bias = _variables(cell, "kernel", "bias")
    return {"input": kernel[: -len(bias)], "recurrent": kernel[-len(bias) :], "bias": bias}


def _lstm(cell: Cell, forget_bias: float) -> Tensors:
    kernel, bias = _variables(cell, "kernel", "bias")
    units = len(bias) // 4
    ours = [GATED["lstm"].from_framework("tensorflow 1", array) for array in (kernel, bias)]
    ours[1][units : 2 * units] += forget_bias
    projection = cell.variables.get(PROJECTION)
    state = units if projection is None else projection.shape[1]
    tensors = {"input": ours[0][:-state], "recurrent": ours[0][-state:], "bias": ours[1]}
    if PEEPHOLES[0] in cell.variables:
        tensors["peephole"] = np.concatenate(_variables(cell, *PEEPHOLES))
    return tensors if projection is None else {**tensors, "projection": projection}


def _gru(cell: Cell) -> Tensors:
    gates, gates_bias, candidate, bias = _variables(cell, "gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias")
    kernel = np.concatenate([gates, candidate], axis=1)
    units = len(bias)
    return {"input": kernel[:-units], "recurrent": kernel[-units:], "bias": np.concatenate([gates_bias, bias])}


def _cudnn_gru(cell: Cell) -> Tensors:
    names = (
        "gates/kernel",
        "gates/bias",
        *(f"candidate/{side}_projection/{leaf}" for side in ("input", "hidden") for leaf in ("kernel", "bias")),
    )
    gates, gates_bias, from_input, input_bias, from_state, state_bias = _variables(cell, *names)
    units = len(state_bias)
    return {
        "input": np.concatenate([gates[:-units], from_input], axis=1),
        "recurrent": np.concatenate([gates[-units:], from_state], axis=1),
        "bias": np.concatenate([gates_bias, input_bias]),
        "recurrent_bias": state_bias,
    }


def _variables(cell: Cell, *names: str) -> list[Array]:
    missing = [name for name in names if name not in cell.variables]
    if missing:
        raise ImportRefused(f"a {cell.kind} has no variable {missing[0]}: it has {', '.join(cell.variables)}")
    return [cell.variables[name] for name in names]
