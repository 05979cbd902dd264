"""The quasi-recurrent network over ragged batches, one layer in one direction.

    z = tanh(W_z * X), f, o, i = sigmoid(W * X), masked convolutions over the present step and the ones before it
    f:   h[t] = f * h[t-1] + (1 - f) * z         fo:  c[t] = f * c[t-1] + (1 - f) * z,  h[t] = o * c[t]
    ifo: c[t] = f * c[t-1] + i * z,  h[t] = o * c[t]

Bradbury et al. 2017; f keeps, as in the paper.
"""

from kernels.backend import AUTO, Backend, Choice, Problem, choose, only_by_name, takes_everything
from kernels.contract import Encoded, Outputs, QRNNState, QRNNWeights, Ragged, check_qrnn
from kernels.qrnn import framework, reference

BACKENDS = (
    Backend("framework", framework.qrnn, takes_everything),
    Backend("reference", reference.qrnn, only_by_name),
)


def choice(weights: QRNNWeights, backend: str = AUTO) -> Choice:
    """The backend that `qrnn` takes for these weights."""
    return choose(BACKENDS, Problem(weights.bias.device, weights.bias.dtype, weights.hidden), backend)


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, blocks x hidden) gates without bias when weights.input is None. Shapes, blocks and outputs
    are those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_qrnn(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
