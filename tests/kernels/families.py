"""The forms of the kernel families under test, and random arguments for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activations import Activation
from kernels.backend import AUTO, Backend, Problem
from kernels.conv.types import GATED as CONV_GATED
from kernels.conv.types import ConvState, ConvWeights
from kernels.cpu.cache import NOT_COMPILED
from kernels.embedding import tap_rows
from kernels.gated import HiddenState, gate_inputs
from kernels.gru.types import GRUWeights
from kernels.lstm.types import LSTMState, LSTMWeights
from kernels.mingru import MinGRUWeights
from kernels.qrnn.types import POOLINGS, QRNNState, QRNNWeights
from kernels.quantized import dequantize, quantize
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.rnn.types import RNNWeights
from kernels.sru.types import SRUState, SRUWeights
from tests.kernels.inputs import EVERYTHING, Arguments, arrays, as_float64, map_arrays, ragged, rows

Normal = Callable[..., Tensor]
VOCABULARY = 11
ACTIVATIONS = {
    **{kind: Activation(kind) for kind in ("sigmoid", "tanh", "relu", "relu6", "softsign")},
    "hard_sigmoid": Activation("hard_sigmoid", (0.2, 0.5)),
    "scaled_tanh": Activation("scaled_tanh", (1.2, 0.7)),
}
MATRICES = ("input", "recurrent", "projection")


class Form:
    """A family with options of its weights, such as ``Form("gru", reset="before")``. int8: products take int8 weights and rows."""

    def __init__(self, family: str, **options: Any) -> None:
        self.family = family
        self.int8 = bool(options.pop("int8", False))
        self.options = options
        self.module = import_module(f"kernels.{family}")
        self.backends: tuple[Backend, ...] = self.module.BACKENDS

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.family, *["int8"] * self.int8, *options])

    def arguments(
        self, lengths: Sequence[int], hidden: int, inputs: int, *, storage: torch.dtype = torch.float32, seed: int = 0
    ) -> Arguments:
        """Return normal values. Weights are scaled so that gates neither vanish nor saturate, and have the dtype `storage`."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        weights, state = MAKERS[self.family](normal, len(lengths), hidden, inputs, **self.options)
        weights = map_arrays(weights, lambda array: array.to(storage))
        if self.int8:
            matrices = {name: array for name, array in arrays(weights).items() if name in MATRICES}
            weights = replace(weights, int8=True, **{name: dequantize(*quantize(array)) for name, array in matrices.items()})
        if self.takes_ids:
            return Arguments(ragged(whole(normal, sum(lengths), below=VOCABULARY).int(), lengths), weights, state)
        first = {"conv": "filters", "sru": "projection"}.get(self.family, "input")
        matrix = getattr(weights, first)
        columns = (weights.input if matrix is None else matrix).shape[-2]
        return Arguments(ragged(normal(sum(lengths), columns), lengths), weights, state)

    def run(self, x: Ragged, weights: Any, state: Any = None, **how: Any) -> Encoded:
        return self._call(self.family, x, weights, state, **how)

    def bidirectional(self, x: Ragged, weights: tuple[Any, Any], states: Any = None, **how: Any) -> Encoded:
        return self._call("bidirectional", x, weights, states, **how)

    def levels(self, x: Ragged, weights: Sequence[Any], states: Sequence[Any] | None = None, **how: Any) -> Encoded:
        return self._call("levels", x, weights, states, **how)

    def _call(self, name: str, *arguments: Any, want: Outputs = EVERYTHING, backend: str = AUTO) -> Encoded:
        encoded: Encoded = getattr(self.module, name)(*arguments, want=want, backend=backend)
        return encoded

    def exact(self, arguments: Arguments) -> Encoded:
        """Return the reference's encoding of these values in float64."""
        return self.run(*as_float64(arguments), backend="reference")

    @property
    def variants(self) -> tuple[str, ...]:
        """The additions of the weights to the plain layer of their family."""
        variants: tuple[str, ...] = getattr(self.arguments([1], 1, 1).weights, "variants", ())
        return variants

    @property
    def takes_ids(self) -> bool:
        return bool(self.options.get("ids"))

    @property
    def normalises(self) -> bool:
        """Whether the layer has a layer norm."""
        return bool(self.options.get("norm") or self.options.get("layer_norm"))

    @property
    def takes_gates(self) -> bool:
        return self.family in GATED

    def gated(self, arguments: Arguments) -> Arguments:
        """Return the same problem with its gate inputs as the data."""
        return GATED[self.family](*arguments)


