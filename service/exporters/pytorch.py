"""Writes a state_dict of PyTorch, with the names and layouts of the modules of torch, `sru` and the QRNN packages.

`layers.<index>` is the module of a layer, and `head` the linear layer of the head:

| layer | module |
|---|---|
| embedding, dense, layer_norm, batch_norm | nn.Embedding, nn.Linear, nn.LayerNorm, nn.BatchNorm1d |
| rnn, lstm, gru | nn.RNN, nn.LSTM, nn.GRU; a backward layer reads reversed steps |
| conv | nn.Conv1d, with its batch norm as the child `norm`; a weight norm is that of nn.utils.parametrizations |
| text_cnn | a ModuleList of nn.Conv1d |
| tcn | a ModuleList of levels with conv1, conv2 and, where the width changes, downsample |
| sru | SRU of the `sru` package |
| qrnn | QRNN of Salesforce and fastai |
| mingru | minGRU of minGRU-pytorch, for each level |
| pool, activation | none |
| head | nn.Linear `head`; `head.dense.<index>` are its dense layers, `head.attention` has weight, bias and query |
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from service.exporters.model import Export, ExportedPart, ExportRefused, Model
from service.modeling.layers import KINDS
from service.modeling.layers.kind import PYTORCH
from service.modeling.spec.activations import SIGMOID, TANH
from service.modeling.spec.layers import (
    ConvLayer,
    GatedLayer,
    GRULayer,
    LSTMLayer,
    MinGRULayer,
    QRNNLayer,
    RNNLayer,
    SRULayer,
    TCNLayer,
    TextCNNLayer,
)

State = dict[str, Tensor]
SUFFIXES = {"forward": "", "backward": "_reverse"}
ONNX, NOWHERE = "Export the model to ONNX", "Such a model has no checkpoint elsewhere"
"""What to do with a model that has no state_dict."""
WINDOWS = (1, 2)
"""The windows of the QRNN packages."""


def export(model: Model, suffix: str) -> Export:
    """Return the state_dict of a model; raises ExportRefused. suffix: ".safetensors", or another for torch.save."""
    state: State = {}
    tables = model.spec.model_dump(exclude_defaults=True)
    for (layer, part), table in zip(model.layers(), tables["layers"], strict=True):
        if part.arrays:
            table["from"] = part.place
            if isinstance(layer, SRULayer):
                table |= {"bidirectional": layer.bidirectional, "activation": layer.activation}
            state |= {f"{part.place}.{name}": array for name, array in STATES[layer.kind](layer, part).items()}
        if isinstance(layer, ConvLayer) and layer.batch_norm:
            table["norm_from"] = f"{part.place}.norm"
    state |= _head(model.head(), tables["head"])
    if not state:
        raise ExportRefused(f"{model.spec.name} has no weights, and a state_dict has nothing else")
    state = {name: array.contiguous().clone() for name, array in state.items()}
    return Export(_bytes(state, suffix), _recipe(model, tables))


def _bytes(state: State, suffix: str) -> bytes:
    if suffix == ".safetensors":
        return save(state)
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def _recipe(model: Model, tables: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe. The vocabulary and the kind of the input follow from the tensors and from the tokenizer."""
    given = {"max_steps": model.spec.input.max_steps}
    given |= {} if model.spec.input.features is None else {"features": model.spec.input.features}
    return {**model.recipe(), "input": given, "layers": tables["layers"], "head": tables["head"]}


def _head(part: ExportedPart, table: dict[str, Any]) -> State:
    """Return the tensors of the head, and complete its table."""
    arrays = part.arrays
    state: State = {}
    for index, dense in enumerate(table.get("dense", ())):
        dense["from"] = f"head.dense.{index}"
        state |= {f"head.dense.{index}.{name}": array for name, array in _linear(arrays, f"dense.{index}.").items()}
    if "attention.query" in arrays:
        table["attention_from"] = "head.attention"
        state["head.attention.query"] = arrays["attention.query"]
    if "attention.weight" in arrays:
        state |= {f"head.attention.{name}": array for name, array in _linear(arrays, "attention.").items()}
    if "weight" in arrays:
        table["from"] = "head"
        state |= {f"head.{name}": array for name, array in _linear(arrays).items()}
    return state


