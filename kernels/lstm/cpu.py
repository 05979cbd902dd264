"""The launcher of `cpu_loops.py`: an LSTM over a ragged batch on the CPU, all steps in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cpu.gated import GatedFamily, GatedWeights, pack_gated, run_both, run_gated
from kernels.cpu.launch import updates_in_place
from kernels.directions import compose_directions
from kernels.lstm.types import GATES, LSTMState, LSTMWeights
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None, *, want: Outputs) -> Encoded:
    """Encode every row. Shapes as in `kernels.lstm.types`."""
    if updates_in_place(state):
        return run_gated(FAMILY, x, _packed(weights), state, want)
    return with_state_slots(lstm)(x, weights, state, want=want)


def bidirectional(
    x: Ragged, weights: tuple[LSTMWeights, LSTMWeights], states: tuple[LSTMState, LSTMState] | None, *, want: Outputs
) -> Encoded:
    """Encode every row in both directions, without a reversed copy of the rows."""
    forward, backward = weights
    if all(map(updates_in_place, states or ())):
        return run_both(FAMILY, x, (_packed(forward), _packed(backward)), states, want)
    return compose_directions(with_state_slots(lstm))(x, weights, states, want=want)


def _packed(weights: LSTMWeights) -> GatedWeights:
    packed: GatedWeights | None = weights.packed.get("cpu")
    if packed is None:
        packed = weights.packed["cpu"] = pack_gated(weights, [len(GATES)])
    return packed


@cache
def _loop() -> Callable[..., None]:
    from kernels.lstm.cpu_loops import run  # imports Numba, which takes half a second

    return run


FAMILY = GatedFamily(_loop, LSTMState, ("hidden", "cell"), scratch_states=3)
"""Hidden states before and after a step, and cells."""
