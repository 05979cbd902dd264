"""The convolution over time on ragged batches: centred, causal, dilated or strided, as `left`, `right`, `dilation` and `stride` say.

y[t] = activation(sum over k of x[t * stride - left + k * dilation] @ filters[k] + bias)
"""

from torch import Tensor

from kernels.backend import AUTO, Backend, Choice, Problem, choose, only_by_name, takes_everything
from kernels.contract import ConvState, ConvWeights, Encoded, Outputs, Ragged, check_conv
from kernels.conv import framework, reference
from kernels.embedding import embed_taps

BACKENDS = (
    Backend("framework", framework.conv, takes_everything),
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


def conv_of_ids(ids: Ragged, tables: Tensor, weights: ConvWeights, *, want: Outputs) -> Encoded:
    """The convolution of an embedding that was folded into the filters: gathers and additions, no product.

    ids: rows of token ids; tables: (width, 1 + vocabulary, outputs) of `kernels.embedding.fold_taps`; `weights` says the rest.
    """
    gathered = embed_taps(ids, tables, left=weights.left, right=weights.right, dilation=weights.dilation, stride=weights.stride)
    steps = framework.activated(gathered + weights.bias, weights)
    return framework.harvested(steps, ids, weights, want, None)
