"""Translates recurrent layers, their cells, and the wrappers Bidirectional and TimeDistributed.

Gate blocks are along the last axis. A GRU with reset_after has two biases, (2, 3 * units). The weights that CuDNNLSTM and CuDNNGRU write
have the same shapes, but each of their blocks holds a transposed matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from service.importers.chain import combining, operations
from service.importers.chain.nodes import Layer
from service.importers.chain.recurrent import final_state, step_outputs
from service.importers.chain.recurrent import recurrent as run
from service.importers.chain.signal import Columns, Role, Signal, concatenate
from service.importers.draft import Array, ImportRefused
from service.importers.keras.activations import gate
from service.importers.keras.architecture import LayerConfig, layer_config
from service.importers.keras.call import KerasCall, KerasFinalCell, KerasTensor, Value
from service.modeling.layers import GATED, kinds_by_name

KINDS = kinds_by_name("keras")
CELLS = [name for name in KINDS if name.endswith("Cell")]
LAYERS = [name for name in KINDS if name not in CELLS]
NAMES = ("kernel", "recurrent_kernel", "bias")
MERGES = ("concat", "sum", "mul", "ave")
PER_STEP = ("Dense", "Activation", "Dropout", "BatchNormalization", "LayerNormalization", "LeakyReLU", "ReLU", "ELU", "Softmax")
"""Layers that compute the same for every step within TimeDistributed as without it."""
Tensors = dict[str, Array]


def recurrent(call: KerasCall) -> Sequence[Value]:
    """One direction: the steps, or the last output, and the final states if the layer returns them."""
    cell = _cell(call, call.layer)
    tensors = _tensors(cell, cell.weights(*_names(cell)))
    x = _reversed(call.signal, call)
    layer, order = run(x, _kind(cell), _options(cell), {"forward": tensors}, call.label, cell.origins)
    _note_states(call)
    [final] = _outputs(x, layer, order, steps=False)
    [steps] = _outputs(x, layer, order, steps=True)
    outputs: list[Value] = [call.result(steps) if call.flag("return_sequences", False) else KerasTensor(final)]
    if call.flag("return_state", False):
        outputs += [KerasTensor(final), *_final_cells(cell)]
    return outputs


def bidirectional(call: KerasCall) -> Sequence[Value]:
    """Both directions, merged or side by side, and the final states of both if the layer returns them."""
    forward = layer_config(call.value("layer"))
    given = call.value("backward_layer", None)
    backward = forward if given is None else layer_config(given)
    cells = [_cell(call, each) for each in (forward, backward)]
    inner = KerasCall(forward, call.node, call.inputs, (), call.reading)
    directions, origins = _directions(call, cells)
    options = [
        _options(cell) | GATED[_kind(cell)].options(tensors) for cell, tensors in zip(cells, directions.values(), strict=True)
    ]
    if options[0] != options[1] or _flags(forward) != _flags(backward, swapped=given is not None):
        raise ImportRefused("its directions have different options, and a bidirectional layer has the same for both")
    kind = _kind(cells[0])
    x = _reversed(call.signal, inner)
    layer, order = run(x, kind, options[0], directions, call.label, origins)
    _note_states(inner)
    steps = inner.flag("return_sequences", False)
    merged = _merged(call, *_outputs(x, layer, order, steps=steps))
    outputs: list[Value] = [KerasTensor(one, call.tensor.is_masked and steps) for one in merged]
    if inner.flag("return_state", False):
        for final in _outputs(x, layer, order, steps=False):
            outputs += [KerasTensor(final), *_final_cells(cells[0])]
    return outputs


def time_distributed(call: KerasCall) -> LayerConfig:
    """Return the layer that a TimeDistributed applies to every step; raises ImportRefused if it needs more than one step."""
    inner = layer_config(call.value("layer"))
    if inner.kind not in PER_STEP or call.signal.rank != 3:
        raise ImportRefused(
            f"it applies {inner.kind} {inner.name} to every step, and only {', '.join(PER_STEP)} can be imported so"
        )
    return replace(inner, name=call.layer.name)


def _cell(call: KerasCall, layer: LayerConfig) -> KerasCall:
    """Return a call of the layer's cell, which has its options and tensors."""
    if len(call.inputs) != 1 or call.node.others:
        raise ImportRefused(
            "its initial states are tensors of the model: a model starts from zeros, or from states in a request"
        )
    call.signal.expect(Role.BATCH, Role.STEPS, Role.COLUMNS)
    outer = KerasCall(layer, call.node, call.inputs, call.paths, call.reading)
    outer.refuse_options(time_major=False)
    if layer.kind == "RNN":
        inner = outer.value("cell")
        cell = layer_config(inner) if isinstance(inner, dict) else None
        if cell is None or cell.kind not in CELLS:
            raise ImportRefused(
                f"its cell is {cell.kind if cell else inner!r:.40}: the cells that can be imported are {', '.join(CELLS)}"
            )
        return KerasCall(replace(cell, name=call.layer.name), call.node, call.inputs, call.paths, call.reading)
    if layer.kind not in LAYERS:
        raise ImportRefused(
            f"it has the layer {layer.kind}, and the layers that can be imported in it are {', '.join([*LAYERS, 'RNN'])}"
        )
    return outer


def _kind(cell: KerasCall) -> str:
    return KINDS[cell.layer.kind]


