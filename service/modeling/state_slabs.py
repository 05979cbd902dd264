"""State slabs: preallocated device memory for the recurrent states of a model, one slot per sequence.

The first slots belong to no sequence; `service.engine.batching.state_slots` defines them (ZERO_SLOT, DISCARD_SLOT and FIRST_SLOT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The state slots of a batch, two (rows,) int32 arrays on the device: a row's state is read from `sources`, written to `targets`."""

    sources: Tensor
    targets: Tensor


def state_arrays(state: Any) -> dict[str, Tensor]:
    """Return the arrays of a state by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True)
class StateSlabs:
    """The slabs of one model: the states of each part's layers, and the states of the head by name."""

    parts: Sequence[Sequence[Any]]
    head: Mapping[str, Tensor]

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
        return {**states, **self.head}

    def numbers(self) -> list[Tensor]:
        """Return the slabs of floating-point numbers as (slots, numbers)."""
        return [slab.flatten(1) for slab in self.slabs().values() if slab.is_floating_point()]
