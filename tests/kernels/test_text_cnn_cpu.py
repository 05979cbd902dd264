"""The text CNN over folded tables on the CPU: sizes around its tiles, stored dtypes, threads, and ids outside of the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.conv import text_cnn
from kernels.conv.types import ConvWeights
from kernels.cpu import threads
from kernels.embedding import FIRST, fold_taps
from kernels.ragged import Ragged
from tests.kernels.families import cpu_backends
from tests.kernels.inputs import assert_close, ragged

pytestmark = pytest.mark.skipif("cpu" not in cpu_backends("conv"), reason="the CPU kernels are not compiled")
VOCABULARY = 31
LENGTHS = [9, 0, 1, 33, 4, 2]


def case(outputs: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Ragged, list[ConvWeights]]:
    """Return rows of ids, and two layers of different widths."""
    generator = torch.Generator().manual_seed(outputs)
    embedding = torch.randn(VOCABULARY, 6, generator=generator)
    layers = []
    for width in (3, 5):
        filters = torch.randn(width, 6, outputs, generator=generator)
        tables = fold_taps(embedding, filters, dtype)
        bias = torch.randn(outputs, generator=generator)
        layers.append(ConvWeights(filters, bias, activation="relu", tables=tables, **options))
    ids = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    return ragged(ids, LENGTHS), layers


def test_any_number_of_maps_matches_the_reference() -> None:
    for outputs in (1, 4, 15, 16, 17, 32, 100, 127, 128, 129, 260):
        x, layers = case(outputs)
        ours, exact = (text_cnn(x, layers, backend=backend).max for backend in ("cpu", "reference"))
        assert ours is not None and exact is not None
        assert_close(ours, exact, steps=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stored_halves_are_added_in_float32(dtype: torch.dtype) -> None:
    x, layers = case(37, dtype)
    ours, framework = (text_cnn(x, layers, backend=backend).max for backend in ("cpu", "framework"))
    assert ours is not None and framework is not None
    assert_close(ours, framework, steps=5)


@pytest.mark.parametrize("options", [{"left": 2, "right": 3}, {"dilation": 3}, {"stride": 2, "left": 4}], ids=str)
def test_padding_dilation_and_stride(options: dict[str, int]) -> None:
    x, layers = case(20, torch.float32, **options)
    ours, exact = (text_cnn(x, layers, backend=backend).max for backend in ("cpu", "reference"))
    assert ours is not None and exact is not None
    assert_close(ours, exact, steps=5)


def test_weights_that_are_not_numbers_show_in_the_maxima() -> None:
    x, layers = case(20)
    for layer in layers:
        assert layer.tables is not None
        layer.tables[0, FIRST + int(x.data[2]), 3] = torch.nan
    encoded = text_cnn(x, layers, backend="cpu").max
    assert encoded is not None and encoded[0].isnan().nonzero().flatten().tolist() == [3, 23]


def test_two_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layers = case(50)
    weight, bias = torch.randn(100, 7), torch.randn(7)
    alone = text_cnn(x, layers, (weight, bias), backend="cpu")
    monkeypatch.setattr(threads, "PART_OPERATIONS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    shared = text_cnn(x, layers, (weight, bias), backend="cpu")
    assert alone.max is not None and shared.max is not None and alone.scores is not None and shared.scores is not None
    assert torch.equal(alone.max, shared.max) and torch.equal(alone.scores, shared.scores)


def test_same_layers_get_another_classifier() -> None:
    x, layers = case(8)
    for labels in (3, 70):
        weight, bias = torch.randn(16, labels), torch.randn(labels)
        encoded = text_cnn(x, layers, (weight, bias), backend="cpu")
        assert encoded.scores is not None and encoded.max is not None
        assert_close(encoded.scores, encoded.max.double() @ weight.double() + bias.double(), steps=16)


@pytest.mark.parametrize("id", [-1, VOCABULARY, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_id_outside_of_the_tables_is_refused(id: int, dtype: torch.dtype) -> None:
    x, layers = case(8)
    ids = x.data.to(dtype)
    ids[5] = id
    with pytest.raises(IndexError, match="outside of the table"):
        text_cnn(Ragged(ids, x.offsets), layers, backend="cpu")
    assert layers[0].tables.shape[1] == FIRST + VOCABULARY  # type: ignore[union-attr]  # they have tables