def whole(normal: Normal, *shape: int, below: int) -> Tensor:
    """Return random integers from 0 up to `below`."""
    return (normal(*shape) * 1000).long() % below


def _gated(
    normal: Normal,
    gates: int,
    hidden: int,
    inputs: int,
    *,
    ids: bool = False,
    activations: Sequence[str] = (),
    clip: float | None = None,
    layer_norm: bool = False,
) -> dict[str, Any]:
    """Return the fields of gated weights for vectors, or for ids with a table. A large epsilon does not amplify rounding."""
    size = gates * hidden
    fields: dict[str, Any] = {"clip": clip, "input": None, "bias": None, "table": None}
    if ids:
        fields["table"] = normal(VOCABULARY, size)
    else:
        fields |= {"input": normal(inputs, size) * inputs**-0.5, "bias": normal(size)}
    if activations:
        fields["activations"] = tuple(ACTIVATIONS[kind] for kind in activations)
    if layer_norm:
        fields |= {"input_norm": normal(2, size), "recurrent_norm": normal(2, size), "epsilon": 0.1}
    return fields


def _lstm(
    normal: Normal, rows: int, hidden: int, inputs: int, *, peepholes: bool = False, projection: bool = False, **gated: Any
) -> tuple[LSTMWeights, LSTMState]:
    vector = (hidden + 1) // 2 if projection else hidden
    weights = LSTMWeights(
        recurrent=normal(vector, 4 * hidden) * vector**-0.5,
        peephole=normal(3 * hidden) if peepholes else None,
        projection=normal(hidden, vector) * hidden**-0.5 if projection else None,
        cell_norm=normal(2, hidden) if gated.get("layer_norm") else None,
        **_gated(normal, 4, hidden, inputs, **gated),
    )
    return weights, LSTMState(normal(rows, vector).tanh(), normal(rows, hidden))


def _rnn(normal: Normal, rows: int, hidden: int, inputs: int, **gated: Any) -> tuple[RNNWeights, HiddenState]:
    recurrent = normal(hidden, hidden) * 0.5 * hidden**-0.5
    return RNNWeights(recurrent=recurrent, **_gated(normal, 1, hidden, inputs, **gated)), HiddenState(
        normal(rows, hidden).tanh()
    )


def _gru(
    normal: Normal, rows: int, hidden: int, inputs: int, *, reset: str = "after", **gated: Any
) -> tuple[GRUWeights, HiddenState]:
    weights = GRUWeights(
        recurrent=normal(hidden, 3 * hidden) * hidden**-0.5,
        recurrent_bias=normal(hidden) if reset == "after" else None,
        **_gated(normal, 3, hidden, inputs, **gated),
    )
    return weights, HiddenState(normal(rows, hidden).tanh())


def _sru(
    normal: Normal,
    rows: int,
    hidden: int,
    inputs: int,
    *,
    version: int = 2,
    skip: str = "block",
    tanh: bool = False,
    projection: bool = False,
    norm: bool = False,
    ids: bool = False,
) -> tuple[SRUWeights, SRUState]:
    """skip: "block", "none", or "columns": hidden columns in the middle of an input that is wider by as many. ids: with a table."""
    columns = inputs + hidden if skip == "columns" else inputs
    projected = (columns + 1) // 2 if projection else columns
    blocks = (4 if skip == "block" else 3) * hidden
    weights = SRUWeights(
        input=None if ids else normal(projected, blocks) * projected**-0.5,
        projection=normal(columns, projected) * columns**-0.5 if projection else None,
        bias=normal(2 * hidden),
        cell=normal(2 * hidden) * 0.25 if version == 2 else None,  # larger values amplify rounding errors
        skip_from=inputs // 2 if skip == "columns" else None,
        scale=1.7 if skip == "columns" else 1.0,
        tanh=tanh,
        norm=normal(2, columns) if norm else None,
        table=normal(VOCABULARY, blocks) if ids else None,
    )
    return weights, SRUState(normal(rows, hidden))


def _qrnn(
    normal: Normal, rows: int, hidden: int, inputs: int, *, pooling: str = "fo", window: int = 2, ids: bool = False
) -> tuple[QRNNWeights, QRNNState]:
    """ids: with tables."""
    blocks = POOLINGS[pooling] * hidden
    if ids:
        tables = normal(window, 1 + VOCABULARY, blocks) * window**-0.5
        tables[:, 0] = 0.0
        left = whole(normal, rows, window - 1, below=1 + VOCABULARY)
        return QRNNWeights(None, normal(blocks), pooling, tables), QRNNState(normal(rows, hidden), left)
    weights = QRNNWeights(normal(window, inputs, blocks) * (window * inputs) ** -0.5, normal(blocks), pooling)
    return weights, QRNNState(normal(rows, hidden), normal(rows, window - 1, inputs))


