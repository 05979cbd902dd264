"""The quasi-recurrent network over ragged batches, one layer in one direction or in both.

    z = tanh(W_z * X), f, o, i = sigmoid(W * X), masked convolutions over the present step and the steps before it
    f:   h[t] = f * h[t-1] + (1 - f) * z         fo:  c[t] = f * c[t-1] + (1 - f) * z,  h[t] = o * c[t]
    ifo: c[t] = f * c[t-1] + i * z,  h[t] = o * c[t]

Bradbury et al. 2017; f keeps, as in the paper.
"""

from kernels.backend import AUTO, Backend, Choice, accepts_everything, cached_choice, only_by_name
from kernels.cpu import cache
from kernels.qrnn import cpu, framework, fused, reference
from kernels.qrnn.types import QRNNState, QRNNWeights, check_qrnn
from kernels.ragged import Encoded, Outputs, Ragged, check_both_directions, with_state_slots
from kernels.scan.launch import describe, refuses

BACKENDS = (
    Backend("fused", fused.qrnn, refuses, describe, bidirectional=fused.bidirectional),
    Backend("cpu", cpu.qrnn, cache.refuses, bidirectional=cpu.bidirectional),
    Backend("framework", with_state_slots(framework.qrnn), accepts_everything),
    Backend("reference", with_state_slots(reference.qrnn), only_by_name),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: QRNNWeights, backend: str = AUTO) -> Choice:
    """Return the backend that `qrnn` and `bidirectional` choose for these weights."""
    return _chosen(weights.bias.device, weights.bias.dtype, weights.hidden, backend)


def qrnn(x: Ragged, weights: QRNNWeights, state: QRNNState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, starting from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, blocks x hidden) gates without bias when weights.input is None, or (tokens,) ids for tables.
    `kernels.qrnn.types` describes shapes and blocks; raises ContractError for inconsistent shapes.
    """
    check_qrnn(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def bidirectional(
    x: Ragged,
    weights: tuple[QRNNWeights, QRNNWeights],
    states: tuple[QRNNState, QRNNState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` forward and backward with a pair of weights of the same form, starting from a pair of states.

    The outputs are joined as [forward | backward], the steps in the order of the tokens; the state is the pair of states.
    """
    check_both_directions(check_qrnn, x, weights, states)
    encoded: Encoded = choice(weights[0], backend).backend.run_bidirectional(x, weights, states, want=want)
    return encoded