def _linear(arrays: State, prefix: str = "") -> State:
    return {"weight": arrays[f"{prefix}weight"].T, "bias": arrays[f"{prefix}bias"]}


def _recurrent(layer: GatedLayer, part: ExportedPart) -> State:
    """nn.RNN, nn.GRU or nn.LSTM. The bias goes into bias_ih; bias_hh is zero, but for the new gate of a GRU."""
    _check_recurrent(layer, part)
    state: State = {}
    for level in range(layer.depth):
        for direction in layer.directions:
            suffix = f"_l{level}{SUFFIXES[direction] if layer.bidirectional else ''}"
            place = f"{level}.{direction}."
            arrays = {name: part.arrays[place + name] for name in PYTORCH if place + name in part.arrays}
            arrays["recurrent_bias"] = KINDS[part.kind].recurrent_bias(arrays)
            state |= {PYTORCH[name] + suffix: array.T if array.ndim > 1 else array for name, array in arrays.items()}
    return state


def _check_recurrent(layer: GatedLayer, part: ExportedPart) -> None:
    """Raise ExportRefused for options that torch's layers lack."""
    of_torch = f"nn.{layer.kind.upper()} of PyTorch"  # type: ignore[attr-defined]  # every layer of a model has a kind
    part.refuse(layer.layer_norm, f"layer_norm is set, and {of_torch} has no norms", NOWHERE)
    part.refuse(layer.learned_start, f"learned_start is set, and {of_torch} has no learned states", ONNX)
    part.refuse(layer.clip is not None, f"clip is {layer.clip}, and {of_torch} does not clip", ONNX)
    part.refuse(
        layer.merge != "concat" and layer.depth > 1,
        f'merge is "{layer.merge}", and the levels of {of_torch} join their directions',
        "Write a layer for each level",
    )
    if isinstance(layer, RNNLayer):
        part.refuse(
            layer.activation.kind not in ("tanh", "relu"),
            f"activation is {layer.activation.kind}, and {of_torch} has tanh and relu",
            ONNX,
        )
    if isinstance(layer, LSTMLayer):
        part.refuse(layer.peepholes, f"peepholes is set, and {of_torch} has none", ONNX)
        part.refuse(layer.output_activation != TANH, f"output_activation is not tanh, which {of_torch} has", ONNX)
    if isinstance(layer, GRULayer):
        part.refuse(not layer.reset_after, f"reset_after is false, and {of_torch} resets after the product", ONNX)
    if isinstance(layer, LSTMLayer | GRULayer):
        fixed = layer.gate_activation == SIGMOID and layer.activation == TANH
        part.refuse(not fixed, f"its activations are not sigmoid and tanh, which {of_torch} has", ONNX)


def _convolution(arrays: State, prefix: str = "") -> State:
    """nn.Conv1d: (maps, inputs, width)."""
    bias = {"bias": arrays[f"{prefix}bias"]}
    if f"{prefix}filters" in arrays:
        return {"weight": arrays[f"{prefix}filters"].permute(2, 1, 0), **bias}
    magnitude, direction = arrays[f"{prefix}magnitude"], arrays[f"{prefix}direction"]
    norms = {"original0": magnitude[:, None, None], "original1": direction.permute(2, 1, 0)}
    return {f"parametrizations.weight.{name}": array for name, array in norms.items()} | bias


def _conv(layer: ConvLayer, part: ExportedPart) -> State:
    norm = _statistics(part.arrays["norm"]) if layer.batch_norm else {}
    return _convolution(part.arrays) | {f"norm.{name}": array for name, array in norm.items()}


def _text_cnn(layer: TextCNNLayer, part: ExportedPart) -> State:
    return {
        f"{index}.{name}": array
        for index, width in enumerate(layer.widths)
        for name, array in _convolution(part.arrays, f"{width}.").items()
    }


def _tcn(layer: TCNLayer, part: ExportedPart) -> State:
    state: State = {}
    for level in range(layer.levels):
        modules = {"0": "conv1", "1": "conv2"} | (
            {"projection": "downsample"} if f"{level}.projection.bias" in part.arrays else {}
        )
        for ours, theirs in modules.items():
            tensors = _convolution(part.arrays, f"{level}.{ours}.")
            state |= {f"{level}.{theirs}.{name}": array for name, array in tensors.items()}
    return state