def _mingru(
    normal: Normal, rows: int, hidden: int, inputs: int, *, activation: str = "positive", **of_qrnn: Any
) -> tuple[MinGRUWeights, QRNNState]:
    weights, state = _qrnn(normal, rows, hidden, inputs, pooling="f", window=1, **of_qrnn)
    return MinGRUWeights(weights.input, weights.bias, tables=weights.tables, activation=activation), state


def _conv(
    normal: Normal,
    rows: int,
    hidden: int,
    inputs: int,
    *,
    width: int = 3,
    left: int = 0,
    activation: str = "none",
    ids: str = "",
    **others: Any,
) -> tuple[ConvWeights, ConvState | None]:
    """ids: with an "embedding" or "tables", and without a state."""
    maps = (2 if activation in CONV_GATED else 1) * hidden
    filters, bias = normal(width, inputs, maps) * (width * inputs) ** -0.5, normal(maps)
    weights = ConvWeights(filters, bias, left, activation=activation, **others)
    if not ids:
        return weights, ConvState(normal(rows, left, inputs))
    if ids == "embedding":
        return replace(weights, embedding=normal(VOCABULARY, inputs)), None
    tables = normal(width, 1 + VOCABULARY, maps) * width**-0.5
    tables[:, 0] = 0.0
    return replace(weights, tables=tables), None


MAKERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "rnn": _rnn,
    "lstm": _lstm,
    "gru": _gru,
    "sru": _sru,
    "qrnn": _qrnn,
    "mingru": _mingru,
    "conv": _conv,
}

FORMS = (
    Form("rnn"),
    Form("rnn", activations=("relu",)),
    Form("rnn", ids=True, clip=0.5),
    Form("rnn", layer_norm=True),
    Form("lstm", peepholes=True),
    Form("lstm", projection=True),
    Form("lstm", peepholes=True, projection=True, clip=0.7, ids=True),
    Form("lstm", activations=("hard_sigmoid", "softsign", "relu6")),
    Form("lstm", layer_norm=True, peepholes=True),
    Form("gru", activations=("hard_sigmoid", "scaled_tanh"), clip=0.9),
    Form("gru", reset="before", activations=("sigmoid", "softsign"), ids=True),
    Form("gru", layer_norm=True),
    Form("lstm"),
    Form("lstm", ids=True),
    Form("gru", reset="after"),
    Form("gru", reset="before"),
    Form("gru", reset="after", ids=True),
    Form("gru", reset="before", ids=True),
    Form("sru", version=2, skip="block"),
    Form("sru", version=2, skip="columns", tanh=True),
    Form("sru", version=2, skip="none"),
    Form("sru", version=2, skip="columns", projection=True),
    Form("sru", version=1, skip="block", tanh=True),
    Form("sru", version=1, skip="columns"),
    Form("sru", version=2, skip="block", norm=True),
    Form("sru", version=1, skip="columns", projection=True, norm=True),
    Form("sru", version=2, skip="block", ids=True),
    Form("sru", version=1, skip="none", tanh=True, ids=True),
    Form("qrnn", pooling="f", window=3),
    Form("qrnn", pooling="fo", window=1),
    Form("qrnn", pooling="fo", window=2),
    Form("qrnn", pooling="ifo", window=4),
    Form("qrnn", pooling="f", window=1, ids=True),
    Form("qrnn", pooling="fo", window=3, ids=True),
    Form("qrnn", pooling="ifo", window=2, ids=True),
    Form("mingru"),
    Form("mingru", activation="identity", ids=True),
    Form("conv", width=1, activation="gelu"),
    Form("conv", width=3, left=2, activation="tanh"),
    Form("conv", width=3, left=8, dilation=4, activation="relu"),
    Form("conv", width=3, left=2, stride=2),
    Form("conv", width=4, left=1, right=2),
    Form("conv", width=5, activation="relu"),
    Form("conv", width=5, left=4, right=3, dilation=2, stride=3),
    Form("conv", width=2, left=1, activation="glu"),
    Form("conv", width=3, left=4, dilation=2, activation="gated_tanh"),
    Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding"),
    Form("conv", width=2, left=2, dilation=2, activation="glu", ids="embedding"),
    Form("conv", width=3, left=2, ids="tables"),
    Form("conv", width=4, stride=2, activation="gated_tanh", ids="tables"),
)
INT8_FORMS = (
    Form("lstm", int8=True),
    Form("lstm", int8=True, ids=True),
    Form("gru", int8=True, reset="after"),
    Form("gru", int8=True, reset="before"),
    Form("sru", int8=True, version=2, skip="columns", projection=True),
    Form("sru", int8=True, version=1, skip="block"),
    Form("qrnn", int8=True, pooling="fo", window=1),
    Form("qrnn", int8=True, pooling="ifo", window=3),
    Form("mingru", int8=True),
)

