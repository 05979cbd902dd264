"""The plain RNN over ragged batches, one layer in one direction or in both.

    h[t] = activation(x[t] @ input + bias + h[t-1] @ recurrent)

Elman 1990, as torch.nn.RNN computes it.
"""

from kernels.backend import Backend, accepts_everything, only_by_name
from kernels.gated import check_gated, with_table
from kernels.ragged import with_state_slots
from kernels.recurrent import RecurrentKernel
from kernels.rnn import framework, reference

BACKENDS = (
    Backend("framework", with_table(with_state_slots(framework.rnn)), accepts_everything, runs=None),
    Backend("reference", with_table(with_state_slots(reference.rnn)), only_by_name, runs=None),
)
KERNEL = RecurrentKernel(BACKENDS, check_gated, lambda weights: weights.recurrent)
choice, rnn, bidirectional = KERNEL.choice, KERNEL.run, KERNEL.bidirectional
"""x.data: (tokens, inputs), or (tokens, hidden) sums of input and bias when weights.input is None, or (tokens,) ids for a table."""
