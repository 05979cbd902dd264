"""The GRU over ragged batches, one layer in one direction or in both.

    r, z = sigmoid(gates of x[t] and h[t-1])           h[t] = (1 - z) * n + z * h[t-1]
    n    = tanh(gate of x[t] + r * (h[t-1] @ R + b))   or, reset before the product, tanh(gate of x[t] + (r * h[t-1]) @ R)

Cho et al. 2014; the reset after the product as cuDNN and torch.nn.GRU compute it.
"""

from kernels.backend import Backend, accepts_everything, only_by_name
from kernels.cpu import cache
from kernels.gated import RESET_BEFORE, check_gated, with_table
from kernels.gru import cpu, framework, reference
from kernels.gru.types import GRUState
from kernels.persistent import launch
from kernels.persistent.launch import Family
from kernels.ragged import with_state_slots
from kernels.recurrent import RecurrentKernel

FUSED = Family("gru", gru=True, state=GRUState, arrays=("hidden",), own=lambda weights: weights.recurrent_bias)
BACKENDS = (
    *launch.backends(FUSED),
    Backend("cpu", cpu.gru, cache.refuses, bidirectional=cpu.bidirectional, runs=(RESET_BEFORE,)),
    Backend("framework", with_table(with_state_slots(framework.gru)), accepts_everything, runs=None),
    Backend("reference", with_table(with_state_slots(reference.gru)), only_by_name, runs=None),
)
KERNEL = RecurrentKernel(BACKENDS, check_gated, lambda weights: weights.recurrent)
choice, gru, bidirectional, levels = KERNEL.choice, KERNEL.run, KERNEL.bidirectional, KERNEL.levels
"""x.data: (tokens, inputs), or (tokens, 3 x hidden) gate inputs when weights.input is None, or (tokens,) ids for a table."""
