"""The LSTM over ragged batches, one layer in one direction.

    i, f, o = sigmoid(gates of x[t] and h[t-1])        g = tanh(gate)
    c[t] = f * c[t-1] + i * g                          h[t] = o * tanh(c[t])

Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, as torch.nn.LSTM computes it.
"""

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.lstm import framework, persistent, reference
from kernels.lstm.types import LSTMState, LSTMWeights, check_lstm
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots

BACKENDS = (
    Backend("persistent", persistent.persistent, persistent.refuses_persistent, persistent.describe_persistent),
    Backend("cluster", persistent.cluster, persistent.refuses_cluster),
    Backend("grid", persistent.grid, persistent.refuses_grid),
    Backend("framework", with_state_slots(framework.lstm), accepts_everything),
    Backend("reference", with_state_slots(reference.lstm), only_by_name),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: LSTMWeights, backend: str = AUTO) -> Choice:
    """Return the backend that `lstm` chooses for these weights."""
    recurrent = weights.recurrent
    return _chosen(recurrent.device, recurrent.dtype, recurrent.shape[0], backend)


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 4 x hidden) gate inputs when weights.input is None. `kernels.lstm.types` describes
    shapes and gate order; raises ContractError for inconsistent shapes.
    """
    check_lstm(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
