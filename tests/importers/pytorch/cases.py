"""State dicts of PyTorch that import or are refused. The tests import each of them."""
# mypy: disable-error-code="no-any-return"
# A module of torch returns Any when it is called.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.importers.importing import FEATURES, VOCABULARY, layer, randomize
from tests.importers.torch_models import HIDDEN, LABELS, TCN, Norm, TextCNN, old_weight_norm, plain
from tests.sru_package import SRU

WIDTH = 4
LENGTHS = (9, 5, 12)
Outputs = Mapping[str, Tensor]


CLASSIFY = 'head.kind = "classify"'
"""What logits do not prove."""


@dataclass(frozen=True)
class Case:
    """A tested option.

    build: makes a module; recipe: settings that the state_dict lacks; refused: words of the refusal, or empty if it imports; more:
    whether it runs only in tests/long; run: returns its outputs by name for one row; ids: whether rows are token ids; features: numbers of
    a step.
    """

    name: str
    build: Callable[[], nn.Module]
    recipe: str = ""
    refused: str = ""
    more: bool = False
    run: Callable[[nn.Module, Tensor], Outputs] = lambda module, row: module(row)
    ids: bool = False
    features: int = FEATURES
    lengths: Sequence[int] = LENGTHS

    def __str__(self) -> str:
        return self.name


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


class Chain(nn.Module):
    """Modules of single steps in a row, named 0, 1, ..."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, row: Tensor) -> Outputs:
        for module in self.layers:
            row = module(row[..., None])[..., 0] if isinstance(module, nn.BatchNorm1d) else module(row)
        return {"sequence": row}


class OverRows(nn.Module):
    """An SRU of the package over one row. Its scale is a constant, and so are the cell's weights in version 1."""

    def __init__(self, inputs: int, depth: int, **options: Any) -> None:
        super().__init__()
        self.encoder = SRU(inputs, HIDDEN, num_layers=depth, **options)
        self.has_cell_gates = not options.get("v1")

    def forward(self, row: Tensor) -> Outputs:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without gradients, the package would call its compiled code
            steps, _ = self.encoder(row[:, None])
        return {"sequence": steps[:, 0].detach()}


class QRNN(nn.Module):
    """Layers of Salesforce's and fastai's QRNN: a linear layer over this step and the previous step, newest first, blocks z f o.

    f is the gate of the new value: c = f z + (1 - f) c.
    """

    def __init__(self, window: int, *, output_gate: bool) -> None:
        super().__init__()
        self.window, self.blocks = window, 3 if output_gate else 2
        self.layers = nn.ModuleList(nn.Module() for _ in range(3))
        for level, inputs in zip(self.layers, [FEATURES, HIDDEN, HIDDEN], strict=True):
            level.linear = nn.Linear(window * inputs, self.blocks * HIDDEN)

    def forward(self, row: Tensor) -> Outputs:
        for level in self.layers:
            before = torch.cat((torch.zeros_like(row[:1]), row[:-1]))
            z, f, *o = level.linear(torch.cat((row, before), 1) if self.window == 2 else row).chunk(self.blocks, 1)  # type: ignore[operator]
            cell, steps = torch.zeros(HIDDEN), []
            for t in range(len(row)):
                forget = f[t].sigmoid()
                cell = forget * z[t].tanh() + (1 - forget) * cell
                steps.append(o[0][t].sigmoid() * cell if o else cell)
            row = torch.stack(steps)
        return {"sequence": row}


class MinGRU(nn.Module):
    """A layer of lucidrains' minGRU-pytorch, step by step. expansion: of the inner layer, with a linear layer after it."""

    def __init__(self, expansion: float = 1.0) -> None:
        super().__init__()
        inner = int(FEATURES * expansion)
        self.to_hidden_and_gate = nn.Linear(FEATURES, 2 * inner, bias=False)
        self.to_out = nn.Identity() if expansion == 1.0 else nn.Linear(inner, FEATURES, bias=False)

    def forward(self, row: Tensor) -> Outputs:
        hidden, gate = self.to_hidden_and_gate(row).chunk(2, dim=-1)
        hidden, gate = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid()), gate.sigmoid()
        steps = [torch.zeros_like(hidden[0])]
        for candidate, z in zip(hidden, gate, strict=True):
            steps.append(torch.lerp(steps[-1], candidate, z))
        return {"sequence": self.to_out(torch.stack(steps[1:]))}


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


