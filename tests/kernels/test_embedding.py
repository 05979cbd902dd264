"""Embeddings and folded tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from kernels.embedding import embed, embed_taps, fold, fold_taps
from kernels.windows import windows
from tests.kernels.inputs import assert_close, ragged

STORAGES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARY, WIDTH, GATES = 13, 7, 20

every_storage = pytest.mark.parametrize("storage", STORAGES, ids=str)


def made_up(storage: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random embedding, projection and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((VOCABULARY, WIDTH), (WIDTH, GATES), (GATES,))
    embedding, weight, bias = (torch.randn(shape, generator=generator).to(storage) for shape in shapes)
    return embedding, weight, bias


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@every_storage
def test_embed_returns_table_rows_in_the_requested_dtype(storage: torch.dtype, dtype: torch.dtype) -> None:
    table = made_up(storage)[0]
    vectors = embed(torch.tensor([12, 0, 3, 3], dtype=dtype), table, torch.float32)
    assert vectors.dtype == torch.float32
    assert torch.equal(vectors, torch.stack([table[id].float() for id in (12, 0, 3, 3)]))


def test_no_ids_give_no_vectors() -> None:
    assert embed(torch.tensor([], dtype=torch.int32), made_up(torch.float32)[0], torch.float32).shape == (0, WIDTH)


def test_folded_table_agrees_with_embedding_and_projection() -> None:
    embedding, weight, bias = made_up(torch.float32)
    ids = torch.tensor([12, 0, 3, 3, 7])
    expected = embedding[ids].double() @ weight.double() + bias.double()
    assert_close(fold(embedding, weight, bias)[ids], expected, steps=0)


def test_fold_without_bias_uses_zeros() -> None:
    embedding, weight, bias = made_up(torch.float32)
    assert_close(fold(embedding, weight), fold(embedding, weight, torch.zeros_like(bias)), steps=0)


@every_storage
def test_folded_taps_are_tables_after_a_zero_row(storage: torch.dtype) -> None:
    embedding, weight, _ = made_up(storage)
    tables = fold_taps(embedding, torch.stack((weight, -weight)))
    assert tables.shape == (2, 1 + VOCABULARY, GATES) and tables.dtype == storage
    assert not tables[:, 0].any()
    assert torch.equal(tables[0, 1:], fold(embedding, weight)) and torch.equal(tables[1, 1:], -tables[0, 1:])


@every_storage
def test_embed_taps_sums_each_window_in_float32(storage: torch.dtype) -> None:
    embedding, weight, _ = made_up(storage)
    tables = fold_taps(embedding, torch.stack((weight, weight.flip(0), -weight)))
    ids = torch.tensor([12, 0, 3, 3, 7, 1], dtype=torch.int32)
    shape: dict[str, Any] = {"left": 2, "right": 1, "dilation": 2, "stride": 2}
    seen = windows(ragged(ids.long() + 1, [4, 0, 2]), 3, **shape)
    expected = torch.stack([sum((tables[k, row[k]].float() for k in range(3)), torch.zeros(GATES)) for row in seen])
    total = embed_taps(ragged(ids, [4, 0, 2]), tables, **shape)
    assert total.dtype == torch.float32
    assert_close(total, expected, steps=0)


@every_storage
def test_embed_taps_with_the_latest_step_first(storage: torch.dtype) -> None:
    embedding, weight, _ = made_up(storage)
    tables = fold_taps(embedding, torch.stack((weight, weight.flip(0), -weight)))
    ids = ragged(torch.tensor([12, 0, 3, 3, 7, 1], dtype=torch.int32), [4, 0, 2])
    assert torch.equal(embed_taps(ids, tables.flip(0), left=2, latest_first=True), embed_taps(ids, tables, left=2))


@pytest.mark.parametrize("columns", [1, 5, 8, 20])
@every_storage
def test_rows_of_folded_taps_are_aligned_to_16_bytes(storage: torch.dtype, columns: int) -> None:
    embedding, weight, _ = made_up(storage)
    tables = fold_taps(embedding, torch.stack((weight, -weight))[..., :columns])
    assert tables.shape == (2, 1 + VOCABULARY, columns)
    assert tables.data_ptr() % 16 == 0 and tables.stride(2) == 1
    assert all(stride * storage.itemsize % 16 == 0 for stride in tables.stride()[:2])
    whole = tables.as_strided((2, 1 + VOCABULARY, tables.stride(1)), tables.stride())
    assert not whole[..., columns:].any()


@every_storage
def test_dense_folded_taps_have_no_padding(storage: torch.dtype) -> None:
    embedding, weight, _ = made_up(storage)
    taps = torch.stack((weight, -weight))[..., :5]
    dense = fold_taps(embedding, taps, dense=True)
    assert dense.is_contiguous() and torch.equal(dense, fold_taps(embedding, taps))


def test_folded_taps_in_a_wider_dtype_are_not_rounded() -> None:
    embedding, weight, _ = made_up(torch.float16)
    tables = fold_taps(embedding, weight[None], torch.float32)
    assert tables.dtype == torch.float32
    assert_close(tables[0, 1:], embedding.double() @ weight.double(), steps=0)


@every_storage
def test_padded_tables_are_added_up_without_a_copy(storage: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding, filters = torch.randn(1000, 3, generator=generator).to(storage), torch.randn(3, 3, 5, generator=generator)
    ids = ragged(torch.tensor([12, 0, 3, 3, 7, 999], dtype=torch.int32), [4, 0, 2])
    apart, dense = (fold_taps(embedding, filters, dense=dense) for dense in (False, True))
    with profile(profile_memory=True) as profiled:
        total = embed_taps(ids, apart, left=2)
    assert torch.equal(total, embed_taps(ids, dense, left=2))
    assert 0 < max(event.cpu_memory_usage for event in profiled.events() or ()) < 1000


@pytest.mark.parametrize("storage", [torch.float32, torch.float16], ids=str)
def test_column_slices_of_wider_tables_are_added_up(storage: torch.dtype) -> None:
    tables = torch.randn(2, 1 + VOCABULARY, 9, generator=torch.Generator().manual_seed(0)).to(storage)
    ids = ragged(torch.tensor([12, 0, 3], dtype=torch.int32), [3])
    for cut in (tables[..., 4:], tables[..., :4], tables[..., 1:8:2]):
        assert torch.equal(embed_taps(ids, cut, left=1), embed_taps(ids, cut.contiguous(), left=1))


@every_storage
def test_folded_table_has_the_dtype_of_the_embedding(storage: torch.dtype) -> None:
    embedding, weight, bias = made_up(storage)
    assert fold(embedding, weight.float(), bias.float()).dtype == storage


@every_storage
def test_fold_rounds_only_once(storage: torch.dtype) -> None:
    embedding, weight, bias = made_up(storage)
    exact = embedding.double() @ weight.double() + bias.double()
    halfway = float(torch.finfo(storage).eps) / 2 * exact.abs()
    float32 = float(torch.finfo(torch.float32).eps) * 2 * WIDTH
    assert bool(((fold(embedding, weight, bias).double() - exact).abs() <= halfway + float32).all())
