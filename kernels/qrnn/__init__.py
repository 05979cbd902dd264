"""The quasi-recurrent network over ragged batches, one layer in one direction or in both.

    z = tanh(W_z * X), f, o, i = sigmoid(W * X), masked convolutions over the present step and the steps before it
    f:   h[t] = f * h[t-1] + (1 - f) * z         fo:  c[t] = f * c[t-1] + (1 - f) * z,  h[t] = o * c[t]
    ifo: c[t] = f * c[t-1] + i * z,  h[t] = o * c[t]

Bradbury et al. 2017; f keeps, as in the paper.
"""

from kernels.backend import Backend, accepts_everything, only_by_name
from kernels.cpu import cache
from kernels.qrnn import cpu, framework, fused, reference
from kernels.qrnn.types import check_qrnn
from kernels.ragged import with_state_slots
from kernels.recurrent import RecurrentKernel
from kernels.scan.launch import describe, refuses

BACKENDS = (
    Backend("fused", fused.qrnn, refuses, describe, bidirectional=fused.bidirectional),
    Backend("cpu", cpu.qrnn, cache.refuses, bidirectional=cpu.bidirectional),
    Backend("framework", with_state_slots(framework.qrnn), accepts_everything),
    Backend("reference", with_state_slots(reference.qrnn), only_by_name),
)
KERNEL = RecurrentKernel(BACKENDS, check_qrnn, lambda weights: weights.bias)
choice, qrnn, bidirectional = KERNEL.choice, KERNEL.run, KERNEL.bidirectional
"""x.data: (tokens, inputs), or (tokens, blocks x hidden) gates without bias when weights.input is None, or (tokens,) ids for tables."""
