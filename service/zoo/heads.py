"""Heads: from what the encoder gives to what the caller asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.contract import Encoded, Outputs, arithmetic
from service.zoo.spec import ClassifyHead


class Classify:
    """softmax(pool(encoder) @ weight + bias): one probability per label."""

    def __init__(self, head: ClassifyHead, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        self._pool = head.pool
        self._weight, self._bias = (
            arrays[name].to(device, arithmetic(arrays[name].dtype, device)) for name in ("head.weight", "head.bias")
        )

    def wants(self, *, steps: bool) -> Outputs:
        """What the encoder has to give; `steps` when a caller also wants every step."""
        return Outputs(steps=steps, **{self._pool: True})

    def pooled(self, encoded: Encoded) -> Tensor:
        """(rows, width): the vector under the linear layer, which is also the sequence's embedding."""
        pooled: Tensor = getattr(encoded, self._pool)
        return pooled

    def scores(self, pooled: Tensor) -> Tensor:
        """pooled: (rows, width). Returns (rows, labels) float32, each row adding up to 1."""
        logits = torch.addmm(self._bias, pooled.to(self._weight.dtype), self._weight)
        return torch.softmax(logits.float(), dim=1)

    def tensors(self) -> list[Tensor]:
        return [self._weight, self._bias]
