"""Ways to run the kernels: a layer, both directions, several levels, a stack of convolutions or a text CNN, and how it is launched.

All have the same promises for rows, states and outputs, which test_promises.py checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.conv import stack as run_stack
from kernels.conv import text_cnn
from kernels.conv.plan import ConvTile as ConvTile
from kernels.ragged import Encoded, Outputs, Ragged
from kernels.scan.shape import ScanShape, TileShape
from tests.gpu.inputs import FLOAT32, HALF, LAST, MAXIMUM, Shape, exactly, in_shape, made
from tests.gpu.stacks import KEEP_STEPS, Make, centred, embedding, gated, stacked, tables, tcn, text
from tests.kernels.families import Form
from tests.kernels.inputs import EVERYTHING

Problem = tuple[Ragged, Any, tuple[Any, ...]]
"""Rows, the weights of all layers, and a state of each layer that has one."""

LSTM, PEEPHOLES, GRU = Form("lstm"), Form("lstm", peepholes=True), Form("gru", reset="after")
ONE_PRODUCT = (LSTM, PEEPHOLES, GRU)
GRU_BEFORE, PROJECTED = Form("gru", reset="before"), Form("lstm", projection=True)
TWO_PRODUCTS = (GRU_BEFORE, PROJECTED, Form("lstm", projection=True, peepholes=True))
"""Layers with two dependent products in each step."""
SRU_1 = Form("sru", version=1, skip="block")
SRU_2 = Form("sru", version=2, skip="block", tanh=True)
SRU_OF_IDS = Form("sru", version=1, skip="none", ids=True)
QRNN = Form("qrnn", pooling="fo", window=2)
QRNN_OF_IDS = Form("qrnn", pooling="ifo", window=2, ids=True)
MINGRU = Form("mingru")
SCANS = (SRU_1, SRU_2, QRNN, SRU_OF_IDS, QRNN_OF_IDS, MINGRU)
CAUSAL = Form("conv", width=3, left=8, dilation=4, activation="tanh")
GATED = Form("conv", width=3, left=4, dilation=2, activation="gated_tanh")
CENTRED = Form("conv", width=3, left=1, right=1, activation="relu")
UNPADDED = Form("conv", width=3, activation="relu")
STRIDED = Form("conv", width=3, left=2, stride=2, activation="gelu")
OF_VECTORS = Form("conv", width=3, left=1, right=1, activation="relu", ids="embedding")
OF_TABLES = Form("conv", width=3, left=2, activation="relu", ids="tables")
SOME_TILE = ConvTile(1, 64)


class Case(NamedTuple):
    """name: of the test; make: returns a problem with rows of these lengths, from a seed; run: as the functions of `kernels.lstm`."""

    name: str
    make: Callable[..., Problem]
    run: Callable[..., Encoded]
    backend: str
    form: Form | None = None
    """Of a layer, or of the layers of both directions."""
    shape: Shape = None
    want: Outputs = EVERYTHING
    stateful: bool = True
    causal: bool = False
    """Whether rows can be split into chunks."""
    alone: bool = True
    """Whether a row has the same bits in any batch."""

    def __str__(self) -> str:
        return self.name

    def made(self, lengths: Sequence[int], seed: int = 0) -> Layers:
        return Layers(self, *self.make(lengths, seed=seed))


class Layers(NamedTuple):
    """A problem of a case."""

    case: Case
    x: Ragged
    weights: Any
    states: tuple[Any, ...]

    def run(self, x: Ragged, states: Any, want: Outputs | None = None) -> Encoded:
        """Encode rows from these states, zeros if there are none. The state of the result is a tuple."""
        case = self.case
        with in_shape(case.shape):
            encoded = case.run(x, self.weights, states or None, want=want or case.want, backend=case.backend)
        after = encoded.state if isinstance(encoded.state, tuple) else (encoded.state,)
        return replace(encoded, state=tuple(state for state in after if state is not None))

    def encoded(self, want: Outputs | None = None) -> Encoded:
        return self.run(self.x, self.states, want)


def layer(
    form: Form,
    backend: str,
    hidden: int,
    *,
    storage: torch.dtype = HALF,
    shape: Shape = None,
    want: Outputs = EVERYTHING,
    make: Callable[..., Any] = exactly,
    causal: bool = True,
    alone: bool = True,
) -> Case:
    """Return the case of a layer in one direction."""

    def problem(lengths: Sequence[int], seed: int) -> Problem:
        x, weights, state = make(form, lengths, hidden, storage=storage, seed=seed)
        return x, weights, () if state is None else (state,)

    def run(x: Ragged, weights: Any, states: Any, *, want: Outputs, backend: str) -> Encoded:
        return form.run(x, weights, states[0] if states else None, want=want, backend=backend)

    name = f"{form}-{backend}-{hidden}-{storage}-{shape}"
    stateful = form.family != "conv" or not form.takes_ids
    return Case(name, problem, run, backend, form, shape, want, stateful, causal, alone)


def both(form: Form, backend: str, hidden: int, *, storage: torch.dtype = HALF) -> Case:
    """Return the case of both directions of a layer."""

    def problem(lengths: Sequence[int], seed: int) -> Problem:
        sides = [exactly(form, lengths, hidden, storage=storage, seed=2 * seed + side) for side in (0, 1)]
        return sides[0].x, tuple(side.weights for side in sides), tuple(side.state for side in sides)

    return Case(f"both-{form}-{backend}-{hidden}-{storage}", problem, form.bidirectional, backend, form)


def levels(form: Form, hidden: int, count: int, tile: int, *, storage: torch.dtype = HALF) -> Case:
    """Return the case of several levels that run at once, as the backend `adaptive` does. tile: 0 as tuned."""

    def problem(lengths: Sequence[int], seed: int) -> Problem:
        widths = [24, *[hidden] * (count - 1)]
        each = [
            made(form, lengths, hidden, width, storage=storage, seed=10 * seed + level) for level, width in enumerate(widths)
        ]
        return each[0].x, tuple(level.weights for level in each), tuple(level.state for level in each)

    name = f"{count} levels-{form}-{hidden}-{storage}-{tile}"
    return Case(name, problem, form.levels, "adaptive", shape={"levels": tile} if tile else None, alone=False)


def blocks(make: Make, *, states: bool, causal: bool = False) -> Case:
    """Return the case of a stack of convolutions, with a state of each layer or without states."""

    def problem(lengths: Sequence[int], seed: int) -> Problem:
        x, made, before = stacked(make, lengths, states=states).map_arrays(Tensor.cuda)
        if x.data.is_floating_point():
            x = Ragged(x.data * (1 + seed), x.offsets)
        return x, made, before or ()

    return Case(f"stack-{make.__name__}", problem, run_stack, "fused", shape=SOME_TILE, stateful=states, causal=causal)


def texts(ids: str) -> Case:
    """Return the case of a text CNN."""

    def problem(lengths: Sequence[int], seed: int) -> Problem:
        x, layers, classifier = text(ids, lengths, 3, labels=6).map_arrays(Tensor.cuda)
        return x, (layers, classifier), ()

    def run(x: Ragged, weights: Any, states: None, *, want: Outputs, backend: str) -> Encoded:
        return text_cnn(x, *weights, backend=backend)

    return Case(f"text-{ids}", problem, run, "fused", shape=SOME_TILE, stateful=False)


conv = partial(layer, backend="fused", shape=SOME_TILE, make=partial(made, width=40))
EXACT = [
    *(layer(form, "cluster", hidden, storage=FLOAT32) for form, hidden in zip(ONE_PRODUCT, (40, 131, 500), strict=True)),
    *(layer(form, "step", hidden, storage=FLOAT32) for form, hidden in zip(ONE_PRODUCT, (40, 136, 520), strict=True)),
]
LAYERS = [
    *(
        layer(form, backend, hidden)
        for form in ONE_PRODUCT
        for backend, hidden in (
            ("persistent", 40),
            ("cluster", 131),
            ("grid", 520),
            ("wide", 128),
            ("step", 136),
            ("step", 520),
        )
    ),
    *(layer(form, backend, hidden) for form in TWO_PRODUCTS for backend, hidden in (("cluster", 41), ("grid", 520))),
    *(layer(form, "fused", hidden) for form, hidden in zip(SCANS, (40, 130, 72, 104, 40, 72), strict=True)),
]
DIVIDED = [
    *(
        layer(form, "fused", 72, shape=shape, want=LAST, make=made, causal=False, alone=False)
        for form in (SRU_1, QRNN, MINGRU)
        for shape in (TileShape(32, 2), TileShape(16, 2, split=True))
    ),
    layer(QRNN, "fused", 72, shape=ScanShape(32), want=LAST, make=made, causal=False, alone=False),
    layer(SRU_OF_IDS, "fused", 72, shape=TileShape(32, 2, split=True), want=LAST, causal=False, alone=False),
]
"""Layers whose kernel multiplies the inputs, or computes parts of a row apart."""
WAITS = conv(STRIDED, hidden=65, make=partial(made, width=33), causal=False)
"""Its launches wait for the number of output steps, so a graph cannot have them."""
CONVOLUTIONS = [
    conv(CAUSAL, hidden=65, make=partial(made, width=33)),
    conv(GATED, hidden=130),
    conv(CENTRED, hidden=130, causal=False),
    WAITS,
    conv(UNPADDED, hidden=130, want=MAXIMUM, causal=False),
    conv(OF_VECTORS, hidden=65, causal=False),
    conv(OF_TABLES, hidden=65, causal=False),
]
DIRECTIONS = [
    *(
        both(form, backend, hidden)
        for form in ONE_PRODUCT
        for backend, hidden in (("cluster", 33), ("grid", 100), ("step", 104))
    ),
    *(both(form, backend, 100) for form in TWO_PRODUCTS[:2] for backend in ("cluster", "grid")),
    *(both(form, "fused", 72) for form in SCANS),
]
LEVELS = [levels(form, 128, 3, 32) for form in ONE_PRODUCT]
STACKS = [
    blocks(tcn, states=True, causal=True),
    blocks(gated, states=True, causal=True),
    *(blocks(make, states=False) for make in (centred, embedding, tables)),
    *(blocks(make, states=False)._replace(name=f"stack-{make.__name__}-last", want=LAST) for make in KEEP_STEPS),
]
TEXTS = [texts(ids) for ids in ("", "embedding", "tables")]
CASES = [*LAYERS, *EXACT, *DIVIDED, *CONVOLUTIONS, *DIRECTIONS, *LEVELS, *STACKS, *TEXTS]
