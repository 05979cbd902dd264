"""Text CNNs: several convolutions over the same rows, each pooled by its maximum, and a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import conv
from kernels.backend import accepts_everything
from kernels.conv import framework, text_cnn
from kernels.conv.backend import ConvBackend
from kernels.conv.types import ConvWeights
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import VOCABULARY, Form, cpu_backends
from tests.kernels.inputs import assert_close, map_arrays, ragged

LENGTHS = [9, 0, 1, 3, 14, 2]
WIDTHS = (3, 1, 4)
WAYS = ["", "embedding", "tables"]
BACKENDS = [*cpu_backends("conv"), "reference"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_way_in = pytest.mark.parametrize("ids", WAYS)


def given(ids: str, lengths: Sequence[int] = LENGTHS, **others: Any) -> tuple[Ragged, list[ConvWeights]]:
    """Return rows, and layers of several widths with different numbers of outputs. ids: "", "embedding" or "tables"."""
    made = [
        Form("conv", width=width, activation="relu", ids=ids, **others).arguments(lengths, 4 + seed, 3, seed=seed)
        for seed, width in enumerate(WIDTHS)
    ]
    layers = [one.weights for one in made]
    if ids != "embedding":
        return made[0].x, layers
    embedding = torch.randn(VOCABULARY, 3, generator=torch.Generator().manual_seed(7))
    return made[0].x, [
        ConvWeights(one.filters, one.bias, one.left, one.right, activation="relu", embedding=embedding) for one in layers
    ]


def classifier(layers: Sequence[ConvWeights]) -> tuple[Tensor, Tensor]:
    columns, generator = sum(layer.outputs for layer in layers), torch.Generator().manual_seed(3)
    return torch.randn(columns, 6, generator=generator), torch.randn(6, generator=generator)


def maxima(encoded: Encoded) -> Tensor:
    assert encoded.max is not None
    return encoded.max


@every_backend
@every_way_in
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], []], ids=str)
@pytest.mark.parametrize("padding", [0, 2])
def test_maxima_of_all_layers_are_concatenated(ids: str, padding: int, lengths: list[int], backend: str) -> None:
    x, layers = given(ids, lengths, left=padding, right=padding)
    encoded = text_cnn(x, layers, backend=backend)
    alone = [maxima(conv.conv(x, layer, want=Outputs(max=True), backend="reference")) for layer in layers]
    assert_close(maxima(encoded), torch.cat(alone, dim=1), steps=0)
    others = (encoded.steps, encoded.last, encoded.mean, encoded.scores, encoded.offsets, encoded.state)
    assert maxima(encoded).dtype == torch.float32 and others == (None,) * 6


@every_backend
@every_way_in
def test_scores_are_a_linear_layer_over_the_maxima(ids: str, backend: str) -> None:
    x, layers = given(ids)
    weight, bias = classifier(layers)
    encoded = text_cnn(x, layers, (weight, bias), backend=backend)
    assert encoded.scores is not None and encoded.scores.dtype == torch.float32
    assert torch.equal(maxima(encoded), maxima(text_cnn(x, layers, backend=backend)))
    assert_close(encoded.scores, maxima(encoded).double() @ weight.double() + bias.double(), steps=len(weight))


@every_way_in
def test_reference_keeps_the_precision_of_its_arguments(ids: str) -> None:
    x, layers = given(ids)
    wide = [map_arrays(layer, Tensor.double) for layer in layers]
    if ids == "embedding":
        wide = [ConvWeights(one.filters, one.bias, activation="relu", embedding=wide[0].embedding) for one in wide]
    weight, bias = (one.double() for one in classifier(layers))
    data = x.data if ids else x.data.double()
    exact = text_cnn(Ragged(data, x.offsets), wide, (weight, bias), backend="reference")
    assert exact.scores is not None
    assert torch.equal(exact.scores, maxima(exact) @ weight + bias)
    ours = text_cnn(x, layers, classifier(layers))
    assert ours.scores is not None
    assert_close(ours.scores, exact.scores, steps=len(weight))


@every_backend
@every_way_in
def test_row_is_encoded_alike_alone_and_in_a_batch(ids: str, backend: str) -> None:
    x, layers = given(ids)
    together = text_cnn(x, layers, classifier(layers), backend=backend)
    for row, data in enumerate(inputs.rows(x)):
        alone = text_cnn(inputs.joined([data]), layers, classifier(layers), backend=backend)
        assert_close(maxima(alone)[0], maxima(together)[row], steps=len(data))
        assert alone.scores is not None and together.scores is not None
        assert_close(alone.scores[0], together.scores[row], steps=len(data))


@every_backend
def test_row_shorter_than_one_filter_is_still_scored(backend: str) -> None:
    x, layers = given("", [2, 0])
    weight, bias = classifier(layers)
    encoded = text_cnn(x, layers, (weight, bias), backend=backend)
    first, second = maxima(encoded)
    assert not first[:4].any() and first[4:9].any() and not first[9:].any() and not second.any()
    assert encoded.scores is not None
    assert torch.equal(encoded.scores[1], bias)


def test_backend_with_a_text_cnn_function_runs_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, layers), own = given(""), Encoded(None)

    def whole(rows: Ragged, widths: Sequence[ConvWeights], linear: object) -> Encoded:
        assert rows is x and widths is layers and linear is None
        return own

    backend = ConvBackend("all widths at once", framework.conv, accepts_everything, text_cnn=whole)
    monkeypatch.setattr(conv, "BACKENDS", (backend,))
    assert text_cnn(x, layers, backend=backend.name) is own


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, layers: (x, layers[:0], None), "layers is empty: a text CNN needs at least one layer"),
        (
            lambda x, layers: (ragged(x.data[:, :2], LENGTHS), layers, None),
            "x.data has the shape (29, 2), expected (29, 3)",
        ),
        (
            lambda x, layers: (x, layers, (torch.zeros(14, 2), torch.zeros(2))),
            "classifier[0] has the shape (14, 2), expected (15, 2)",
        ),
        (
            lambda x, layers: (x, layers, (torch.zeros(15, 2), torch.zeros(3))),
            "classifier[1] has the shape (3,), expected (2,)",
        ),
    ],
)
def test_error_names_what_does_not_fit(change: Any, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        text_cnn(*change(*given("")))
    assert str(caught.value) == message


@pytest.mark.parametrize("first, second", [("tables", "embedding"), ("embedding", "tables")])
def test_layers_that_take_ids_differently_are_rejected(first: str, second: str) -> None:
    x, layers = given(first)
    _, others = given(second)
    with pytest.raises(ContractError, match=r"layers\[2\] and layers\[0\] differ in how they take ids"):
        text_cnn(x, [*layers[:2], others[2]])


def test_layers_with_different_embeddings_are_rejected() -> None:
    x, layers = given("embedding")
    _, others = given("embedding")
    with pytest.raises(ContractError, match=r"layers\[1\] and layers\[0\] differ in how they take ids"):
        text_cnn(x, [layers[0], others[1]])