SOME_FORMS = [
    Form("rnn", ids=True, clip=0.5),
    Form("lstm"),
    Form("lstm", peepholes=True, projection=True, clip=0.7, ids=True),
    Form("lstm", layer_norm=True, peepholes=True),
    Form("gru", reset="after"),
    Form("gru", reset="before", ids=True),
    Form("sru", version=2, skip="columns", projection=True),
    Form("sru", version=1, skip="none", tanh=True, ids=True),
    Form("qrnn", pooling="fo", window=2),
    Form("qrnn", pooling="ifo", window=2, ids=True),
    Form("mingru"),
    Form("conv", width=3, left=4, dilation=2, activation="gated_tanh"),
    Form("conv", width=5, left=4, right=3, dilation=2, stride=3),
    Form("conv", width=3, left=2, ids="tables"),
    Form("lstm", int8=True),
    Form("sru", int8=True, version=2, skip="columns", projection=True),
]
"""One form or two of each kind, which every rule is checked for."""


def _gates(x: Ragged, weights: Any, state: Any) -> Arguments:
    """Return the problem of an RNN, an LSTM or a GRU with gate inputs as the data."""
    gates = gate_inputs(x.data, weights) if weights.table is None else weights.table[x.data.long()]
    rest = replace(weights, input=None, bias=None, table=None, input_norm=None)
    return Arguments(Ragged(gates, x.offsets), rest, state)


def _blocks(x: Ragged, weights: Any, state: Any) -> Arguments:
    """Return the problem of an SRU with blocks as the data. Every skip becomes a block."""
    rest = replace(weights, input=None, projection=None, skip_from=None, norm=None, table=None)
    if weights.table is not None:
        return Arguments(Ragged(weights.table[x.data.long()], x.offsets), rest, state)
    seen = x.data if weights.norm is None else functional.layer_norm(x.data, x.data.shape[1:], *weights.norm)
    blocks = [(seen if weights.projection is None else seen @ weights.projection) @ weights.input]
    if weights.skip_from is not None:
        blocks.append(x.data[:, weights.skip_from :][:, : weights.hidden] * weights.scale)
    return Arguments(Ragged(torch.cat(blocks, 1), x.offsets), rest, state)


def _convolved(x: Ragged, weights: Any, state: Any) -> Arguments:
    """Return the problem of a QRNN with its masked convolution as the data, and a window of one step."""
    taps, seen_by = (weights.input, x) if weights.tables is None else (weights.tables, tap_rows(x))
    window, _, blocks = taps.shape
    gates = taps.new_zeros(len(x.data), blocks)
    for row, (left, data) in enumerate(zip(state.left, rows(seen_by), strict=True)):
        begin, seen = int(x.offsets[row]), torch.cat((left, data))
        for back, tap in enumerate(taps):
            steps = seen[window - 1 - back : len(seen) - back]
            gates[begin : begin + len(data)] += steps @ tap if weights.tables is None else tap[steps]
    alone = replace(state, left=taps.new_zeros(x.rows, 0, blocks))
    return Arguments(Ragged(gates, x.offsets), replace(weights, input=None, tables=None), alone)


GATED: dict[str, Callable[..., Arguments]] = {
    **dict.fromkeys(("rnn", "lstm", "gru"), _gates),
    "sru": _blocks,
    **dict.fromkeys(("qrnn", "mingru"), _convolved),
}


def runs_on_cpu(backend: Backend, variants: tuple[str, ...] = ()) -> bool:
    """Return whether a backend accepts a CPU. Loops that are not compiled yet are compiled when a test runs them.

    variants: the additions of the weights to the plain layer of their family.
    """
    problem = Problem(torch.device("cpu"), torch.float32, 1, variants)
    return backend.name == "reference" or backend.refusal(problem) in (None, NOT_COMPILED)


def cpu_backends(family: str, variants: tuple[str, ...] = ()) -> list[str]:
    """Return the names of the backends that accept a CPU, from the fastest to the fallback. Compiled loops do once they are compiled."""
    backends: tuple[Backend, ...] = import_module(f"kernels.{family}").BACKENDS
    return [backend.name for backend in backends if backend.name != "reference" and runs_on_cpu(backend, variants)]
