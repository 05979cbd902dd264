"""The LSTM over ragged batches, one layer in one direction or in both.

    i, f, o = sigmoid(gates of x[t] and h[t-1])        g = tanh(gate)
    c[t] = f * c[t-1] + i * g                          h[t] = o * tanh(c[t])

Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000, as torch.nn.LSTM computes it. `LSTMWeights` describes peepholes,
projections, clips, layer norms and other activations.
"""

from kernels.backend import Backend, accepts_everything, only_by_name
from kernels.cpu import cache
from kernels.gated import with_table
from kernels.lstm import cpu, framework, reference
from kernels.lstm.types import LSTMState, check_lstm
from kernels.persistent import launch
from kernels.persistent.launch import Family
from kernels.ragged import with_state_slots
from kernels.recurrent import RecurrentKernel

FUSED = Family("lstm", gru=False, state=LSTMState, arrays=("hidden", "cell"), own=lambda weights: weights.peephole)
BACKENDS = (
    *launch.backends(FUSED),
    Backend("cpu", cpu.lstm, cache.refuses, bidirectional=cpu.bidirectional),
    Backend("framework", with_table(with_state_slots(framework.lstm)), accepts_everything, runs=None),
    Backend("reference", with_table(with_state_slots(reference.lstm)), only_by_name, runs=None),
)
KERNEL = RecurrentKernel(BACKENDS, check_lstm, lambda weights: weights.recurrent)
choice, lstm, bidirectional, levels = KERNEL.choice, KERNEL.run, KERNEL.bidirectional, KERNEL.levels
"""x.data: (tokens, inputs), or (tokens, 4 x hidden) gate inputs when weights.input is None, or (tokens,) ids for a table."""