NORMS: dict[str, Norm] = {"nn.utils.weight_norm": old_weight_norm, "parametrizations.weight_norm": parametrizations.weight_norm}
SEQUENCE = '[head]\nkind = "sequence"'


def classify(prefix: str, pool: str) -> str:
    return f'[head]\nkind = "classify"\nfrom = "{prefix}"\npool = "{pool}"'


def _recurrent_cases() -> Iterator[Case]:
    options: dict[str, dict[str, Any]] = {"": {}, ", bias=False": {"bias": False}, ", proj_size=2": {"proj_size": 2}}
    for kind, (depth, both), (name, option) in product(
        ("LSTM", "GRU", "RNN"), ((2, True), (1, False), (1, True), (3, False)), options.items()
    ):
        if kind == "LSTM" or "proj_size" not in option:
            build = partial(Tagger, kind, num_layers=depth, bidirectional=both, **option)
            is_more = (depth, both) != (2, True)
            yield Case(f"nn.{kind}: {depth}{', both' * both}{name}", build, more=is_more, ids=True, lengths=(9, 1, 4))
    for kind in ("LSTMCell", "GRUCell", "RNNCell"):
        yield Case(f"nn.{kind}: over the steps", partial(Cell, kind))
    relu = layer("embedding", "embedding") + layer("rnn", "rnn", activation='"relu"') + classify("classifier", "last")
    yield Case('nn.RNN: nonlinearity="relu" (recipe)', partial(Tagger, "RNN", nonlinearity="relu"), relu, ids=True)


def _conv(name: str, pads: tuple[int, int] = (1, 1), *, keys: Mapping[str, Any] | None = None, **options: Any) -> Case:
    """Return a convolution through a recipe. keys: of the recipe, besides the options of torch."""
    same = {key: options[key] for key in ("stride", "dilation", "groups") if key in options}
    own = {} if "padding" in options else {"pads": list(pads)}
    recipe = layer("conv", "conv", **own, **same, **(keys or {}))
    return Case(f"nn.Conv1d: {name} (recipe)", partial(Convolution, pads, **options), recipe)


def _conv_cases() -> Iterator[Case]:
    yield Case("nn.Conv1d: padding=1", partial(Convolution, padding=1))
    yield _conv("stride, dilation, groups", (4, 3), stride=2, dilation=3, groups=3)
    yield _conv("bias=False", bias=False)
    yield _conv("padding same, width 4", (0, 0), width=4, padding="same", keys={"padding": '"same"'})
    leaky = partial(functional.leaky_relu, negative_slope=0.2)
    yield _conv("leaky_relu", activation=leaky, keys={"activation": '{ kind = "leaky_relu", alpha = 0.2 }'})
    yield _conv("functional.glu", activation=partial(functional.glu, dim=1), keys={"activation": '"glu"'})
    for name, norm in NORMS.items():
        yield _conv(f"{name}, stride and groups", norm=norm, stride=2, groups=3)
    yield Case("nn.BatchNorm1d: before the activation", partial(Convolution, batch_norm=1e-5, padding=1))
    recipe = layer("conv", "conv", norm_from='"norm"', epsilon=0.1)
    yield Case("nn.BatchNorm1d: eps (recipe)", partial(Convolution, batch_norm=0.1, padding=1), recipe)
    recipe = layer("embedding", "embedding") + layer("text_cnn", "convs", padding=2) + classify("fc", "max")
    text: dict[str, Any] = {"run": probabilities, "ids": True, "lengths": (9, 3, 4)}
    yield Case("nn.Conv2d: text CNN", partial(TextCNN, 2), **text)
    yield Case("nn.Conv1d: text CNN with a hidden layer", partial(TextCNN, hidden=True), **text)
    yield Case("nn.Conv1d: text CNN with padding (recipe)", partial(TextCNN, padding=2), recipe, **text)
    for name, norm in NORMS.items():
        yield Case(f"nn.Conv1d: TCN {name}", partial(TCN, norm), CLASSIFY, run=logits)
    yield Case("nn.Conv1d: TCN of width 2", partial(TCN, plain, width=2, inputs=HIDDEN), CLASSIFY, run=logits, features=HIDDEN)


