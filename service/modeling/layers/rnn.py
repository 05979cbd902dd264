"""The plain RNN."""

from kernels import rnn
from service.modeling.layers.kind import gated_kind
from service.modeling.spec.layers import RNNLayer

RNN = gated_kind(
    RNNLayer,
    rnn.FAMILY,
    ("activation",),
    names={
        "keras": ("SimpleRNN", "SimpleRNNCell"),
        "onnx": ("RNN",),
        "tensorflow 1": ("basic_rnn_cell",),
        "torch": ("rnn_tanh", "rnn_relu"),
    },
)
