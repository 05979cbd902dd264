"""State slabs: preallocated device memory for the recurrent states of a model, one slot per sequence.

The first slots belong to no sequence; `service.engine.batching.state_slots` defines them (ZERO_SLOT, DISCARD_SLOT and FIRST_SLOT).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kernels.ragged import Encoded


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The state slots of a batch, two (rows,) int32 arrays on the device: a row's state is read from `sources`, written to `targets`."""

    sources: Tensor
    targets: Tensor


PoolName = Literal["mean", "max"]
RUNNING_POOLS: tuple[PoolName, ...] = get_args(PoolName)


class RunningPool:
    """The mean or maximum over all steps that a sequence has had so far. The pool "last" needs no state."""

    def __init__(self, pool: PoolName, slots: int, width: int, device: torch.device, name: str) -> None:
        """name: of the state's arrays."""
        initial = 0.0 if pool == "mean" else -torch.inf
        self.pool = pool
        self._name = name
        self._slab = torch.full((slots, width), initial, device=device)
        self._steps = torch.zeros(slots, 1, device=device)

    def __call__(self, encoded: Encoded, offsets: Tensor, slots: RowSlots) -> Encoded:
        """Return `encoded` with its pool, which covers this batch's steps only, extended to all steps of each sequence."""
        pooled = getattr(encoded, self.pool)
        assert pooled is not None
        earlier, targets = self._slab.index_select(0, slots.sources), slots.targets.long()
        if self.pool == "max":
            return replace(encoded, max=self._store(self._slab, targets, torch.maximum(earlier, pooled)))
        steps = torch.diff(offsets)[:, None]
        total = self._store(self._slab, targets, torch.addcmul(earlier, pooled, steps.to(pooled.dtype)))
        count = self._store(self._steps, targets, self._steps.index_select(0, slots.sources) + steps)
        return replace(encoded, mean=total / count.clamp(min=1))

    def slabs(self) -> dict[str, Tensor]:
        return {self._name: self._slab, f"{self._name}.steps": self._steps}

    @staticmethod
    def _store(slab: Tensor, targets: Tensor, values: Tensor) -> Tensor:
        slab.index_copy_(0, targets, values)
        return values


def state_arrays(state: Any) -> dict[str, Tensor]:
    """Return the arrays of a state by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class StateSlabs:
    """The slabs of one model: the states of each part's layers, and the running pools of a head that pools over time."""

    parts: Sequence[Sequence[Any]]
    pools: Sequence[RunningPool]

    def states(self, part: int, slots: RowSlots) -> list[Any]:
        """Return the states of a part's layers, bound to the slots of the batch's rows."""
        return [replace(slab, slots=slots.targets, sources=slots.sources) for slab in self.parts[part]]

    def slabs(self) -> dict[str, Tensor]:
        """Return every slab, (slots, ...), named by part, layer and array."""
        states = {
            f"{part}.{layer}.{name}": value
            for part, slabs in enumerate(self.parts)
            for layer, slab in enumerate(slabs)
            for name, value in state_arrays(slab).items()
        }
        return states | {name: slab for pool in self.pools for name, slab in pool.slabs().items()}

    def numbers(self) -> list[Tensor]:
        """Return the slabs of floating-point numbers as (slots, numbers)."""
        return [slab.flatten(1) for slab in self.slabs().values() if slab.is_floating_point()]