def logits(module: nn.Module, row: Tensor) -> Outputs:
    return {"logits": module(row[None])[0]}


def probabilities(module: nn.Module, row: Tensor) -> Outputs:
    return {"scores": module(row[None])[0].exp()}


def _step_cases() -> Iterator[Case]:
    dense = layer("dense", "layers.0")
    tanh = layer("dense", "layers.0", activation='"tanh"') + SEQUENCE
    yield Case("nn.Linear: bias=False, tanh (recipe)", lambda: Chain(nn.Linear(FEATURES, 6, bias=False), nn.Tanh()), tanh)
    norms: list[tuple[type[nn.Module], str, dict[str, Any]]] = [
        *((nn.LayerNorm, "layer_norm", options) for options in ({}, {"eps": 0.1}, {"bias": False})),
        *((nn.BatchNorm1d, "batch_norm", options) for options in ({"eps": 0.1}, {"affine": False})),
    ]
    for module, kind, options in norms:
        keys = {"epsilon": options["eps"]} if "eps" in options else {}
        recipe = dense + layer(kind, "layers.1", **keys) + SEQUENCE
        yield Case(f"nn.{module.__name__}: {options}", partial(_after_linear, module, options), recipe)
    yield Case("nn.MultiheadAttention", lambda: nn.MultiheadAttention(4, 2), "", "which no layer is known to have")


def _after_linear(module: Callable[..., nn.Module], options: Mapping[str, Any]) -> nn.Module:
    return Chain(nn.Linear(FEATURES, 6), module(6, **options))


def _scan_cases() -> Iterator[Case]:
    sizes = (
        (HIDDEN, True),
        (FEATURES, False),
        (FEATURES, True),
        (HIDDEN, False),
        (FEATURES, True),
        (HIDDEN, True),
        (FEATURES, True),
    )
    every: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(
            ({}, {}),
            ({"v1": True}, {}),
            ({"has_skip_term": False}, {"skip": False}),
            ({"rescale": True, "highway_bias": -1.0}, {}),
        ),
        ({"layer_norm": True, "normalize_after": True}, {"layer_norm": '"after"'}),
        ({"use_tanh": True, "rescale": True, "layer_norm": True, "projection_size": 2}, {"activation": '"tanh"'}),
        ({"projection_size": 4}, {}),
    ]
    for ((options, keys), in_short), inputs, both in product(zip(every, sizes, strict=True), (FEATURES, HIDDEN), (False, True)):
        build = partial(OverRows, inputs, 3, bidirectional=both, **options)
        name = f"sru.SRU: {options}{', both' * both}, {inputs} inputs"
        keys = {"activation": '"identity"', "bidirectional": both, **keys}
        recipe, is_more = layer("sru", "encoder", **keys), (inputs, both) != in_short
        yield Case(name, build, recipe, more=is_more, features=inputs, lengths=(9, 1, 4))
    wide = partial(OverRows, FEATURES, 2, proj_input_to_hidden_first=True)
    refused = "encoder.input_to_hidden is a module of its own within the SRU"
    yield Case("sru.SRU: proj_input_to_hidden_first", wide, layer("sru", "encoder"), refused)
    for window, gate in product((1, 2), (True, False)):
        recipe = layer("qrnn", "layers", window=window, pooling='"fo"' if gate else '"f"')
        qrnn = partial(QRNN, window, output_gate=gate)
        yield Case(f"QRNN: window={window}, output_gate={gate}", qrnn, recipe, more=window == 1)
    yield Case("minGRU", MinGRU)
    yield Case("minGRU: expansion_factor=2", partial(MinGRU, 2.0))


CASES = [*_recurrent_cases(), *_conv_cases(), *_step_cases(), *_scan_cases()]
