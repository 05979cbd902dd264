"""Text CNNs: several convolutions over the same rows, each pooled by its maximum, and a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import conv
from kernels.conv import text_cnn
from kernels.ragged import ContractError, Encoded, Outputs, Ragged
from tests.kernels import inputs
from tests.kernels.families import VOCABULARY, cpu_backends
from tests.kernels.inputs import assert_close, ragged
from tests.kernels.stacks import Maker, TextCNN

LENGTHS, WIDTHS, OUTPUTS = [9, 0, 1, 33, 4, 2], (3, 1, 4), (4, 5, 6)
every_backend = pytest.mark.parametrize("backend", [*cpu_backends("conv"), "reference"])
every_way_in = pytest.mark.parametrize("ids", ["", "embedding", "tables"])


def made(ids: str, lengths: Sequence[int] = LENGTHS, outputs: Sequence[int] = OUTPUTS, **others: Any) -> TextCNN:
    """Return layers of several widths over rows of vectors, or of ids with an "embedding" or "tables"."""
    return Maker(3).text_cnn(lengths, WIDTHS, outputs, ids=ids, **others)


def maxima(encoded: Encoded) -> Tensor:
    assert encoded.max is not None
    return encoded.max


@every_backend
@every_way_in
@pytest.mark.parametrize("padding", [0, 2])
def test_maxima_of_all_layers_are_concatenated(ids: str, padding: int, backend: str) -> None:
    for lengths in (LENGTHS, [0, 0], []):
        x, layers, _ = cnn = made(ids, lengths, left=padding, right=padding)
        encoded = cnn.run(backend=backend)
        alone = [maxima(conv.conv(x, layer, want=Outputs(max=True), backend="reference")) for layer in layers]
        assert_close(maxima(encoded), torch.cat(alone, dim=1), steps=0)
        others = (encoded.steps, encoded.last, encoded.mean, encoded.scores, encoded.offsets, encoded.state)
        assert maxima(encoded).dtype == torch.float32 and others == (None,) * 6


@every_backend
@every_way_in
def test_scores_are_a_linear_layer_over_the_maxima_of_a_row(ids: str, backend: str) -> None:
    for labels in (6, 70):
        cnn = made(ids, labels=labels)
        encoded = cnn.run(backend=backend)
        assert cnn.classifier is not None and encoded.scores is not None and encoded.scores.dtype == torch.float32
        weight, bias = cnn.classifier
        assert torch.equal(maxima(encoded), maxima(cnn._replace(classifier=None).run(backend=backend)))
        assert_close(encoded.scores, maxima(encoded).double() @ weight.double() + bias.double(), steps=len(weight))
        exact = cnn.exact().scores
        assert exact is not None and exact.dtype == torch.float64
        assert_close(encoded.scores, exact, steps=len(weight))
    for row, data in enumerate(inputs.rows(cnn.x)):
        alone = cnn._replace(x=inputs.joined([data])).run(backend=backend)
        assert_close(maxima(alone)[0], maxima(encoded)[row], steps=len(data))
        assert alone.scores is not None and encoded.scores is not None
        assert_close(alone.scores[0], encoded.scores[row], steps=len(data))


@every_backend
def test_row_shorter_than_one_filter_is_still_scored(backend: str) -> None:
    cnn = made("", [2, 0], labels=6)
    encoded = cnn.run(backend=backend)
    first, second = maxima(encoded)
    assert not first[:4].any() and first[4:9].any() and not first[9:].any() and not second.any()
    assert encoded.scores is not None and cnn.classifier is not None
    assert torch.equal(encoded.scores[1], cnn.classifier[1])


# The compiled loop over folded tables.


def assert_matches(cnn: TextCNN) -> None:
    assert_close(maxima(cnn.run(backend="cpu")), maxima(cnn.exact()), steps=5)


def test_loop_over_tables_takes_any_number_of_maps() -> None:
    for outputs in (1, 4, 15, 16, 17, 32, 127, 129, 260):
        assert_matches(made("tables", outputs=(outputs, outputs, 5)))


@pytest.mark.parametrize("options", [{"left": 2, "right": 3}, {"dilation": 3}, {"stride": 2, "left": 4}], ids=str)
def test_loop_over_tables_takes_padding_dilation_and_stride(options: dict[str, Any]) -> None:
    assert_matches(made("tables", outputs=(20, 20, 20), **options))


@pytest.mark.parametrize("id", [-1, VOCABULARY, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_id_outside_of_the_tables_is_refused(id: int, dtype: torch.dtype) -> None:
    cnn = made("tables")
    ids = cnn.x.data.to(dtype)
    ids[5] = id
    with pytest.raises(IndexError, match="outside of the table"):
        cnn._replace(x=Ragged(ids, cnn.x.offsets)).run(backend="cpu")


# The choice of a backend, and refusals.


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda cnn: (cnn.x, (), None), "layers is empty: a text CNN needs at least one layer"),
        (lambda cnn: (ragged(cnn.x.data[:, :2], LENGTHS), cnn.layers, None), "x.data has the shape (49, 2), expected (49, 3)"),
        (
            lambda cnn: (cnn.x, cnn.layers, (torch.zeros(14, 2), torch.zeros(2))),
            "classifier[0] has the shape (14, 2), expected (15, 2)",
        ),
        (
            lambda cnn: (cnn.x, cnn.layers, (torch.zeros(15, 2), torch.zeros(3))),
            "classifier[1] has the shape (3,), expected (2,)",
        ),
    ],
)
def test_error_names_what_does_not_fit(change: Any, message: str) -> None:
    with pytest.raises(ContractError) as caught:
        text_cnn(*change(made("")))
    assert str(caught.value) == message


@pytest.mark.parametrize("first, second", [("tables", "embedding"), ("embedding", "tables"), ("embedding", "embedding")])
def test_layers_that_take_ids_differently_are_rejected(first: str, second: str) -> None:
    """Also layers with different embeddings."""
    (x, layers, _), (_, others, _) = made(first), made(second)
    with pytest.raises(ContractError, match=r"layers\[2\] and layers\[0\] differ in how they take ids"):
        text_cnn(x, [*layers[:2], others[2]])
