"""State dicts of PyTorch that import or are refused. The tests import each of them."""
# mypy: disable-error-code="no-any-return"
# A module of torch returns Any when it is called.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.importers.importing import FEATURES, VOCABULARY, randomize

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package compiles CUDA kernels where it can
    import sru

HIDDEN, WIDTH, LABELS = 5, 4, 3
LENGTHS = (9, 5, 12)
Outputs = Mapping[str, Tensor]
Norm = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Case:
    """A tested option.

    part: modules of torch; option: the tested option; build: makes a module that returns outputs by name for one row; recipe: settings that
    the state_dict lacks; refused: words of the refusal, or empty if it imports; ids: whether rows are token ids; features: numbers of a
    step.
    """

    part: str
    option: str
    build: Callable[[], nn.Module]
    recipe: str = ""
    refused: str = ""
    ids: bool = False
    features: int = FEATURES
    lengths: Sequence[int] = LENGTHS

    def __str__(self) -> str:
        return f"{self.part}: {self.option}"


class Tagger(nn.Module):
    """An embedding, a recurrent layer and a linear layer over its last output, as most text classifiers are written."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = getattr(nn, kind)(WIDTH, HIDDEN, **options)
        width = (options.get("proj_size") or HIDDEN) * (1 + self.rnn.bidirectional)
        self.classifier = nn.Linear(width, LABELS)

    def forward(self, ids: Tensor) -> Outputs:
        steps, state = self.rnn(self.embedding(ids))
        hidden = state[0] if isinstance(state, tuple) else state
        last = torch.cat(tuple(hidden[-(1 + self.rnn.bidirectional) :]))
        outputs = {"sequence": steps, "logits": self.classifier(last), "scores": self.classifier(last).softmax(0)}
        for name, values in (("hidden", hidden), ("cell", state[1] if isinstance(state, tuple) else ())):
            for place, value in enumerate(values):
                level, backward = divmod(place, 1 + self.rnn.bidirectional)
                outputs[f"final.layers.1.{level}.{'backward' if backward else 'forward'}.{name}"] = value
        return outputs


class Cell(nn.Module):
    """A cell that runs over the steps of a row."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(FEATURES, HIDDEN, **options)

    def forward(self, row: Tensor) -> Outputs:
        state: Any = None
        steps = []
        for x in row:
            state = self.cell(x[None], state)
            steps.append(state[0] if isinstance(state, tuple) else state)
        return {"sequence": torch.cat(steps)}


class Convolution(nn.Module):
    """A convolution, and the norm and activation after it. pads: steps of zeros before and after."""

    def __init__(
        self,
        pads: tuple[int, int] = (0, 0),
        *,
        norm: Norm | None = None,
        batch_norm: float | None = None,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        filters: int = 6,
        width: int = 3,
        **options: Any,
    ) -> None:
        super().__init__()
        conv = nn.Conv1d(FEATURES, filters, width, **options)
        self.conv = conv if norm is None else norm(conv)
        self.norm = None if batch_norm is None else nn.BatchNorm1d(filters, eps=batch_norm)
        self.pads, self.activation = pads, activation

    def forward(self, row: Tensor) -> Outputs:
        y = self.conv(functional.pad(row.T[None], self.pads))
        y = y if self.norm is None else self.norm(y)
        return {"sequence": self.activation(y)[0].T}


class TextCNN(nn.Module):
    def __init__(self, *, two_dimensions: bool = False, hidden: bool = False, padding: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.two_dimensions = two_dimensions
        if two_dimensions:
            self.convs = nn.ModuleList(nn.Conv2d(1, HIDDEN, (width, WIDTH), padding=(padding, 0)) for width in (2, 3, 1))
        else:
            self.convs = nn.ModuleList(nn.Conv1d(WIDTH, HIDDEN, width, padding=padding) for width in (2, 3, 1))
        self.hidden = nn.Linear(3 * HIDDEN, 6) if hidden else None
        self.fc = nn.Linear(6 if hidden else 3 * HIDDEN, LABELS)

    def forward(self, ids: Tensor) -> Outputs:
        x = self.embed(ids)[None]
        x = x[None] if self.two_dimensions else x.transpose(1, 2)
        maps = torch.cat([torch.relu(conv(x)).flatten(2).amax(2) for conv in self.convs], 1)
        return {"logits": self.fc(maps if self.hidden is None else torch.relu(self.hidden(maps)))[0]}


class Block(nn.Module):
    """A level of a TCN as locuslab/TCN writes it, which has its convolutions under two names."""

    def __init__(self, inputs: int, dilation: int, norm: Norm, width: int) -> None:
        super().__init__()
        self.left = (width - 1) * dilation
        self.conv1 = norm(nn.Conv1d(inputs, HIDDEN, width, dilation=dilation))
        self.conv2 = norm(nn.Conv1d(HIDDEN, HIDDEN, width, dilation=dilation))
        self.net = nn.Sequential(self.conv1, nn.ReLU(), self.conv2, nn.ReLU())
        self.downsample = nn.Conv1d(inputs, HIDDEN, 1) if inputs != HIDDEN else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv1(functional.pad(x, (self.left, 0))))
        y = torch.relu(self.conv2(functional.pad(y, (self.left, 0))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    def __init__(self, norm: Norm, *, width: int = 3, inputs: int = FEATURES, levels: int = 3) -> None:
        super().__init__()
        widths = [inputs, *[HIDDEN] * levels]
        self.network = nn.Sequential(*(Block(widths[level], 2**level, norm, width) for level in range(levels)))
        self.linear = nn.Linear(HIDDEN, LABELS)

    def forward(self, row: Tensor) -> Outputs:
        steps = self.network(row.T[None])[0].T
        return {"sequence": steps, "logits": self.linear(steps[-1])}


class Chain(nn.Module):
    """Modules of single steps in a row, named 0, 1, ..."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, row: Tensor) -> Outputs:
        for module in self.layers:
            row = module(row[..., None])[..., 0] if isinstance(module, nn.BatchNorm1d) else module(row)
        return {"sequence": row}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.fc = nn.Linear(WIDTH, LABELS)

    def forward(self, ids: Tensor) -> Outputs:
        return {"logits": self.fc(self.embedding(ids).mean(0))}


class OverRows(nn.Module):
    """An SRU of the package over one row. Its scale is a constant, and so are the cell's weights in version 1."""

    def __init__(self, inputs: int, depth: int, **options: Any) -> None:
        super().__init__()
        self.encoder = sru.SRU(inputs, HIDDEN, num_layers=depth, **options)
        self.has_cell_gates = not options.get("v1")

    def forward(self, row: Tensor) -> Outputs:
        steps, _ = self.encoder(row[:, None])
        return {"sequence": steps[:, 0]}


class QRNNLayer(nn.Module):
    """One layer of Salesforce's and fastai's QRNN: a linear layer over this step and the previous step, newest first, blocks z f o.

    f is the gate of the new value: c = f z + (1 - f) c.
    """

    def __init__(self, inputs: int, window: int, *, output_gate: bool) -> None:
        super().__init__()
        self.window, self.output_gate = window, output_gate
        self.linear = nn.Linear(window * inputs, (3 if output_gate else 2) * HIDDEN)

    def forward(self, row: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(row[:1]), row[:-1]))
        seen = torch.cat((row, before), 1) if self.window == 2 else row
        z, f, *o = self.linear(seen).chunk(3 if self.output_gate else 2, 1)
        cell, steps = torch.zeros(HIDDEN), []
        for t in range(len(row)):
            forget = f[t].sigmoid()
            cell = forget * z[t].tanh() + (1 - forget) * cell
            steps.append(o[0][t].sigmoid() * cell if o else cell)
        return torch.stack(steps)


class QRNN(nn.Module):
    def __init__(self, window: int, *, output_gate: bool) -> None:
        super().__init__()
        widths = [FEATURES, HIDDEN, HIDDEN]
        self.layers = nn.ModuleList(QRNNLayer(inputs, window, output_gate=output_gate) for inputs in widths)

    def forward(self, row: Tensor) -> Outputs:
        for layer in self.layers:
            row = layer(row)
        return {"sequence": row}


def random_module(case: Case) -> nn.Module:
    """Return the module of a case with random weights, as far as they are learned."""
    module = case.build()
    if not isinstance(module, OverRows):
        return randomize(module)
    scales = [cell.scale_x.clone() for cell in module.encoder.rnn_lst]
    randomize(module)
    for cell, scale in zip(module.encoder.rnn_lst, scales, strict=True):
        cell.scale_x.copy_(scale)
        if not module.has_cell_gates:
            cell.weight_c.data.zero_()
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


NORMS: dict[str, Norm] = {"nn.utils.weight_norm": old_weight_norm, "parametrizations.weight_norm": parametrizations.weight_norm}


def layer(kind: str, prefix: str, **keys: str) -> str:
    """Return a layer of a recipe. keys: TOML by name."""
    return f'[[layers]]\nkind = "{kind}"\nfrom = "{prefix}"\n' + "".join(f"{name} = {value}\n" for name, value in keys.items())


def _recurrent_cases() -> Iterator[Case]:
    for kind, (depth, both) in product(("LSTM", "GRU", "RNN"), ((1, False), (1, True), (3, False), (2, True))):
        shape = f"num_layers={depth}{', bidirectional' * both}"
        for name, options in (("", {}), (", bias=False", {"bias": False}), (", proj_size=2", {"proj_size": 2})):
            if not (options.get("proj_size") and kind != "LSTM"):
                build = partial_of(Tagger, kind, num_layers=depth, bidirectional=both, **options)
                yield Case(f"nn.{kind}", shape + name, build, ids=True, lengths=(9, 1, 4))
    for kind in ("LSTMCell", "GRUCell", "RNNCell"):
        yield Case(f"nn.{kind}", "over the steps", partial_of(Cell, kind))
        yield Case(f"nn.{kind}", "bias=False", partial_of(Cell, kind, bias=False))
    relu = layer("embedding", "embedding") + layer("rnn", "rnn", activation='"relu"')
    for both in (False, True):
        build = partial_of(Tagger, "RNN", nonlinearity="relu", bidirectional=both)
        option = f'nonlinearity="relu"{", bidirectional" * both} (recipe)'
        yield Case("nn.RNN", option, build, relu + '[head]\nkind = "classify"\nfrom = "classifier"\npool = "last"', ids=True)
    cell = layer("rnn", "cell", activation='"relu"')
    yield Case("nn.RNNCell", 'nonlinearity="relu" (recipe)', partial_of(Cell, "RNNCell", nonlinearity="relu"), cell)


def partial_of(kind: Callable[..., nn.Module], *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*arguments, **options)


def _conv(option: str, pads: tuple[int, int] = (0, 0), *, keys: Mapping[str, str] | None = None, **options: Any) -> Case:
    """Return a convolution through a recipe. keys: of the recipe, besides its padding."""
    given = {"pads": f"[{pads[0]}, {pads[1]}]", **(keys or {})} if "padding" not in options else dict(keys or {})
    return Case("nn.Conv1d", f"{option} (recipe)", partial_of(Convolution, pads, **options), layer("conv", "conv", **given))


def _conv_cases() -> Iterator[Case]:
    yield Case("nn.Conv1d", "padding=1", partial_of(Convolution, padding=1))
    yield _conv("no padding")
    yield _conv("causal padding", (2, 0))
    yield _conv("stride=2", (1, 1), stride=2, keys={"stride": "2"})
    yield _conv("dilation=2", (2, 2), dilation=2, keys={"dilation": "2"})
    yield _conv("groups=3", (1, 1), groups=3, keys={"groups": "3"})
    yield _conv(
        "stride=2, dilation=3, groups=3",
        (4, 3),
        stride=2,
        dilation=3,
        groups=3,
        keys={"stride": "2", "dilation": "3", "groups": "3"},
    )
    yield _conv("bias=False", (1, 1), bias=False)
    yield _conv('padding="same", width 4', width=4, padding="same", keys={"padding": '"same"'})
    yield _conv("width 1", width=1)
    yield _conv("elu", (1, 1), activation=functional.elu, keys={"activation": '"elu"'})
    yield _conv(
        "leaky_relu with a slope", (1, 1), activation=_leaky, keys={"activation": '{ kind = "leaky_relu", alpha = 0.2 }'}
    )
    yield _conv("functional.glu", (1, 1), activation=_glu, keys={"activation": '"glu"'})
    yield _conv("no activation", (1, 1), activation=_same, keys={"activation": '"none"'})
    for name, norm in NORMS.items():
        yield _conv(name, (1, 1), norm=norm)
        yield _conv(f"{name}, stride and groups", (1, 1), norm=norm, stride=2, groups=3, keys={"stride": "2", "groups": "3"})
    yield Case(
        *("nn.Conv1d, nn.BatchNorm1d", "before the activation"),
        partial_of(Convolution, batch_norm=1e-5, padding=1),
    )
    yield Case(
        *("nn.Conv1d, nn.BatchNorm1d", "eps (recipe)"),
        partial_of(Convolution, batch_norm=0.1, padding=1),
        layer("conv", "conv", norm_from='"norm"', epsilon="0.1"),
    )
    for two, part in ((False, "nn.Conv1d"), (True, "nn.Conv2d")):
        yield Case(part, "text CNN", partial_of(TextCNN, two_dimensions=two), ids=True, lengths=(9, 3, 4))
        yield Case(part, "text CNN with a hidden layer", partial_of(TextCNN, two_dimensions=two, hidden=True), ids=True)
        recipe = layer("embedding", "embed") + layer("text_cnn", "convs", padding="2")
        recipe += '[head]\nkind = "classify"\nfrom = "fc"\npool = "max"'
        yield Case(
            part, "text CNN with padding=2 (recipe)", partial_of(TextCNN, two_dimensions=two, padding=2), recipe, ids=True
        )
    for name, norm in {"": _same, **NORMS}.items():
        yield Case("nn.Conv1d", f"TCN {name}".strip(), partial_of(TCN, norm))
    yield Case(
        "nn.Conv1d", "TCN of width 2 without a projection", partial_of(TCN, _same, width=2, inputs=HIDDEN), features=HIDDEN
    )
    yield Case("nn.Conv1d", "TCN of one level", partial_of(TCN, _same, levels=1))


def _leaky(x: Tensor) -> Tensor:
    return functional.leaky_relu(x, 0.2)


def _glu(x: Tensor) -> Tensor:
    return functional.glu(x, 1)


def _same(x: Any) -> Any:
    return x


def _step_cases() -> Iterator[Case]:
    bag = layer("embedding", "embedding") + '[head]\nkind = "classify"\nfrom = "fc"\npool = "mean"'
    yield Case("nn.Embedding, nn.Linear", "bag of words (recipe)", Bag, bag, ids=True)
    dense = layer("dense", "layers.0")
    sequence = '[head]\nkind = "sequence"'
    yield Case("nn.Linear", "over the steps (recipe)", lambda: Chain(nn.Linear(FEATURES, 6)), dense + sequence)
    yield Case(
        *("nn.Linear", "bias=False, tanh (recipe)"),
        lambda: Chain(nn.Linear(FEATURES, 6, bias=False), nn.Tanh()),
        layer("dense", "layers.0", activation='"tanh"') + sequence,
    )
    for option, options, keys in (
        ("eps 1e-5", {}, {}),
        ("eps (recipe)", {"eps": 0.1}, {"epsilon": "0.1"}),
        ("bias=False", {"bias": False}, {}),
    ):
        recipe = dense + layer("layer_norm", "layers.1", **keys) + sequence
        yield Case("nn.LayerNorm", option, _norm_after_linear(nn.LayerNorm, options), recipe)
    for option, options, keys in (("eps 1e-5", {}, {}), ("eps (recipe)", {"eps": 0.1}, {"epsilon": "0.1"})):
        recipe = dense + layer("batch_norm", "layers.1", **keys) + sequence
        yield Case("nn.BatchNorm1d", option, _norm_after_linear(nn.BatchNorm1d, options), recipe)
    recipe = dense + layer("batch_norm", "layers.1") + sequence
    yield Case("nn.BatchNorm1d", "affine=False", _norm_after_linear(nn.BatchNorm1d, {"affine": False}), recipe)
    yield Case("nn.MultiheadAttention", "any", lambda: nn.MultiheadAttention(4, 2), "", "which no layer is known to have")


def _norm_after_linear(kind: Callable[..., nn.Module], options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return lambda: Chain(nn.Linear(FEATURES, 6), kind(6, **options))


def _scan_cases() -> Iterator[Case]:
    every: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {}),
        ({"v1": True}, {}),
        ({"use_tanh": True}, {"activation": '"tanh"'}),
        ({"has_skip_term": False}, {"skip": "false"}),
        ({"rescale": True, "highway_bias": -1.0}, {}),
        ({"layer_norm": True}, {}),
        ({"layer_norm": True, "normalize_after": True}, {"layer_norm": '"after"'}),
        ({"projection_size": 2}, {}),
        ({"projection_size": 4}, {}),
        ({"use_tanh": True, "rescale": True, "layer_norm": True, "projection_size": 2}, {"activation": '"tanh"'}),
    ]
    for (options, keys), inputs, both in product(every, (FEATURES, HIDDEN), (False, True)):
        named = ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"
        recipe = layer("sru", "encoder", bidirectional=str(both).lower(), **keys)
        option = f"{named}{', bidirectional' * both}{', with a separate skip' * (inputs == FEATURES)}"
        build = partial_of(OverRows, inputs, 3, bidirectional=both, **options)
        yield Case("sru.SRU", option, build, recipe, features=inputs, lengths=(9, 1, 4))
    wide = partial_of(OverRows, FEATURES, 2, proj_input_to_hidden_first=True)
    refused = "encoder.input_to_hidden is a module of its own within the SRU"
    yield Case("sru.SRU", "proj_input_to_hidden_first", wide, layer("sru", "encoder"), refused)
    for window, gate in product((1, 2), (True, False)):
        pooling = "fo" if gate else "f"
        recipe = layer("qrnn", "layers", window=str(window), pooling=f'"{pooling}"')
        build = partial_of(QRNN, window, output_gate=gate)
        yield Case("QRNN of fastai and Salesforce", f"window={window}, output_gate={gate}", build, recipe)


CASES = [*_recurrent_cases(), *_conv_cases(), *_step_cases(), *_scan_cases()]
