"""How weights are stored, by number, for compiled code."""

from __future__ import annotations

import torch

FLOAT32, BFLOAT16, FLOAT16, INT8 = range(4)
STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Of rows that a kernel gathers."""


def panel_storage(*weights: torch.Tensor, int8: bool) -> int:
    """Return how weights of products are stored: in int8, in bfloat16 if all are, or in float32."""
    if int8:
        return INT8
    return BFLOAT16 if all(weight.dtype == torch.bfloat16 for weight in weights) else FLOAT32


def as_stored_rows(table: torch.Tensor) -> torch.Tensor:
    """Return a table as compiled loops read it: stored in a dtype that they know, the columns of a row consecutive."""
    stored = table if table.dtype in STORAGES else table.float()
    return stored if stored.stride(-1) == 1 else stored.contiguous()
