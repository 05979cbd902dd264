"""What a model keeps of sequences whose next steps are still to come: slabs of states, in which each sequence has a place.

The first places belong to no sequence: `service.ipc.messages` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.contract import Encoded


@dataclass(frozen=True, slots=True)
class Places:
    """For each row of a batch, (rows,) int32 on the device: the place from which it goes on, and the one where it is written."""

    sources: Tensor
    slots: Tensor


class RunningPool:
    """The mean or the maximum over all steps of a sequence so far; the last step needs no memory."""

    def __init__(self, pool: Literal["mean", "max"], places: int, width: int, device: torch.device) -> None:
        begin = 0.0 if pool == "mean" else -torch.inf
        self._mean = pool == "mean"
        self.pool = pool
        self._slab = torch.full((places, width), begin, device=device)
        self._steps = torch.zeros(places, 1, device=device)

    def __call__(self, encoded: Encoded, offsets: Tensor, places: Places) -> Encoded:
        """What a batch gives, in which the pool is that of its steps alone, with all steps of each sequence in it."""
        new = getattr(encoded, self.pool)
        assert new is not None
        before, slots = self._slab.index_select(0, places.sources), places.slots.long()
        if not self._mean:
            return replace(encoded, max=self._written(self._slab, slots, torch.maximum(before, new)))
        steps = torch.diff(offsets)[:, None]
        total = self._written(self._slab, slots, torch.addcmul(before, new, steps.to(new.dtype)))
        count = self._written(self._steps, slots, self._steps.index_select(0, places.sources) + steps)
        return replace(encoded, mean=total / count.clamp(min=1))

    def slabs(self) -> dict[str, Tensor]:
        return {"pool": self._slab, "pool.steps": self._steps}

    @staticmethod
    def _written(slab: Tensor, slots: Tensor, values: Tensor) -> Tensor:
        slab.index_copy_(0, slots, values)
        return values


@dataclass(frozen=True, slots=True)
class Memory:
    """The slabs of a model: states of each part's layers, and the pool of its last one, if its head pools over steps."""

    parts: Sequence[Sequence[Any]]
    pool: RunningPool | None

    def states(self, part: int, places: Places) -> list[Any]:
        """The states from which a part goes on, and to which it writes."""
        return [replace(slab, slots=places.slots, sources=places.sources) for slab in self.parts[part]]

    def slabs(self) -> dict[str, Tensor]:
        """Every slab, (places, ...), by part, layer and name."""
        found = {
            f"{part}.{layer}.{field.name}": value
            for part, slabs in enumerate(self.parts)
            for layer, slab in enumerate(slabs)
            for field in fields(slab)
            if isinstance(value := getattr(slab, field.name), Tensor)
        }
        return found | ({} if self.pool is None else self.pool.slabs())
