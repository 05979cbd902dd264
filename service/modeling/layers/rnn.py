"""The plain RNN."""

from kernels import rnn
from service.modeling.layers.kind import gated_kind
from service.modeling.spec.layers import RNNLayer

RNN = gated_kind(RNNLayer, rnn.FAMILY, ("activation",))