def _final_cells(cell: KerasCall) -> list[KerasFinalCell]:
    return [KerasFinalCell() for name in GATED[_kind(cell)].starts if name == "start_cell"]


def _names(cell: KerasCall) -> tuple[str, ...]:
    return NAMES if _is_cudnn(cell) or cell.flag("use_bias", True) else NAMES[:2]


def _is_cudnn(cell: KerasCall) -> bool:
    return cell.layer.kind.startswith("CuDNN")


def _directions(call: KerasCall, cells: Sequence[KerasCall]) -> tuple[dict[str, Tensors], frozenset[str]]:
    """Return the tensors of both directions, forward before backward in the file."""
    names = _names(cells[0])
    arrays = call.weights(*(f"{direction}.{name}" for direction in ("forward", "backward") for name in names))
    halves = arrays[: len(names)], arrays[len(names) :]
    both = zip(("forward", "backward"), cells, halves, strict=True)
    return {direction: _tensors(cell, half) for direction, cell, half in both}, call.origins


def _tensors(cell: KerasCall, arrays: Sequence[Array]) -> Tensors:
    """Return the tensors of one direction in the layout of model.toml."""
    kind = _kind(cell)
    kernel, recurrent, *biases = arrays
    gates, units = len(GATED[kind].gates), recurrent.shape[0]
    inputs = cell.signal.shape[-1]
    if kernel.shape != (inputs, gates * units) or recurrent.shape != (units, gates * units):
        raise ImportRefused(
            f"its kernels have the shapes {kernel.shape} and {recurrent.shape}: for {inputs} inputs and {units} units, they have "
            f"{(inputs, gates * units)} and {(units, gates * units)}"
        )
    bias = biases[0] if biases else np.zeros(_bias_shape(cell, units))
    if kind != "rnn" and bias.shape == (2 * gates * units,):
        kernel, recurrent = (_transposed_blocks(matrix, gates) for matrix in (kernel, recurrent))
        bias = bias.reshape(2, -1)
        bias = bias.sum(axis=0) if kind == "lstm" else bias
    if bias.shape != _bias_shape(cell, units):
        raise ImportRefused(f"its bias has the shape {bias.shape}, and its options need {_bias_shape(cell, units)}")
    of_input, of_state = bias if bias.ndim == 2 else (bias, np.zeros_like(bias))
    return GATED[kind].tensors("keras", kernel, recurrent, of_input, of_state, keeps_last=bias.ndim == 2)


def _bias_shape(cell: KerasCall, units: int) -> tuple[int, ...]:
    size = len(GATED[_kind(cell)].gates) * units
    return (2, size) if _kind(cell) == "gru" and _resets_after(cell) else (size,)


def _resets_after(cell: KerasCall) -> bool:
    """Keras had no option reset_after before 2.1.3, and computed without it."""
    return _is_cudnn(cell) or cell.flag("reset_after", False)


def _transposed_blocks(matrix: Array, gates: int) -> Array:
    """Return a matrix of CuDNN as a plain matrix: each block of columns holds the numbers of its transposed matrix."""
    return np.concatenate([block.reshape(block.shape[::-1]).T for block in np.split(matrix, gates, axis=1)], axis=1)


def _options(cell: KerasCall) -> dict[str, Any]:
    """Return the options of the layer in model.toml, except defaults and those that follow from its tensors."""
    kind, options = GATED[_kind(cell)], dict[str, Any]()
    for key, default in zip(kind.activations, kind.default_activations, strict=True):
        found = default if _is_cudnn(cell) else gate("recurrent_activation" if key == "gate_activation" else "activation", cell)
        options |= {} if found == default else {key: found}
    return options


def _flags(layer: LayerConfig, *, swapped: bool = False) -> tuple[bool, ...]:
    """Return the options of one direction on which both agree. The backward layer has go_backwards reversed, if it is written."""
    return (
        bool(layer.config.get("return_sequences", False)),
        bool(layer.config.get("return_state", False)),
        bool(layer.config.get("go_backwards", False)) != swapped,
    )


def _reversed(x: Signal, layer: KerasCall) -> Signal:
    return operations.reverse_steps(x) if layer.flag("go_backwards", False) else x


def _note_states(layer: KerasCall) -> None:
    if layer.flag("stateful", False):
        layer.reading.note(
            f"{layer.label} is stateful: Keras starts a batch from the final states of the previous batch, and the model from zeros, "
            "except in sessions"
        )


def _outputs(x: Signal, layer: Layer, order: Columns, *, steps: bool) -> list[Signal]:
    """Return every step, or the last output, of each direction."""
    every = (step_outputs if steps else final_state)(x, layer, order, time_major=False)
    return [every.take(np.array(index), every.rank - 2) for index in range(len(order))]


def _merged(call: KerasCall, forward: Signal, backward: Signal) -> list[Signal]:
    """Return both directions as one tensor, or as two without a merge mode."""
    mode = call.value("merge_mode", "concat")
    if mode not in (*MERGES, None):
        raise ImportRefused(f"its merge_mode is {mode!r:.20}: use {', '.join(MERGES)} or None")
    return [forward, backward] if mode is None else [_as_one(forward, backward, mode, call.label)]


def _as_one(forward: Signal, backward: Signal, mode: str, label: str) -> Signal:
    if mode == "concat":
        return concatenate([forward, backward], forward.rank - 1)
    if mode == "ave":
        return operations.mean([forward, backward], label)
    return combining.combine(forward, backward, "multiply" if mode == "mul" else "add", label)
