"""The GRU. Keras and ONNX call its gates z r h, PyTorch r z n, and TensorFlow 1 r u, with the candidate in another variable."""

from kernels import gru
from service.modeling.layers.kind import gated_kind
from service.modeling.spec.layers import GRULayer

ACTIVATIONS = "gate_activation", "activation"
UPDATE_FIRST = "update", "reset", "new"
GRU = gated_kind(
    GRULayer,
    gru.FAMILY,
    ACTIVATIONS,
    own=("recurrent_bias",),
    orders={"keras": UPDATE_FIRST, "onnx": UPDATE_FIRST},
    names={
        "keras": ("GRU", "CuDNNGRU", "GRUCell"),
        "onnx": ("GRU",),
        "tensorflow 1": ("gru_cell", "cudnn_compatible_gru_cell"),
        "torch": ("gru",),
    },
)
