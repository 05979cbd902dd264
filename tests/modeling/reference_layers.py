"""Reference layers in plain PyTorch, in float64 and one row at a time, with their weights in the layout of a model folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional

from service.modeling.spec import ConvLayer, GRULayer, Layer, LSTMLayer, RecurrentLayer, SRULayer, TCNLayer, TextCNNLayer
from tests.kernels.families import cpu_backends
from tests.modeling import reference_blocks
from tests.modeling.reference_cells import CELLS, Cell

VOCABULARY, WIDTH, HIDDEN, FEATURES = 13, 7, 5, 3
SIZES: dict[str, dict[str, Any]] = {
    "conv": {"filters": HIDDEN, "width": 3},
    "tcn": {"filters": HIDDEN, "levels": 2},
    "text_cnn": {"filters": HIDDEN, "widths": (3, 1, 4)},
}
ACTIVATIONS = {"none": nn.Identity(), "relu": nn.ReLU(), "tanh": nn.Tanh(), "gelu": nn.GELU()}
GATED = ("glu", "gated_tanh")
_LAYERS: TypeAdapter[Layer] = TypeAdapter(Layer)


class Form:
    """A layer of model.toml, such as ``Form("gru", depth=2)``. Default sizes are odd."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        self.options = options
        self.spec = _LAYERS.validate_python({"kind": kind, **SIZES.get(kind, {"hidden": HIDDEN}), **options})

    def __str__(self) -> str:
        return "-".join([self.kind, *(f"{name}={value}" for name, value in self.options.items())])

    def also(self, **options: Any) -> Form:
        return Form(self.kind, **{**self.options, **options})

    def reference(self, inputs: int, seed: int = 0) -> ReferenceLayer:
        """Return the reference layer over `inputs` columns."""
        torch.manual_seed(seed)
        made = _reference_of(self.spec, inputs)
        made.requires_grad_(False).double()
        return made


class ReferenceLayer(nn.Module):
    """A layer that maps one row, (steps, inputs), to (steps, outputs)."""

    def forward(self, row: Tensor) -> Tensor:
        raise NotImplementedError

    def arrays(self) -> dict[str, Tensor]:
        """Return the weights in the names and layout of a model folder, float32."""
        return {name: array.float() for name, array in self.named().items()}

    def named(self) -> dict[str, Tensor]:
        raise NotImplementedError


class ReferenceTorchRNN(ReferenceLayer):
    """torch.nn.LSTM or torch.nn.GRU, which have the same gate order. Two biases of torch that are always added become one."""

    def __init__(self, spec: LSTMLayer | GRULayer, inputs: int) -> None:
        super().__init__()
        kind = nn.LSTM if spec.kind == "lstm" else nn.GRU
        self.rnn = kind(inputs, spec.hidden, spec.depth, bidirectional=spec.bidirectional)

    def forward(self, row: Tensor) -> Tensor:
        steps: Tensor = self.rnn(row)[0]
        return steps

    def named(self) -> dict[str, Tensor]:
        rnn, held, named = self.rnn, self.rnn.state_dict(), {}
        for level in range(rnn.num_layers):
            for direction, suffix in (("forward", ""), ("backward", "_reverse"))[: 1 + rnn.bidirectional]:
                at, ours = f"l{level}{suffix}", f"{level}.{direction}"
                named[f"{ours}.input"] = held[f"weight_ih_{at}"].T
                named[f"{ours}.recurrent"] = held[f"weight_hh_{at}"].T
                named[f"{ours}.bias"] = held[f"bias_ih_{at}"] + held[f"bias_hh_{at}"]
                if isinstance(rnn, nn.GRU):
                    inner = held[f"bias_hh_{at}"][2 * rnn.hidden_size :]
                    named[f"{ours}.bias"][2 * rnn.hidden_size :] -= inner
                    named[f"{ours}.recurrent_bias"] = inner
        return named


class ReferenceLevels(ReferenceLayer):
    """A stack of ReferenceLevel."""

    def __init__(self, spec: RecurrentLayer, inputs: int) -> None:
        super().__init__()
        widths = [inputs, *[spec.outputs] * spec.depth]
        self.levels = nn.ModuleList(ReferenceLevel(spec, width) for width, _ in pairwise(widths))

    def forward(self, row: Tensor) -> Tensor:
        for level in self.levels:
            row = level(row)
        return row

    def named(self) -> dict[str, Tensor]:
        levels = [level.named() for level in self.levels if isinstance(level, ReferenceLevel)]
        return {f"{index}.{name}": array for index, named in enumerate(levels) for name, array in named.items()}


