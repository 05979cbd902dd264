"""The simple recurrent unit over ragged batches, one layer in one direction or in both.

    f = sigmoid(u1 + v_f * c[t-1] + b_f)         c[t] = f * c[t-1] + (1 - f) * u0
    r = sigmoid(u2 + v_r * c[t-1] + b_r)         h[t] = r * g(c[t]) + (1 - r) * skip

Lei et al., EMNLP 2018; without v it is the first version of that paper (version 1). g is the identity or tanh. The skip is a block of
its own, scaled columns of the input, or zero.
"""

from kernels.backend import Backend, accepts_everything, only_by_name
from kernels.cpu import cache
from kernels.ragged import with_state_slots
from kernels.recurrent import RecurrentKernel
from kernels.scan.launch import describe, refuses
from kernels.sru import cpu, framework, fused, reference
from kernels.sru.types import check_sru

BACKENDS = (
    Backend("fused", fused.sru, refuses, describe, bidirectional=fused.bidirectional),
    Backend("cpu", cpu.sru, cache.refuses, bidirectional=cpu.bidirectional),
    Backend("framework", with_state_slots(framework.sru), accepts_everything),
    Backend("reference", with_state_slots(reference.sru), only_by_name),
)
KERNEL = RecurrentKernel(BACKENDS, check_sru, lambda weights: weights.bias)
choice, sru, bidirectional = KERNEL.choice, KERNEL.run, KERNEL.bidirectional
"""x.data: (tokens, inputs), or (tokens, 3 or 4 x hidden) blocks when weights.input is None, or (tokens,) ids for a table."""
