"""States in slots for backends that know none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from kernels.contract import Encoded, Outputs, Ragged

Run = Callable[..., Encoded]


def by_slot(run: Run) -> Run:
    """A backend that knows no slots, with the state of each row taken from its slot before and put there after."""

    def run_by_slot(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        if state is None or state.slots is None:
            return run(x, weights, state, want=want)
        encoded = run(x, weights, state.by_row(), want=want)
        _put(encoded.state, state)
        return replace(encoded, state=state)

    return run_by_slot


def _put(new: Any, state: Any) -> None:
    """What each row goes on from, into its slot of every slab."""
    slots = state.slots.long()
    for name in (field.name for field in fields(state) if field.name != "slots"):
        slab = getattr(state, name)
        slab.index_copy_(0, slots, getattr(new, name).to(slab.dtype))
