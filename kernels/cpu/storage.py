"""How weights are stored, by number, for compiled code."""

from __future__ import annotations

import torch

FLOAT32, BFLOAT16, FLOAT16 = range(3)
STORAGES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
