"""The LSTM. TensorFlow 1 calls the cell gate j, Keras and ONNX call it c, and PyTorch g."""

from kernels import lstm
from service.modeling.layers.kind import gated_kind
from service.modeling.spec.layers import LSTMLayer

LSTM = gated_kind(
    LSTMLayer,
    lstm.FAMILY,
    ("gate_activation", "activation", "output_activation"),
    own=("peephole", "projection", "cell_norm"),
    orders={"onnx": ("input", "output", "forget", "cell"), "tensorflow 1": ("input", "cell", "forget", "output")},
    names={
        "keras": ("LSTM", "CuDNNLSTM", "LSTMCell"),
        "onnx": ("LSTM",),
        "tensorflow 1": ("basic_lstm_cell", "lstm_cell", "lstm_fused_cell", "cudnn_compatible_lstm_cell"),
        "torch": ("lstm",),
    },
)
