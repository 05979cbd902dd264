"""The modules that a user of PyTorch writes for an exported state_dict: layers of torch, and of the `sru` and QRNN packages."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from kernels.activations import FUNCTIONS
from service.modeling.spec import Activation, ModelSpec
from service.modeling.spec.activations import PARAMETERS
from tests.importers.pytorch.cases import QRNNLayer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package compiles CUDA kernels where it can
    import sru


class Exported(nn.Module):
    """A model over one row, built from its description alone: (steps,) ids or (steps, features)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList()
        inputs = spec.input.vocabulary or spec.input.features or 0
        for layer in spec.layers:
            self.layers.append(MODULES.get(layer.kind, _no_module)(layer, inputs))
            inputs = layer.output_width(inputs)
        self.head = _head(spec, inputs)

    def forward(self, x: Tensor) -> Tensor:
        for module, layer in zip(self.layers, self.spec.layers, strict=True):
            x = RUNS.get(layer.kind, _step)(module, layer, x)
        answer: Tensor = self.answer(self.spec.head, x)
        return answer

    def answer(self, head: Any, x: Tensor) -> Any:
        if head.kind == "sequence":
            return x
        if head.kind in ("tag", "span"):
            return self.head(x).softmax(1 if head.kind == "tag" else 0)
        if head.kind == "next":
            return self.head(self.pooled("last", x)).softmax(0)
        vector = torch.cat([self.pooled(pool, x) for pool in head.pool]) if x.dim() == 2 else x
        for linear, dense in zip(getattr(self.head, "dense", ()), head.dense, strict=True):
            vector = activated(dense.activation, linear(vector))
        if head.kind == "embed":
            return functional.normalize(vector, dim=0) if head.normalize else vector
        if head.kind == "regress":
            return activated(head.activation, self.head(vector))
        return self.head(vector).sigmoid() if head.multi_label else self.head(vector).softmax(0)

    def pooled(self, pool: str, x: Tensor) -> Tensor:
        pools: dict[str, Callable[[], Tensor]] = {
            "last": lambda: getattr(self.layers[-1], "last", x[-1]),
            "first": lambda: x[0],
            "last_step": lambda: x[-1],
            "mean": lambda: x.mean(0),
            "max": lambda: x.amax(0),
            "sum": lambda: x.sum(0),
            "attention": lambda: self.head.attention(x),
        }
        return pools[pool]()


def _head(spec: ModelSpec, inputs: int) -> Any:
    """Return the linear layer of the head, with its dense layers and its attention."""
    head: Any = spec.head
    inputs_of_head, outputs = spec.tensors().get("head.weight", (0, 0))
    module: Any = nn.Linear(inputs_of_head, outputs) if outputs else nn.Module()
    if not hasattr(head, "pool"):
        return module
    if head.dense:
        widths = [inputs * len(head.pool), *(dense.width for dense in head.dense)]
        module.dense = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
    if "attention" in head.pool:
        module.attention = Attention(inputs, head.attention_width)
    return module


