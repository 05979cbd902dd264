"""The GRU over ragged batches, one layer in one direction.

    r, z = sigmoid(gates of x[t] and h[t-1])           h[t] = (1 - z) * n + z * h[t-1]
    n    = tanh(gate of x[t] + r * (h[t-1] @ R + b))   or, reset before the product, tanh(gate of x[t] + (r * h[t-1]) @ R)

Cho et al. 2014; the reset after the product as cuDNN and torch.nn.GRU compute it.
"""

from kernels.backend import AUTO, Backend, Choice, Problem, choose, only_by_name, takes_everything
from kernels.contract import Encoded, GRUState, GRUWeights, Outputs, Ragged, check_gru
from kernels.gru import framework, reference
from kernels.slots import by_slot

BACKENDS = (
    Backend("framework", by_slot(framework.gru), takes_everything),
    Backend("reference", by_slot(reference.gru), only_by_name),
)


def choice(weights: GRUWeights, backend: str = AUTO) -> Choice:
    """The backend that `gru` takes for these weights."""
    return choose(BACKENDS, Problem(weights.recurrent.device, weights.recurrent.dtype, weights.hidden), backend)


def gru(x: Ragged, weights: GRUWeights, state: GRUState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 3 x hidden) gate inputs when weights.input is None. Shapes, blocks and outputs
    are those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_gru(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
