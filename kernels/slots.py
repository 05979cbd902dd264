"""States in slots: what comes of one, and how a backend that knows none goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from kernels.contract import ConvState, Encoded, GRUState, LSTMState, Outputs, QRNNState, Ragged, SRUState

Run = Callable[..., Encoded]
State = TypeVar("State", LSTMState, GRUState, SRUState, QRNNState, ConvState)


def moved_on(state: State) -> State:
    """A state in slots once the new one is there: what comes next goes on from where it was written."""
    return state if state.sources is None else replace(state, sources=None)


def by_slot(run: Run) -> Run:
    """A backend that knows no slots, with the state of each row taken from its place before and put into its slot after."""

    def run_by_slot(x: Ragged, weights: Any, state: Any, *, want: Outputs) -> Encoded:
        if state is None or state.slots is None:
            return run(x, weights, state, want=want)
        encoded = run(x, weights, state.by_row(), want=want)
        _put(encoded.state, state)
        return replace(encoded, state=moved_on(state))

    return run_by_slot


def _put(new: Any, state: Any) -> None:
    """What each row goes on from, into its slot of every slab."""
    slots = state.slots.long()
    for name in (field.name for field in fields(state) if field.name not in ("slots", "sources")):
        slab = getattr(state, name)
        slab.index_copy_(0, slots, getattr(new, name).to(slab.dtype))
