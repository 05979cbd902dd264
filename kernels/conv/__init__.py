"""The convolution over time on ragged batches: centred, causal, dilated or strided, as `left`, `right`, `dilation` and `stride` say.

y[t] = activation(sum over k of x[t * stride - left + k * dilation] @ filters[k] + bias)
"""

from kernels.backend import AUTO, Backend, Choice, Problem, choose, only_by_name
from kernels.contract import ConvState, ConvWeights, Encoded, Outputs, Ragged, check_conv
from kernels.conv import framework, reference

BACKENDS = (
    Backend("framework", framework.conv, framework.refuses),
    Backend("reference", reference.conv, only_by_name),
)


def choice(weights: ConvWeights, backend: str = AUTO) -> Choice:
    """The backend that `conv` takes for these weights."""
    return choose(BACKENDS, Problem(weights.filters.device, weights.filters.dtype, weights.outputs), backend)


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs). The steps that come out have offsets of their own, Encoded.offsets. Shapes, blocks and outputs
    are those of `kernels.contract`; raises ContractError when they do not fit.
    """
    check_conv(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded
