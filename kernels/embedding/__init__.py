"""Token ids to vectors, and what can be computed once instead: an embedding followed by a product or a convolution is a table.

(E[id]) @ W + b  =  (E @ W + b)[id]
sum over k of E[id[t + k]] @ F[k]  =  sum over k of (E @ F[k])[id[t + k]]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kernels.contract import Ragged, Sizes
from kernels.launching import round_up
from kernels.windows import Places

FIRST = 1
"""The row of id 0 in a tap's table: the row before it is zero, for steps that are padding."""
ALIGNED_BYTES = 16
"""What a thread of a kernel reads at once."""


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """ids: (tokens,) int32 or int64, all below vocabulary; table: (vocabulary, width). Returns (tokens, width) in `dtype`."""
    return table.index_select(0, ids).to(dtype)


def fold(embedding: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """embedding: (vocabulary, width); weight: (width, gates); bias: (gates,). Returns (vocabulary, gates).

    Computed in float32 and stored as the embedding is.
    """
    table = embedding.float() @ weight.float()
    return (table if bias is None else table + bias.float()).to(embedding.dtype)


def fold_taps(embedding: Tensor, filters: Tensor, dtype: torch.dtype | None = None, *, dense: bool = False) -> Tensor:
    """embedding: (vocabulary, inputs); filters: (taps, inputs, outputs). Returns (taps, 1 + vocabulary, outputs).

    Id n is row FIRST + n of each tap. Computed in float32 and stored as `dtype`, or as the embedding is. Rows begin at multiples of
    ALIGNED_BYTES, for kernels that read so many at once, with zeros between them; or, dense, one where the other ends.
    """
    stored, columns = dtype or embedding.dtype, filters.shape[2]
    width = columns if dense else _aligned(columns, stored)
    tables = embedding.new_zeros(len(filters), FIRST + len(embedding), width, dtype=stored)
    for table, tap in zip(tables, filters, strict=True):
        table[FIRST:, :columns] = fold(embedding.float(), tap)
    return tables[:, :, :columns]


def tap_rows(ids: Ragged) -> Ragged:
    """Rows of token ids as rows of a tap's table; what is padded with zeros afterwards is padding there too."""
    return Ragged(ids.data.long() + FIRST, ids.offsets)


def embed_taps(
    ids: Ragged,
    tables: Tensor,
    *,
    left: int = 0,
    right: int = 0,
    dilation: int = 1,
    stride: int = 1,
    context: Tensor | None = None,
    latest_first: bool = False,
) -> Tensor:
    """ids: rows of token ids; tables: (taps, 1 + vocabulary, outputs), the earliest step first, or the latest if it is said. Returns
    (windows, outputs) float32.

    The windows are those of `kernels.windows.windows`, row after row. context: (rows, left) what stands before each row, as `tap_rows`
    has it, in place of padding.
    """
    places = Places(ids, left, right)
    rows = np.zeros(places.steps, np.int64)
    rows[places.own] = _host(ids.data) + FIRST
    if context is not None:
        rows[places.left] = _host(context)
    taps, height, columns = tables.shape
    tap = np.arange(taps)[::-1] if latest_first else np.arange(taps)
    at = torch.from_numpy(rows[places.seen(taps, dilation, stride)] + tap * height).to(tables.device)
    if tables.dtype == torch.float32:
        return embedding_bag(at, _whole(tables).flatten(0, 1), mode="sum")[:, :columns]
    return tables.flatten(0, 1)[at].float().sum(dim=1)  # a bag would round its sums to what the rows are stored in


def _host(ids: Tensor) -> Sizes:
    numbers: Sizes = ids.cpu().numpy()
    return numbers


def _whole(tables: Tensor) -> Tensor:
    """With the zeros between the rows, where there are such: a bag would copy tables that are not contiguous."""
    taps, height, columns = tables.shape
    between_taps, width, step = tables.stride()
    padded = step == 1 and width > columns and between_taps == height * width
    whole = taps * between_taps <= tables.untyped_storage().nbytes() // tables.element_size() - tables.storage_offset()
    return tables.as_strided((taps, height, width), tables.stride()) if padded and whole else tables


def _aligned(columns: int, dtype: torch.dtype) -> int:
    """So many columns that rows of them begin at multiples of ALIGNED_BYTES."""
    return round_up(columns * dtype.itemsize, ALIGNED_BYTES) // dtype.itemsize


def folded_bytes(
    embedding: Tensor, columns: int, taps: int | None = None, dtype: torch.dtype | None = None, *, dense: bool = False
) -> int:
    """Bytes of what `fold` makes of so many columns, or `fold_taps` of so many taps of them, held as `dtype` or as the embedding."""
    stored = dtype or embedding.dtype
    if taps is None:
        return embedding.shape[0] * columns * stored.itemsize
    width = columns if dense else _aligned(columns, stored)
    return taps * (FIRST + embedding.shape[0]) * width * stored.itemsize
