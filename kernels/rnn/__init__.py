"""The plain RNN over ragged batches, one layer in one direction or in both.

    h[t] = activation(x[t] @ input + bias + h[t-1] @ recurrent)

Elman 1990, as torch.nn.RNN computes it.
"""

from kernels.family import Family
from kernels.gated import HiddenState, check_gated, with_table
from kernels.rnn import framework, reference
from kernels.rnn.types import RNNWeights

FAMILY = Family(
    "rnn", RNNWeights, HiddenState, check_gated, reference=with_table(reference.rnn), framework=with_table(framework.rnn)
)
BACKENDS = FAMILY.backends
choice, rnn, bidirectional = FAMILY.choice, FAMILY.run, FAMILY.bidirectional
"""x.data: (tokens, inputs), or (tokens, hidden) sums of input and bias when weights.input is None, or (tokens,) ids for a table."""
