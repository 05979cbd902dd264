"""Token ids to vectors, and what can be computed once instead: an embedding followed by a projection is one table.

(E[id]) @ W + b  =  (E @ W + b)[id]
"""

from __future__ import annotations

import torch
from torch import Tensor


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """ids: (tokens,) int32 or int64, all below vocabulary; table: (vocabulary, width). Returns (tokens, width) in `dtype`."""
    return table.index_select(0, ids).to(dtype)


def fold(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """embedding: (vocabulary, width); weight: (width, gates); bias: (gates,). Returns (vocabulary, gates).

    Computed in float32 and stored as the embedding is.
    """
    return torch.addmm(bias.float(), embedding.float(), weight.float()).to(embedding.dtype)


def folded_bytes(embedding: Tensor, gates: int) -> int:
    """Bytes of the table that `fold` makes."""
    return embedding.shape[0] * gates * embedding.element_size()
