"""The GRU over ragged batches, one layer in one direction or in both.

    r, z = sigmoid(gates of x[t] and h[t-1])           h[t] = (1 - z) * n + z * h[t-1]
    n    = tanh(gate of x[t] + r * (h[t-1] @ R + b))   or, reset before the product, tanh(gate of x[t] + (r * h[t-1]) @ R)

Cho et al. 2014; the reset after the product as cuDNN and torch.nn.GRU compute it.
"""

from collections.abc import Sequence

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.cpu import cache
from kernels.gated import RESET_BEFORE, with_table
from kernels.gru import cpu, framework, reference
from kernels.gru.types import GRUState, GRUWeights, check_gru
from kernels.persistent import launch
from kernels.persistent.launch import Family
from kernels.ragged import Encoded, Outputs, Ragged, check_both_directions, check_levels, with_state_slots

FUSED = Family("gru", gru=True, state=GRUState, arrays=("hidden",), own=lambda weights: weights.recurrent_bias)
BACKENDS = (
    *launch.backends(FUSED),
    Backend("cpu", cpu.gru, cache.refuses, bidirectional=cpu.bidirectional, runs=(RESET_BEFORE,)),
    Backend("framework", with_table(with_state_slots(framework.gru)), accepts_everything, runs=None),
    Backend("reference", with_table(with_state_slots(reference.gru)), only_by_name, runs=None),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: GRUWeights, backend: str = AUTO, levels: int = 1) -> Choice:
    """Return the backend that `gru` chooses for these weights, or `levels` for as many levels of them."""
    recurrent = weights.recurrent
    return _chosen(recurrent.device, recurrent.dtype, weights.hidden, backend, weights.variants, levels=levels)


def gru(x: Ragged, weights: GRUWeights, state: GRUState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 3 x hidden) gate inputs when weights.input is None, or (tokens,) ids for a
    table. `kernels.gru.types` describes shapes and blocks; raises ContractError for inconsistent shapes.
    """
    check_gru(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def bidirectional(
    x: Ragged,
    weights: tuple[GRUWeights, GRUWeights],
    states: tuple[GRUState, GRUState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

    The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both_directions(check_gru, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
    return encoded


def levels(
    x: Ragged,
    weights: Sequence[GRUWeights],
    states: Sequence[GRUState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` by several levels, of which each reads the steps of the level below.

    weights, states: of each level, from the first. The outputs are those of the last level; the state is a tuple of the levels' states.
    """
    check_levels(check_gru, x, weights, states)
    encoded: Encoded = choice(weights[0], backend, len(weights)).backend.run_levels(x, weights, states, want=want)
    return encoded
