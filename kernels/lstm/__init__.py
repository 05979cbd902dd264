"""The LSTM over ragged batches, one layer in one direction or in both.

    i, f, o = sigmoid(gates of x[t] and h[t-1])        g = tanh(gate)
    c[t] = f * c[t-1] + i * g                          h[t] = o * tanh(c[t])

Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, as torch.nn.LSTM computes it. `LSTMWeights` describes peepholes,
projections, clips, layer norms and other activations.
"""

from kernels.cpu.gated import GatedLoop
from kernels.family import Family
from kernels.gated import with_table
from kernels.lstm import framework, reference
from kernels.lstm.types import LSTMState, LSTMWeights, check_lstm
from kernels.persistent import launch
from kernels.persistent.choice import PersistentCell

FUSED = PersistentCell("lstm", gru=False, state=LSTMState, arrays=("hidden", "cell"), own=lambda weights: weights.peephole)
LOOP = GatedLoop(
    "kernels.lstm.cpu_loops",
    LSTMState,
    ("hidden", "cell"),
    scratch_states=3,  # hidden states before and after a step, and cells
    panels=lambda weights: [len(weights.gates)],
)
FAMILY = Family(
    "lstm",
    LSTMWeights,
    LSTMState,
    check_lstm,
    reference=with_table(reference.lstm),
    framework=with_table(framework.lstm),
    compiled=(*launch.backends(FUSED), LOOP.backend()),
)
BACKENDS = FAMILY.backends
choice, lstm, bidirectional, levels = FAMILY.choice, FAMILY.run, FAMILY.bidirectional, FAMILY.levels
"""x.data: (tokens, inputs), or (tokens, 4 x hidden) gate inputs when weights.input is None, or (tokens,) ids for a table."""
