"""The convolution over time on ragged batches: centred, causal, dilated or strided, as `left`, `right`, `dilation` and `stride` say.

    y[t] = activation(sum over k of x[t * stride - left + k * dilation] @ filters[k] + bias)

Gated, the maps are values and their gates: glu, value * sigmoid(gate), is Dauphin et al. 2017; gated_tanh, tanh(value) *
sigmoid(gate), is van den Oord et al. 2016. A stack of them is one call, with residuals around its blocks (Bai et al. 2018), and so is
a text CNN (Kim 2014), several widths over the same rows, each pooled by its maximum over time.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.backend import AUTO, Choice, cached_choice, only_by_name, takes_everything
from kernels.contract import (
    ConvBlock,
    ConvState,
    ConvWeights,
    Encoded,
    Outputs,
    Ragged,
    check_conv,
    check_conv_stack,
    check_text_cnn,
)
from kernels.conv import framework, launch, reference
from kernels.conv.composed import ConvBackend
from kernels.slots import by_slot

BACKENDS = (
    ConvBackend("fused", launch.conv, launch.refused, stack=launch.stack, text_cnn=launch.text_cnn),
    ConvBackend("framework", by_slot(framework.conv), takes_everything),
    ConvBackend("reference", by_slot(reference.conv), only_by_name, stack=reference.stack, text_cnn=reference.text_cnn),
)
_chosen = cached_choice(lambda: BACKENDS)


def choice(weights: ConvWeights, backend: str = AUTO) -> Choice:
    """The backend that `conv` takes for these weights, and `stack` and `text_cnn` where they are the widest."""
    return _chosen(weights.filters.device, weights.filters.dtype, weights.outputs, backend)


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Encode every row of `x`, going on from `state` (zeros when None).

    x.data: (tokens, inputs), or (tokens,) ids for an embedding or tables, of which no state is kept. The steps that come out have
    offsets of their own, Encoded.offsets. Shapes, blocks and outputs are those of `kernels.contract`; raises ContractError when they
    do not fit.
    """
    check_conv(x, weights, state)
    encoded: Encoded = choice(weights, backend).backend.run(x, weights, state, want=want)
    return encoded


def stack(
    x: Ragged,
    blocks: Sequence[ConvBlock],
    states: Sequence[ConvState] | None = None,
    *,
    want: Outputs,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` by each block after the one before, going on from `states`, one for each layer in order.

    x.data: (tokens, inputs), or (tokens,) ids where the first layer has an embedding or tables, and there are no states. The state that
    comes out is the tuple of those of the layers, or None where none were given; a projection has none. The offsets are None when
    every layer gives a step for every step. Then, of Outputs(last=True) alone without states, only the steps that the last one depends
    on need be computed.
    """
    check_conv_stack(x, blocks, states)
    encoded: Encoded = _of(widest([layer for block in blocks for layer in block.layers]), backend).whole_stack(
        x, blocks, states, want=want
    )
    return encoded


def text_cnn(
    x: Ragged,
    layers: Sequence[ConvWeights],
    classifier: tuple[Tensor, Tensor] | None = None,
    *,
    backend: str = AUTO,
) -> Encoded:
    """Encode every row of `x` by each layer, pool it by its maximum over time, and join these: Encoded.max, (rows, sum of outputs).

    classifier: weight (sum of outputs, labels) and bias (labels,) of a linear layer, which gives Encoded.scores, without a softmax.
    All layers have the same embedding, or tables of their own, or take vectors. The state is None.
    """
    check_text_cnn(x, layers, classifier)
    encoded: Encoded = _of(widest(layers), backend).whole_text_cnn(x, layers, classifier)
    return encoded


def widest(layers: Sequence[ConvWeights]) -> ConvWeights:
    """Whose choice is that of all of them."""
    return max(layers, key=lambda layer: layer.outputs)


def _of(weights: ConvWeights, backend: str) -> ConvBackend:
    chosen = choice(weights, backend).backend
    assert isinstance(chosen, ConvBackend)
    return chosen
