"""The GRU over ragged batches, one layer in one direction.

    r, z = sigmoid(gates of x[t] and h[t-1])           h[t] = (1 - z) * n + z * h[t-1]
    n    = tanh(gate of x[t] + r * (h[t-1] @ R + b))   or, reset before the product, tanh(gate of x[t] + (r * h[t-1]) @ R)

Cho et al. 2014; the reset after the product as cuDNN and torch.nn.GRU compute it.
"""

from kernels.backend import AUTO, Backend, Choice, Problem, accepts_everything, choose, only_by_name
from kernels.gru import framework, reference
from kernels.gru.types import GRUState, GRUWeights, check_gru
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots

BACKENDS = (
    Backend("framework", with_state_slots(framework.gru), accepts_everything),
    Backend("reference", with_state_slots(reference.gru), only_by_name),
)


def choice(weights: GRUWeights, backend: str = AUTO) -> Choice:
    """Return the backend that `gru` chooses for these weights."""
    return choose(BACKENDS, Problem(weights.recurrent.device, weights.recurrent.dtype, weights.hidden), backend)


def gru(x: Ragged, weights: GRUWeights, state: GRUState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 3 x hidden) gate inputs when weights.input is None. `kernels.gru.types` describes
    shapes and blocks; raises ContractError for inconsistent shapes.
    """
    check_gru(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
