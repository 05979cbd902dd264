"""Embeddings of token ids, and folded tables: an embedding followed by a product or a convolution, computed once at load.

(E[id]) @ W + b  =  (E @ W + b)[id]
sum over k of E[id[t + k]] @ F[k]  =  sum over k of (E @ F[k])[id[t + k]]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kernels.launching import round_up
from kernels.ragged import Ragged, Sizes
from kernels.windows import WindowIndex

FIRST = 1
"""The row of id 0 in a tap's table. The row before it is zero and stands for padding."""
ALIGNED_BYTES = 16
"""The bytes that a kernel thread reads at once."""


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the (tokens, width) vectors of ids in `dtype`. ids: (tokens,) int32 or int64, below vocabulary; table: (vocabulary, width)."""
    return table.index_select(0, ids).to(dtype)


def fold(embedding: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the table (vocabulary, gates) of an embedding (vocabulary, width) times a weight (width, gates), plus a bias (gates,).

    Computed in float32 and stored in the dtype of the embedding.
    """
    table = embedding.float() @ weight.float()
    return (table if bias is None else table + bias.float()).to(embedding.dtype)


def fold_taps(embedding: Tensor, filters: Tensor, dtype: torch.dtype | None = None, *, dense: bool = False) -> Tensor:
    """Return the tables (taps, 1 + vocabulary, outputs) of an embedding (vocabulary, inputs) times filters (taps, inputs, outputs).

    Id n is row FIRST + n of each tap. Computed in float32 and stored in `dtype`, or in the dtype of the embedding. Rows begin at
    multiples of ALIGNED_BYTES with zeros between them, because kernels read that many bytes at once; `dense` rows have no padding.
    """
    stored, columns = dtype or embedding.dtype, filters.shape[2]
    width = columns if dense else round_up(columns * stored.itemsize, ALIGNED_BYTES) // stored.itemsize
    tables = embedding.new_zeros(len(filters), FIRST + len(embedding), width, dtype=stored)
    for table, tap in zip(tables, filters, strict=True):
        table[FIRST:, :columns] = fold(embedding.float(), tap)
    return tables[:, :, :columns]


def tap_rows(ids: Ragged) -> Ragged:
    """Return the table rows of token ids. Zeros that are added later as padding select the zero row."""
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
    """Return the sum over the taps of each window, (windows, outputs) float32, for the windows of `kernels.windows.windows`.

    tables: (taps, 1 + vocabulary, outputs), the earliest step first, or the latest first if `latest_first`; context: (rows, left) table
    rows of the steps before each row, instead of padding.
    """
    window_index = WindowIndex(ids, left, right)
    rows = np.zeros(window_index.steps, np.int64)
    rows[window_index.tokens] = _on_host(ids.data) + FIRST
    if context is not None:
        rows[window_index.left] = _on_host(context)
    taps, height, columns = tables.shape
    tap = np.arange(taps)[::-1] if latest_first else np.arange(taps)
    index = torch.from_numpy(rows[window_index.windows(taps, dilation, stride)] + tap * height).to(tables.device)
    if tables.dtype == torch.float32:
        return embedding_bag(index, _with_padding(tables).flatten(0, 1), mode="sum")[:, :columns]
    return tables.flatten(0, 1)[index].float().sum(dim=1)  # embedding_bag would round its sums to the dtype of the rows


def _on_host(ids: Tensor) -> Sizes:
    host_ids: Sizes = ids.cpu().numpy()
    return host_ids


def _with_padding(tables: Tensor) -> Tensor:
    """Return the tables including the padding between rows, if any: embedding_bag would copy tables that are not contiguous."""
    taps, height, columns = tables.shape
    between_taps, width, step = tables.stride()
    padded = step == 1 and width > columns and between_taps == height * width
    whole = taps * between_taps <= tables.untyped_storage().nbytes() // tables.element_size() - tables.storage_offset()
    return tables.as_strided((taps, height, width), tables.stride()) if padded and whole else tables
