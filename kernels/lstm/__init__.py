"""The LSTM over ragged batches, one layer in one direction.

    i, f, o = sigmoid(gates of x[t] and h[t-1])        g = tanh(gate)
    c[t] = f * c[t-1] + i * g                          h[t] = o * tanh(c[t])

Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, as torch.nn.LSTM computes it.
"""

from kernels.backend import AUTO, Backend, Choice, cached_choice, only_by_name, takes_everything
from kernels.contract import Encoded, LSTMState, LSTMWeights, Outputs, Ragged, check_lstm
from kernels.lstm import framework, launch, reference
from kernels.slots import by_slot

BACKENDS = (
    Backend("persistent", launch.persistent, launch.refuses_persistent, launch.how_persistent),
    Backend("cluster", launch.cluster, launch.refuses_cluster),
    Backend("grid", launch.grid, launch.refuses_grid),
    Backend("framework", by_slot(framework.lstm), takes_everything),
    Backend("reference", by_slot(reference.lstm), only_by_name),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: LSTMWeights, backend: str = AUTO) -> Choice:
    """The backend that `lstm` takes for these weights."""
    recurrent = weights.recurrent
    return _chosen(recurrent.device, recurrent.dtype, recurrent.shape[0], backend)


def lstm(x: Ragged, weights: LSTMWeights, state: LSTMState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 4 x hidden) gate inputs when weights.input is None. Shapes, gate order and outputs are
    those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_lstm(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