def _statistics(norm: Tensor) -> State:
    """nn.BatchNorm1d. The counter of batches matters in training only."""
    names = ("weight", "bias", "running_mean", "running_var")
    return {**dict(zip(names, norm, strict=True)), "num_batches_tracked": torch.tensor(0)}


def _sru(layer: SRULayer, part: ExportedPart) -> State:
    """SRU of the `sru` package."""
    return {
        f"rnn_lst.{level}.{name}": array
        for level in range(layer.depth)
        for name, array in _sru_level(layer, part, level).items()
    }


def _sru_level(layer: SRULayer, part: ExportedPart, level: int) -> State:
    """Return one cell, with zeros for the weights of the cell in gates that have none."""
    arrays = part.below(level)
    cells = {f"{direction}.cell": torch.zeros_like(arrays[f"{direction}.bias"]) for direction in layer.directions}
    state = KINDS["sru"].to_package(cells | arrays, layer.directions, layer.hidden) | {"scale_x": torch.tensor([layer.scale])}
    projections = [array for name, array in arrays.items() if name.endswith(".projection")]
    if projections:
        part.refuse(
            not torch.equal(projections[0], projections[-1]),
            "the projections of the directions differ, and the sru package has one projection for both",
            NOWHERE,
        )
        state["weight_proj"] = projections[0]
    if "norm" in arrays:
        state["layer_norm.weight"], state["layer_norm.bias"] = arrays["norm"]
    return state


def _qrnn(layer: QRNNLayer, part: ExportedPart) -> State:
    """QRNN of Salesforce and fastai."""
    package = "the QRNN of Salesforce and fastai"
    part.refuse(layer.bidirectional, f"it runs in both directions, and {package} joins two separate stacks", NOWHERE)
    part.refuse(layer.pooling == "ifo", f'pooling is "ifo", and {package} has "f" and "fo"', NOWHERE)
    part.refuse(layer.window not in WINDOWS, f"window is {layer.window}, and {package} has 1 and 2", NOWHERE)
    state: State = {}
    for level in range(layer.depth):
        tensors = KINDS["qrnn"].to_package(part.below(level), layer.directions, layer.hidden)
        state |= {
            f"layers.{level}.linear.{name}": array.flatten(1) if array.ndim > 1 else array for name, array in tensors.items()
        }
    return state


def _mingru(layer: MinGRULayer, part: ExportedPart) -> State:
    """minGRU of minGRU-pytorch. Its gate is the gate of the new value, the opposite of a model: its sign changes."""
    package = "the minGRU of minGRU-pytorch"
    part.refuse(layer.bidirectional, f"it runs in both directions, and {package} runs forward", NOWHERE)
    part.refuse(layer.candidate != "positive", f'candidate is "{layer.candidate}", and {package} has "positive"', NOWHERE)
    state: State = {}
    signs = torch.ones(2 * layer.hidden).index_fill(0, torch.arange(layer.hidden, 2 * layer.hidden), -1)
    for level in range(layer.depth):
        weight, bias = (part.arrays[f"{level}.{layer.direction}.{name}"] for name in ("input", "bias"))
        module = f"{level}.to_hidden_and_gate"
        state[f"{module}.weight"] = (weight * signs.to(weight.dtype)).T
        if bias.any():
            state[f"{module}.bias"] = bias * signs.to(bias.dtype)
    return state


STATES: dict[str, Callable[[Any, ExportedPart], State]] = {
    "embedding": lambda _, part: {"weight": part.arrays["weight"]},
    "rnn": _recurrent,
    "lstm": _recurrent,
    "gru": _recurrent,
    "sru": _sru,
    "qrnn": _qrnn,
    "mingru": _mingru,
    "conv": _conv,
    "tcn": _tcn,
    "text_cnn": _text_cnn,
    "dense": lambda _, part: _linear(part.arrays),
    "layer_norm": lambda _, part: dict(zip(("weight", "bias"), part.arrays["norm"], strict=True)),
    "batch_norm": lambda _, part: _statistics(part.arrays["norm"]),
}
"""The function for each kind of layer that has tensors."""
