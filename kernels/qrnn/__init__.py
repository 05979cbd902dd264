"""The quasi-recurrent network over ragged batches, one layer in one direction or in both.

    z = tanh(W_z * X), f, o, i = sigmoid(W * X), masked convolutions over the present step and the ones before it
    f:   h[t] = f * h[t-1] + (1 - f) * z         fo:  c[t] = f * c[t-1] + (1 - f) * z,  h[t] = o * c[t]
    ifo: c[t] = f * c[t-1] + i * z,  h[t] = o * c[t]

Bradbury et al. 2017; f keeps, as in the paper.
"""

from kernels.backend import AUTO, Backend, Choice, cached_choice, only_by_name, takes_everything
from kernels.contract import Encoded, Outputs, QRNNState, QRNNWeights, Ragged, check_both, check_qrnn
from kernels.qrnn import framework, launch, reference
from kernels.scan.launch import refused
from kernels.slots import by_slot

BACKENDS = (
    Backend("fused", launch.qrnn, refused, together=launch.both),
    Backend("framework", by_slot(framework.qrnn), takes_everything),
    Backend("reference", by_slot(reference.qrnn), only_by_name),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: QRNNWeights, backend: str = AUTO) -> Choice:
    """The backend that `qrnn` and `both` take for these weights."""
    return _chosen(weights.bias.device, weights.bias.dtype, weights.hidden, backend)


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, blocks x hidden) gates without bias when weights.input is None, or (tokens,) ids for tables.
    Shapes, blocks and outputs are those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_qrnn(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def both(
    x: Ragged,
    weights: tuple[QRNNWeights, QRNNWeights],
    states: tuple[QRNNState, QRNNState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward, by a pair of weights of the same form, going on from a pair of states.

    Outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both(check_qrnn, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.both(x, weights, states, want=want)
    return encoded
