"""The simple recurrent unit over ragged batches, one layer in one direction.

    f = sigmoid(u1 + v_f * c[t-1] + b_f)         c[t] = f * c[t-1] + (1 - f) * u0
    r = sigmoid(u2 + v_r * c[t-1] + b_r)         h[t] = r * g(c[t]) + (1 - r) * skip

Lei et al., EMNLP 2018; without v it is the first version of that paper. g is the identity or tanh; the skip is a block of its own,
the scaled input, or nothing.
"""

from kernels.backend import AUTO, Backend, Choice, Problem, choose, only_by_name, takes_everything
from kernels.contract import Encoded, Outputs, Ragged, SRUState, SRUWeights, check_sru
from kernels.sru import framework, reference

BACKENDS = (
    Backend("framework", framework.sru, takes_everything),
    Backend("reference", reference.sru, only_by_name),
)


def choice(weights: SRUWeights, backend: str = AUTO) -> Choice:
    """The backend that `sru` takes for these weights."""
    return choose(BACKENDS, Problem(weights.bias.device, weights.bias.dtype, weights.hidden), backend)


def sru(x: Ragged, weights: SRUWeights, state: SRUState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens, 3 or 4 x hidden) blocks when weights.input is None. Shapes, blocks and outputs
    are those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_sru(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
