"""The GRU over ragged batches, one layer in one direction or in both.

    r, z = sigmoid(gates of x[t] and h[t-1])           h[t] = (1 - z) * n + z * h[t-1]
    n    = tanh(gate of x[t] + r * (h[t-1] @ R + b))   or, reset before the product, tanh(gate of x[t] + (r * h[t-1]) @ R)

Cho et al. 2014; the reset after the product as cuDNN and torch.nn.GRU compute it.
"""

from kernels.cpu.gated import GatedLoop
from kernels.family import Family
from kernels.gated import RESET_BEFORE, HiddenState, check_gated, with_table
from kernels.gru import framework, reference
from kernels.gru.types import GRUWeights
from kernels.persistent import launch
from kernels.persistent.choice import PersistentCell

FUSED = PersistentCell("gru", gru=True, state=HiddenState, arrays=("hidden",), own=lambda weights: weights.recurrent_bias)
LOOP = GatedLoop(
    "kernels.gru.cpu_loops",
    HiddenState,
    ("hidden",),
    # Hidden states before and after a step, update gates, and hidden states times the reset gate.
    scratch_states=4,
    # Reset before the product, the new gate needs the reset gate of all units.
    panels=lambda weights: [2, 1] if weights.recurrent_bias is None else [3],
)
FAMILY = Family(
    "gru",
    GRUWeights,
    HiddenState,
    check_gated,
    reference=with_table(reference.gru),
    framework=with_table(framework.gru),
    compiled=(*launch.backends(FUSED), LOOP.backend((RESET_BEFORE,))),
)
BACKENDS = FAMILY.backends
choice, gru, bidirectional, levels = FAMILY.choice, FAMILY.run, FAMILY.bidirectional, FAMILY.levels
"""x.data: (tokens, inputs), or (tokens, 3 x hidden) gate inputs when weights.input is None, or (tokens,) ids for a table."""
