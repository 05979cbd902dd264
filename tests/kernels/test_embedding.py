"""Embeddings and folded tables, filters with folded norms, and weights in int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d
from torch.nn.utils.parametrizations import weight_norm

from kernels.conv.norms import fold_batch_norm, fold_weight_norm
from kernels.embedding import embed, embed_taps, fold, fold_taps
from kernels.quantized import LEVELS, dequantize, quantize
from kernels.windows import windows
from tests.kernels.inputs import assert_close, ragged

VOCABULARY, WIDTH, GATES = 13, 7, 20
IDS = torch.tensor([12, 0, 3, 3, 7, 1], dtype=torch.int32)
every_storage = pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def made_up(*shapes: tuple[int, ...], storage: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(storage) for shape in shapes]


@every_storage
def test_embed_returns_table_rows_in_the_requested_dtype(storage: torch.dtype) -> None:
    [table] = made_up((VOCABULARY, WIDTH), storage=storage)
    for ids in (IDS, IDS.long(), IDS[:0]):
        vectors = embed(ids, table, torch.float32)
        assert vectors.dtype == torch.float32 and torch.equal(vectors, table.float()[ids.long()])


@every_storage
def test_fold_is_a_projected_embedding_rounded_once(storage: torch.dtype) -> None:
    embedding, weight, bias = made_up((VOCABULARY, WIDTH), (WIDTH, GATES), (GATES,), storage=storage)
    exact = embedding.double() @ weight.double() + bias.double()
    halfway = float(torch.finfo(storage).eps) / 2 * exact.abs()
    float32 = float(torch.finfo(torch.float32).eps) * 2 * WIDTH
    folded = fold(embedding, weight.float(), bias.float())
    assert folded.dtype == storage and bool(((folded.double() - exact).abs() <= halfway + float32).all())
    assert torch.equal(fold(embedding, weight), fold(embedding, weight, torch.zeros_like(bias)))


@pytest.mark.parametrize("columns", [1, 5, 8, 20])
@every_storage
def test_folded_taps_are_aligned_tables_after_a_zero_row(storage: torch.dtype, columns: int) -> None:
    embedding, weight = made_up((VOCABULARY, WIDTH), (WIDTH, columns), storage=storage)
    taps = torch.stack((weight, -weight))
    tables = fold_taps(embedding, taps)
    assert tables.shape == (2, 1 + VOCABULARY, columns) and tables.dtype == storage and not tables[:, 0].any()
    assert torch.equal(tables[0, 1:], fold(embedding, weight)) and torch.equal(tables[1, 1:], -tables[0, 1:])
    assert tables.data_ptr() % 16 == 0 and tables.stride(2) == 1
    assert all(stride * storage.itemsize % 16 == 0 for stride in tables.stride()[:2])
    assert not tables.as_strided((2, 1 + VOCABULARY, tables.stride(1)), tables.stride())[..., columns:].any()
    dense = fold_taps(embedding, taps, dense=True)
    assert dense.is_contiguous() and torch.equal(dense, tables)
    wide = fold_taps(embedding, weight[None], torch.float32)
    assert wide.dtype == torch.float32
    assert_close(wide[0, 1:], embedding.double() @ weight.double(), steps=0)


@every_storage
def test_embed_taps_sums_each_window_in_float32(storage: torch.dtype) -> None:
    embedding, weight = made_up((VOCABULARY, WIDTH), (WIDTH, GATES), storage=storage)
    tables = fold_taps(embedding, torch.stack((weight, weight.flip(0), -weight)))
    shape: dict[str, Any] = {"left": 2, "right": 1, "dilation": 2, "stride": 2}
    ids = ragged(IDS, [4, 0, 2])
    seen = windows(ragged(IDS.long() + 1, [4, 0, 2]), 3, **shape)
    expected = torch.stack([sum((tables[k, row[k]].float() for k in range(3)), torch.zeros(GATES)) for row in seen])
    total = embed_taps(ids, tables, **shape)
    assert total.dtype == torch.float32
    assert_close(total, expected, steps=0)
    assert torch.equal(embed_taps(ids, tables.flip(0), left=2, latest_first=True), embed_taps(ids, tables, left=2))
    for cut in (tables[..., 4:], tables[..., 1:8:2]):
        assert torch.equal(embed_taps(ids, cut, left=1), embed_taps(ids, cut.contiguous(), left=1))


# Norms folded into filters, against torch's modules.

TAPS, INPUTS, MAPS = 3, 7, 5
FILTERS = (TAPS, INPUTS, MAPS)


def a_norm() -> Tensor:
    """Return gain, offset and mean with both signs, and a positive variance."""
    [norm] = made_up((4, MAPS))
    norm[3] = norm[3].abs() + 0.1
    return norm


def torch_batch_norm(norm: Tensor, epsilon: float | None = None) -> torch.nn.BatchNorm1d:
    """Return torch's batch norm, by default with torch's epsilon."""
    module = torch.nn.BatchNorm1d(norm.shape[1]).double().eval()
    module.eps = module.eps if epsilon is None else epsilon
    names = ("weight", "bias", "running_mean", "running_var")
    module.load_state_dict({**module.state_dict(), **dict(zip(names, norm.double(), strict=True))})
    return module.requires_grad_(False)


def test_weight_norm_agrees_with_torch() -> None:
    direction, magnitude = made_up(FILTERS, (MAPS,))
    module = weight_norm(torch.nn.Conv1d(INPUTS, MAPS, TAPS).double()).requires_grad_(False)
    module.get_parameter("parametrizations.weight.original0").copy_(magnitude[:, None, None])
    module.get_parameter("parametrizations.weight.original1").copy_(direction.permute(2, 1, 0))
    assert_close(fold_weight_norm(direction, magnitude), module.weight.permute(2, 1, 0), steps=0)


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_batch_norm_agrees_with_torch(epsilon: float) -> None:
    filters, bias, x = made_up(FILTERS, (MAPS,), (2, INPUTS, 11))
    norm, x = a_norm(), x.double()
    expected = torch_batch_norm(norm, epsilon)(conv1d(x, filters.double().permute(2, 1, 0), bias.double()))
    folded, shifted = fold_batch_norm(filters, bias, norm, epsilon)
    assert_close(conv1d(x, folded.double().permute(2, 1, 0), shifted.double()), expected, steps=INPUTS * TAPS)


# Weights in int8.


def test_largest_weight_of_each_column_is_the_largest_number() -> None:
    numbers, scales = quantize(torch.tensor([[1.0, -0.5, 0.0], [-0.2, 0.1, 0.0]]))
    assert numbers.dtype == torch.int8 and numbers.tolist() == [[127, -127, 0], [-25, 25, 0]]
    assert scales.tolist() == (torch.tensor([1.0, 0.5, 0.0]) / LEVELS).bfloat16().tolist()
    numbers, scales = quantize(torch.zeros(0, 3))
    assert numbers.shape == (0, 3) and scales.tolist() == [0.0, 0.0, 0.0]


def test_error_is_at_most_half_a_number_and_quantizing_again_changes_nothing() -> None:
    for size in (1e-45, 1e-20, 1.0, 1e10):
        weight = made_up((3, 64, 33))[0] * size
        numbers, scales = quantize(weight)
        flat, flat_scales = quantize(weight.flatten(0, 1))
        assert torch.equal(numbers.flatten(0, 1), flat) and torch.equal(scales, flat_scales), "taps share a scale"
        assert int(numbers.abs().max()) <= LEVELS
        values = dequantize(numbers, scales)
        assert size < 1e-30 or bool(((values - weight).abs() <= (0.5 + 1e-3) * scales).all())
        again = quantize(values)
        assert torch.equal(again[0], numbers) and torch.equal(dequantize(*again), values)
