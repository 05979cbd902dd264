"""The quasi-recurrent network over ragged batches, one layer in one direction or in both.

    z = tanh(W_z * X), f, o, i = sigmoid(W * X), masked convolutions over the present step and the steps before it
    f:   h[t] = f * h[t-1] + (1 - f) * z         fo:  c[t] = f * c[t-1] + (1 - f) * z,  h[t] = o * c[t]
    ifo: c[t] = f * c[t-1] + i * z,  h[t] = o * c[t]

Bradbury et al. 2017; f keeps, as in the paper.
"""

from kernels.backend import Backend
from kernels.cpu import cache
from kernels.family import Family
from kernels.qrnn import cpu, framework, fused, reference
from kernels.qrnn.types import QRNNState, QRNNWeights, check_qrnn
from kernels.scan.launch import describe, refuses

FAMILY = Family(
    "qrnn",
    QRNNWeights,
    QRNNState,
    check_qrnn,
    reference=reference.qrnn,
    framework=framework.qrnn,
    compiled=(
        Backend("fused", fused.qrnn, refuses, describe, bidirectional=fused.bidirectional),
        Backend("cpu", cpu.qrnn, cache.refuses, bidirectional=cpu.bidirectional),
    ),
)
BACKENDS = FAMILY.backends
choice, qrnn, bidirectional = FAMILY.choice, FAMILY.run, FAMILY.bidirectional
"""x.data: (tokens, inputs), or (tokens, blocks x hidden) gates without bias when weights.input is None, or (tokens,) ids for tables."""