class Attention(nn.Module):
    def __init__(self, inputs: int, width: int | None) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(width or inputs))
        if width is not None:
            self.weight, self.bias = nn.Parameter(torch.empty(width, inputs)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        keys = functional.linear(x, self.weight, self.bias).tanh() if hasattr(self, "weight") else x
        return (keys @ self.query).softmax(0) @ x


class QRNN(nn.Module):
    def __init__(self, layer: Any, inputs: int) -> None:
        super().__init__()
        widths = [inputs, *[layer.hidden] * (layer.depth - 1)]
        self.layers = nn.ModuleList(QRNNLayer(width, layer.window, output_gate=layer.pooling == "fo") for width in widths)


class Level(nn.Module):
    """A level of a TCN."""

    def __init__(self, layer: Any, inputs: int, dilation: int) -> None:
        super().__init__()
        self.left = (layer.width - 1) * dilation
        self.conv1 = _normed(layer, nn.Conv1d(inputs, layer.filters, layer.width, dilation=dilation))
        self.conv2 = _normed(layer, nn.Conv1d(layer.filters, layer.filters, layer.width, dilation=dilation))
        self.downsample = nn.Conv1d(inputs, layer.filters, 1) if inputs != layer.filters else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(functional.pad(x, (self.left, 0))))
        y = torch.relu(self.conv2(functional.pad(y, (self.left, 0))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


def activated(activation: Activation, x: Tensor) -> Tensor:
    """Return torch's own function of the activation, or the written formula where torch has none."""
    alpha, beta = ((*activation.parameters, 0.0, 0.0))[:2]
    of_torch: dict[str, Callable[[Tensor], Tensor]] = {
        "relu6": functional.relu6,
        "leaky_relu": lambda x: functional.leaky_relu(x, alpha),
        "thresholded_relu": lambda x: functional.threshold(x, alpha, 0.0),
        "elu": lambda x: functional.elu(x, alpha),
        "softplus": functional.softplus,
        "hard_tanh": functional.hardtanh,
    }
    if activation.kind in of_torch:
        return of_torch[activation.kind](x)
    parameters = (alpha, beta)[: len(PARAMETERS.get(activation.kind, {}))]
    return FUNCTIONS[activation.kind](x, *parameters)


def _no_module(layer: Any, inputs: int) -> nn.Module:
    return nn.ReLU()  # a placeholder in the list, which is not run


def _rnn(layer: Any, inputs: int) -> nn.Module:
    kind = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[layer.kind]
    options = {"nonlinearity": layer.activation.kind} if layer.kind == "rnn" else {}
    options |= {"proj_size": layer.projection} if getattr(layer, "projection", None) else {}
    module: nn.Module = kind(inputs, layer.hidden, layer.depth, bidirectional=layer.bidirectional, **options)
    return module


def _sru(layer: Any, inputs: int) -> nn.Module:
    options = {
        "v1": not layer.cell_gates,
        "rescale": layer.scale != 1,
        "use_tanh": layer.activation == "tanh",
        "has_skip_term": layer.skip,
    }
    options |= {"layer_norm": layer.layer_norm != "none", "normalize_after": layer.layer_norm == "after"}
    module: nn.Module = sru.SRU(
        inputs, layer.hidden, layer.depth, bidirectional=layer.bidirectional, projection_size=layer.projection or 0, **options
    )
    return module


def _normed(layer: Any, conv: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(conv) if layer.weight_norm else conv


def _conv(layer: Any, inputs: int) -> nn.Module:
    plain = nn.Conv1d(inputs, layer.maps, layer.width, layer.stride, dilation=layer.dilation, groups=layer.groups)
    conv: Any = _normed(layer, plain)
    if layer.batch_norm:
        conv.norm = nn.BatchNorm1d(layer.maps, eps=layer.epsilon)
    module: nn.Module = conv
    return module


def _text_cnn(layer: Any, inputs: int) -> nn.Module:
    return nn.ModuleList(nn.Conv1d(inputs, layer.filters, width, padding=layer.padding) for width in layer.widths)


def _tcn(layer: Any, inputs: int) -> nn.Module:
    levels = [Level(layer, layer.filters if level else inputs, 2**level) for level in range(layer.levels)]
    return nn.ModuleList(levels)


MODULES: dict[str, Callable[[Any, int], nn.Module]] = {
    "embedding": lambda layer, inputs: nn.Embedding(inputs, layer.width),
    **dict.fromkeys(("rnn", "lstm", "gru"), _rnn),
    "sru": _sru,
    "qrnn": QRNN,
    "conv": _conv,
    "text_cnn": _text_cnn,
    "tcn": _tcn,
    "dense": lambda layer, inputs: nn.Linear(inputs, layer.width),
    "layer_norm": lambda layer, inputs: nn.LayerNorm(inputs, eps=layer.epsilon),
    "batch_norm": lambda layer, inputs: nn.BatchNorm1d(inputs, eps=layer.epsilon),
}


def _step(module: Any, layer: Any, x: Tensor) -> Tensor:
    y: Tensor = x if layer.kind == "activation" else module(x)
    return activated(layer.activation, y) if layer.kind in ("dense", "activation") else y


def _run_rnn(module: Any, layer: Any, x: Tensor) -> Tensor:
    backward = layer.direction == "backward"
    y: Tensor = module(x.flip(0) if backward else x)[0]
    if layer.bidirectional:
        forward, reverse = y.chunk(2, dim=1)
        module.last = _merged(layer.merge, forward[-1], reverse[0])
        return _merged(layer.merge, forward, reverse)
    module.last = y[-1]
    return y.flip(0) if backward else y


def _merged(merge: str, forward: Tensor, reverse: Tensor) -> Tensor:
    if merge == "concat":
        return torch.cat((forward, reverse), -1)
    return {"sum": forward + reverse, "mean": (forward + reverse) / 2, "product": forward * reverse}[merge]


def _run_sru(module: Any, layer: Any, x: Tensor) -> Tensor:
    backward = layer.direction == "backward"
    y: Tensor = module((x.flip(0) if backward else x)[:, None])[0][:, 0]
    return y.flip(0) if backward else y


def _run_qrnn(module: Any, layer: Any, x: Tensor) -> Tensor:
    x = x.flip(0) if layer.direction == "backward" else x
    for one in module.layers:
        x = one(x)
    return x.flip(0) if layer.direction == "backward" else x


def _padding(layer: Any, steps: int) -> tuple[int, int]:
    """Return the steps of zeros before and after a row with this number of steps."""
    if not layer.pads_by_length:
        left, right = layer.padding_steps
        return left, right
    around = max((-(-steps // layer.stride) - 1) * layer.stride + layer.reach - steps, 0)
    less, more = around // 2, around - around // 2
    return (less, more) if layer.padding == "same_upper" else (more, less)


def _run_conv(module: Any, layer: Any, x: Tensor) -> Tensor:
    maps = module(functional.pad(x.T[None], _padding(layer, len(x))))
    y: Tensor = (module.norm(maps) if layer.batch_norm else maps)[0].T
    if layer.activation.kind in ("glu", "gated_tanh"):
        value, gate = y.chunk(2, dim=1)
        return (value.tanh() if layer.activation.kind == "gated_tanh" else value) * gate.sigmoid()
    return activated(layer.activation, y)


def _run_pool(module: Any, layer: Any, x: Tensor) -> Tensor:
    pads = _padding(layer, len(x))
    if layer.reduce == "max":
        padded = functional.pad(x.T[None], pads, value=-torch.inf)
        return functional.max_pool1d(padded, layer.width, layer.stride, dilation=layer.dilation)[0].T
    count = functional.pad(torch.ones_like(x), (0, 0, *pads), value=float(layer.count_padding))
    total, counted = (
        functional.avg_pool1d(values.T[None], layer.width, layer.stride) for values in (functional.pad(x, (0, 0, *pads)), count)
    )
    mean: Tensor = torch.div(total, counted)[0].T
    return mean


def _run_text_cnn(module: Any, layer: Any, x: Tensor) -> Tensor:
    return torch.cat([torch.relu(conv(x.T[None])).amax(2)[0] for conv in module])


def _run_tcn(module: Any, layer: Any, x: Tensor) -> Tensor:
    y = x.T[None]
    for level in module:
        y = level(y)
    return y[0].T


RUNS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    **dict.fromkeys(("rnn", "lstm", "gru"), _run_rnn),
    "sru": _run_sru,
    "qrnn": _run_qrnn,
    "conv": _run_conv,
    "pool": _run_pool,
    "text_cnn": _run_text_cnn,
    "tcn": _run_tcn,
}
"""How a user runs each module; the others take and return the steps."""
