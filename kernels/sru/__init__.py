"""The simple recurrent unit over ragged batches, one layer in one direction or in both.

    f = sigmoid(u1 + v_f * c[t-1] + b_f)         c[t] = f * c[t-1] + (1 - f) * u0
    r = sigmoid(u2 + v_r * c[t-1] + b_r)         h[t] = r * g(c[t]) + (1 - r) * skip

Lei et al., EMNLP 2018; without v it is the first version of that paper (version 1). g is the identity or tanh. The skip is a block of
its own, scaled columns of the input, or zero.
"""

from kernels.backend import Backend
from kernels.cpu import cache
from kernels.family import Family
from kernels.scan.launch import describe, refuses
from kernels.sru import cpu, framework, fused, reference
from kernels.sru.types import SRUState, SRUWeights, check_sru

FAMILY = Family(
    "sru",
    SRUWeights,
    SRUState,
    check_sru,
    reference=reference.sru,
    framework=framework.sru,
    compiled=(
        Backend("fused", fused.sru, refuses, describe, bidirectional=fused.bidirectional),
        Backend("cpu", cpu.sru, cache.refuses, bidirectional=cpu.bidirectional),
    ),
    table_gates=("skip",),
)
BACKENDS = FAMILY.backends
choice, sru, bidirectional = FAMILY.choice, FAMILY.run, FAMILY.bidirectional
"""x.data: (tokens, inputs), or (tokens, 3 or 4 x hidden) blocks when weights.input is None, or (tokens,) ids for a table."""
