"""The convolution over time on ragged batches: centred, causal, dilated or strided, depending on `left`, `right`, `dilation` and `stride`.

    y[t] = activation(sum over k of x[t * stride - left + k * dilation] @ filters[k] + bias)

For gated activations, the maps are values and their gates: glu is value * sigmoid(gate) (Dauphin et al. 2017), gated_tanh is
tanh(value) * sigmoid(gate) (van den Oord et al. 2016). One call runs a stack of convolutions with residuals around its blocks (Bai et al.
2018), or a text CNN (Kim 2014): several widths over the same rows, each pooled by its maximum over time.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.backend import AUTO, Choice, accepts_everything, cached_choice, only_by_name
from kernels.conv import cpu, cpu_stack, framework, launch, reference, tables
from kernels.conv.backend import ConvBackend
from kernels.conv.types import ConvBlock, ConvState, ConvWeights, check_conv, check_conv_stack, check_text_cnn
from kernels.cpu import cache
from kernels.ragged import Encoded, Outputs, Ragged, with_state_slots

BACKENDS = (
    ConvBackend("fused", launch.conv, launch.refused, stack=launch.stack, text_cnn=launch.text_cnn, runs=None),
    ConvBackend("tables", tables.conv, tables.refused, text_cnn=tables.text_cnn, runs=None),
    ConvBackend("cpu", cpu_stack.conv, cache.refuses, stack=cpu_stack.stack, text_cnn=cpu.text_cnn, runs=None),
    ConvBackend("framework", with_state_slots(framework.conv), accepts_everything, runs=None),
    ConvBackend(
        "reference",
        with_state_slots(reference.conv),
        only_by_name,
        stack=reference.stack,
        text_cnn=reference.text_cnn,
        runs=None,
    ),
)
_chosen = cached_choice(BACKENDS)


def choice(weights: ConvWeights, backend: str = AUTO) -> Choice:
    """Return the backend that runs these weights. `stack` and `text_cnn` use the choice of their deciding layer."""
    variants = () if weights.tables is None else (tables.TABLES,)
    return _chosen(backend, weights.filters.device, weights.filters.dtype, weights.outputs, variants)


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None = None, *, want: Outputs, backend: str = AUTO) -> Encoded:
    """Run one convolution over every row of `x`, starting from `state`, or from zeros if it is None.

    x.data: (tokens, inputs), or (tokens,) ids for an embedding or tables, which keep no state. Encoded.offsets are the offsets of the
    output steps. Shapes and outputs are described in `kernels.conv.types`; raises ContractError if a shape does not fit.
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
    """Run all blocks over every row of `x`, starting from `states`, one per layer in order.

    x.data: (tokens, inputs), or (tokens,) ids without states if the first layer has an embedding or tables. The returned state is a tuple
    with one entry per layer, or None without states; projections have no state. The returned offsets are None if every layer keeps its
    steps. In that case, without states, Outputs(last=True) computes only the steps that the last step depends on.
    """
    check_conv_stack(x, blocks, states)
    encoded: Encoded = _backend_of(deciding([layer for block in blocks for layer in block.layers]), backend).run_stack(
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
    """Run all layers over every row of `x` and pool each by its maximum over time: Encoded.max, (rows, sum of outputs).

    classifier: weight (sum of outputs, labels) and bias (labels,) of a linear layer, which fills Encoded.scores, without softmax.
    All layers share an embedding, or each has tables, or all take vectors. The state is None.
    """
    check_text_cnn(x, layers, classifier)
    encoded: Encoded = _backend_of(deciding(layers), backend).run_text_cnn(x, layers, classifier)
    return encoded


def deciding(layers: Sequence[ConvWeights]) -> ConvWeights:
    """Return the layer that decides which backend runs all of them: the widest with tables, or the widest of all."""
    return max(layers, key=lambda layer: (layer.tables is not None, layer.outputs))


def _backend_of(weights: ConvWeights, backend: str) -> ConvBackend:
    conv_backend = choice(weights, backend).backend
    assert isinstance(conv_backend, ConvBackend)
    return conv_backend