class ReferenceLevel(nn.Module):
    """A cell per direction. The backward cell reads the reversed row, and its output is reversed again. The layer norm of an SRU covers
    the input of both cells' products, or the output of the level."""

    def __init__(self, spec: RecurrentLayer, inputs: int) -> None:
        super().__init__()
        cell = CELLS[_LAYERS.validate_python(spec).kind]
        self.cells = nn.ModuleList(cell(spec, inputs, way * spec.hidden) for way in range(1 + spec.bidirectional))
        self.when = spec.layer_norm if isinstance(spec, SRULayer) else "none"
        self.norm = None if self.when == "none" else nn.LayerNorm(inputs if self.when == "before" else spec.outputs)
        if self.norm is not None:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)

    def forward(self, row: Tensor) -> Tensor:
        before = {"norm": self.norm} if self.when == "before" else {}
        onward, *backward = self.cells
        joined = torch.cat([onward(row, **before), *(one(row.flip(0), **before).flip(0) for one in backward)], dim=1)
        return self.norm(joined) if self.norm is not None and self.when == "after" else joined

    def named(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for direction, cell in zip(("forward", "backward"), self.cells, strict=False):
            assert isinstance(cell, Cell)
            named |= {f"{direction}.{name}": array for name, array in cell.named().items()}
        return named if self.norm is None else {**named, "norm": torch.stack((self.norm.weight, self.norm.bias))}


class ReferenceConv(ReferenceLayer):
    """torch.nn.Conv1d without stride, with every `stride`-th step kept, and the norms of torch."""

    def __init__(self, spec: ConvLayer, inputs: int) -> None:
        super().__init__()
        self.spec = spec
        maps = spec.filters * (2 if spec.activation.kind in GATED else 1)
        padding = "same" if spec.padding == "same" else 0
        self.conv = reference_blocks.convolution(
            inputs, maps, spec.width, dilation=spec.dilation, padding=padding, normed=spec.weight_norm
        )
        self.norm = reference_blocks.batch_norm(maps) if spec.batch_norm else None

    def forward(self, row: Tensor) -> Tensor:
        before = (self.spec.width - 1) * self.spec.dilation
        columns = functional.pad(row.T, (before, 0)) if self.spec.padding == "causal" else row.T
        if columns.shape[1] <= before and self.spec.padding == "none":
            return row.new_zeros(0, self.spec.filters)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel")  # the extra copy does not matter here
            maps = self.conv(columns)
        steps = self.norm(maps[None])[0].T if self.norm else maps.T
        return self._activated(steps)[:: self.spec.stride]

    def named(self) -> dict[str, Tensor]:
        named = reference_blocks.tensors(self.conv)
        return {**named, "norm": reference_blocks.statistics(self.norm)} if self.norm else named

    def _activated(self, maps: Tensor) -> Tensor:
        name = self.spec.activation.kind
        if name not in GATED:
            activated: Tensor = ACTIVATIONS[name](maps)
            return activated
        value, gate = maps.chunk(2, dim=1)
        return (value if name == "glu" else value.tanh()) * gate.sigmoid()


class ReferenceTCN(ReferenceLayer):
    """Levels with doubling dilation."""

    def __init__(self, spec: TCNLayer, inputs: int) -> None:
        super().__init__()
        widths = [inputs, *[spec.filters] * spec.levels]
        self.levels = nn.ModuleList(
            reference_blocks.TCNLevel(columns, channels, spec.width, 2**level, normed=spec.weight_norm)
            for level, (columns, channels) in enumerate(pairwise(widths))
        )

    def forward(self, row: Tensor) -> Tensor:
        columns = row.T
        for level in self.levels:
            columns = level(columns)
        return columns.T

    def named(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for index, level in enumerate(self.levels):
            assert isinstance(level, reference_blocks.TCNLevel)
            named |= reference_blocks.prefixed(f"{index}.", level.named())
        return named


class ReferenceTextCNN(ReferenceLayer):
    """Kim 2014: (1, outputs). A filter that is wider than its row outputs zeros."""

    def __init__(self, spec: TextCNNLayer, inputs: int) -> None:
        super().__init__()
        self.spec = spec
        self.convs = nn.ModuleList(nn.Conv1d(inputs, spec.filters, width) for width in spec.widths)

    def forward(self, row: Tensor) -> Tensor:
        columns = functional.pad(row.T, (self.spec.padding, self.spec.padding))
        seen = zip(self.spec.widths, self.convs, strict=True)
        none = row.new_zeros(self.spec.filters)
        pooled = [conv(columns).relu().amax(1) if width <= columns.shape[1] else none for width, conv in seen]
        return torch.cat(pooled)[None]

    def named(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for width, conv in zip(self.spec.widths, self.convs, strict=True):
            assert isinstance(conv, nn.Conv1d) and conv.bias is not None
            named |= {f"{width}.filters": conv.weight.permute(2, 1, 0), f"{width}.bias": conv.bias}
        return named


def _reference_of(spec: Layer, inputs: int) -> ReferenceLayer:
    if isinstance(spec, LSTMLayer) or (isinstance(spec, GRULayer) and spec.reset_after):
        return ReferenceTorchRNN(spec, inputs)
    if isinstance(spec, ConvLayer):
        return ReferenceConv(spec, inputs)
    if isinstance(spec, TCNLayer):
        return ReferenceTCN(spec, inputs)
    if isinstance(spec, TextCNNLayer):
        return ReferenceTextCNN(spec, inputs)
    assert isinstance(spec, RecurrentLayer)
    return ReferenceLevels(spec, inputs)


def last(steps: Tensor, spec: Layer) -> Tensor:
    """Return the output of each direction after it has read the whole row."""
    if not isinstance(spec, RecurrentLayer) or not spec.bidirectional:
        return steps[-1]
    return torch.cat((steps[-1, : spec.hidden], steps[0, spec.hidden :]))


def made_up_rows(lengths: Sequence[int], *, embedded: bool = False, width: int = FEATURES, seed: int = 0) -> Tensor:
    """Return random tokens for rows of these lengths: ids if `embedded`, otherwise floats."""
    generator = torch.Generator().manual_seed(seed)
    if embedded:
        return torch.randint(VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32)
    return torch.randn(sum(lengths), width, generator=generator)


RECURRENT = (
    Form("lstm"),
    Form("gru"),
    Form("gru", reset_after=False),
    Form("sru"),
    Form("sru", skip=False),
    Form("sru", cell_gates=False, activation="tanh", scale=1.7),
    Form("sru", projection=2, scale=-0.3),
    Form("sru", layer_norm="before", scale=1.7),
    Form("sru", layer_norm="before", projection=2, activation="tanh"),
    Form("sru", layer_norm="after", cell_gates=False),
    Form("qrnn", pooling="f", window=3),
    Form("qrnn", pooling="fo"),
    Form("qrnn", pooling="fo", window=3),
    Form("qrnn", pooling="ifo", window=1),
    Form("qrnn", pooling="ifo", window=3),
)
CONVOLUTIONS = (
    Form("conv"),
    Form("conv", width=1, padding="none", activation="gelu"),
    Form("conv", width=4, padding="same", activation="none"),
    Form("conv", width=3, padding="causal", dilation=3, activation="tanh"),
    Form("conv", width=3, padding="same", dilation=2, stride=2),
    Form("conv", width=2, padding="causal", stride=3),
    Form("conv", width=3, padding="none", stride=2, activation="none"),
    Form("conv", width=2, padding="none", dilation=4),
    Form("conv", padding="causal", activation="glu"),
    Form("conv", padding="causal", width=2, dilation=2, activation="gated_tanh", weight_norm=True),
    Form("conv", weight_norm=True, batch_norm=True),
    Form("conv", batch_norm=True, padding="none", activation="glu"),
)
TCNS = (
    Form("tcn"),
    Form("tcn", levels=3, width=3, filters=FEATURES),
    Form("tcn", levels=1, weight_norm=True),
)
TEXT_CNNS = (Form("text_cnn"), Form("text_cnn", padding=2), Form("text_cnn", widths=(2,), padding=1))
BOTH_WAYS = tuple(form.also(depth=2, bidirectional=True) for form in RECURRENT)
EVERY_LAYER = (*RECURRENT, *BOTH_WAYS, *CONVOLUTIONS, *TCNS, *TEXT_CNNS)


def fastest_on_cpu(form: Form) -> str:
    """Return the name of the backend that runs a layer of this form on a CPU."""
    return cpu_backends("conv" if form.kind in ("tcn", "text_cnn") else form.kind)[0]
