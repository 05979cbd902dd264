"""The launcher of `cpu_loops.py`: a GRU over a ragged batch on the CPU, all steps in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cpu.gated import GatedFamily, GatedWeights, pack_gated, run_both, run_gated
from kernels.cpu.launch import updates_in_place
from kernels.directions import compose_directions
from kernels.gru.types import GRUState, GRUWeights
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots

RESET_AFTER, RESET_BEFORE = [3], [2, 1]
"""The gates that a tile computes together: all, or the reset and update gates and then the new gate."""


def gru(x: Ragged, weights: GRUWeights, state: GRUState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.gru.types`."""
    if updates_in_place(state):
        return run_gated(FAMILY, x, _packed(weights), state, want)
    return with_state_slots(gru)(x, weights, state, want=want)


def bidirectional(
    x: Ragged, weights: tuple[GRUWeights, GRUWeights], states: tuple[GRUState, GRUState] | None, *, want: Outputs
) -> Encoded:
    """Encode every row in both directions, without a reversed copy of the rows."""
    forward, backward = weights
    if all(map(updates_in_place, states or ())):
        return run_both(FAMILY, x, (_packed(forward), _packed(backward)), states, want)
    return compose_directions(with_state_slots(gru))(x, weights, states, want=want)


def _packed(weights: GRUWeights) -> GatedWeights:
    packed: GatedWeights | None = weights.packed.get("cpu")
    if packed is None:
        panels = RESET_BEFORE if weights.recurrent_bias is None else RESET_AFTER
        packed = pack_gated(weights, panels, weights.recurrent_bias)
        weights.packed["cpu"] = packed
    return packed


@cache
def _loop() -> Callable[..., None]:
    from kernels.gru.cpu_loops import run  # imports Numba, which takes half a second

    return run


FAMILY = GatedFamily(_loop, GRUState, ("hidden",), scratch_states=4)
"""Hidden states before and after a step, update gates, and hidden states times the reset gate."""
