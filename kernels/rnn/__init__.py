"""The plain RNN over ragged batches, one layer in one direction or in both.

    h[t] = activation(x[t] @ input + bias + h[t-1] @ recurrent)

Elman 1990, as torch.nn.RNN computes it.
"""

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.gated import with_table
from kernels.ragged import Encoded, Outputs, Ragged, check_both_directions, with_state_slots
from kernels.rnn import framework, reference
from kernels.rnn.types import RNNState, RNNWeights, check_rnn

BACKENDS = (
    Backend("framework", with_table(with_state_slots(framework.rnn)), accepts_everything, runs=None),
    Backend("reference", with_table(with_state_slots(reference.rnn)), only_by_name, runs=None),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: RNNWeights, backend: str = AUTO) -> Choice:
    """Return the backend that `rnn` chooses for these weights."""
    return _chosen(weights.recurrent.device, weights.recurrent.dtype, weights.hidden, backend)


def rnn(x: Ragged, weights: RNNWeights, state: RNNState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, hidden) sums of input and bias when weights.input is None, or (tokens,) ids for a table.
    `kernels.rnn.types` describes shapes; raises ContractError for inconsistent shapes.
    """
    check_rnn(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def bidirectional(
    x: Ragged,
    weights: tuple[RNNWeights, RNNWeights],
    states: tuple[RNNState, RNNState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

    The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both_directions(check_rnn, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
    return encoded
