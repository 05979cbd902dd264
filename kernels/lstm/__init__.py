"""The LSTM over ragged batches, one layer in one direction or in both.

    i, f, o = sigmoid(gates of x[t] and h[t-1])        g = tanh(gate)
    c[t] = f * c[t-1] + i * g                          h[t] = o * tanh(c[t])

Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, as torch.nn.LSTM computes it. `LSTMWeights` describes peepholes,
projections, clips, layer norms and other activations.
"""

from collections.abc import Sequence

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.cpu import cache
from kernels.gated import with_table
from kernels.lstm import cpu, framework, reference
from kernels.lstm.types import LSTMState, LSTMWeights, check_lstm
from kernels.persistent import launch
from kernels.persistent.launch import Family
from kernels.ragged import Encoded, Outputs, Ragged, check_both_directions, check_levels, with_state_slots

FUSED = Family("lstm", gru=False, state=LSTMState, arrays=("hidden", "cell"), own=lambda weights: weights.peephole)
BACKENDS = (
    *launch.backends(FUSED),
    Backend("cpu", cpu.lstm, cache.refuses, bidirectional=cpu.bidirectional),
    Backend("framework", with_table(with_state_slots(framework.lstm)), accepts_everything, runs=None),
    Backend("reference", with_table(with_state_slots(reference.lstm)), only_by_name, runs=None),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: LSTMWeights, backend: str = AUTO, levels: int = 1) -> Choice:
    """Return the backend that `lstm` chooses for these weights, or `levels` for as many levels of them."""
    recurrent = weights.recurrent
    return _chosen(recurrent.device, recurrent.dtype, weights.hidden, backend, weights.variants, weights.vector, levels)


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 4 x hidden) gate inputs when weights.input is None, or (tokens,) ids for a
    table. `kernels.lstm.types` describes shapes and gate order; raises ContractError for inconsistent shapes.
    """
    check_lstm(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def bidirectional(
    x: Ragged,
    weights: tuple[LSTMWeights, LSTMWeights],
    states: tuple[LSTMState, LSTMState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

    The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both_directions(check_lstm, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
    return encoded


def levels(
    x: Ragged,
    weights: Sequence[LSTMWeights],
    states: Sequence[LSTMState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` by several levels, of which each reads the steps of the level below.

    weights, states: of each level, from the first. The outputs are those of the last level; the state is a tuple of the levels' states.
    """
    check_levels(check_lstm, x, weights, states)
    encoded: Encoded = choice(weights[0], backend, len(weights)).backend.run_levels(x, weights, states, want=want)
    return encoded
