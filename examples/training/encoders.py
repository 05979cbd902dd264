"""Encoders of all six families in plain PyTorch, by the name of the family.

To add an encoder, subclass `Encoder` and list the class here. The server must support its kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable

from training.convolutions import ConvolutionEncoder, TCNEncoder, TextCNNEncoder
from training.encoder import Encoder
from training.recurrent import GRUEncoder, LSTMEncoder, QRNNEncoder, SRUEncoder

ENCODERS: dict[str, Callable[[int, int], Encoder]] = {
    "sru": SRUEncoder,
    "qrnn": QRNNEncoder,
    "lstm": LSTMEncoder,
    "gru": GRUEncoder,
    "cnn": TextCNNEncoder,
    "tcn": TCNEncoder,
}
"""Encoders with one vector per sequence: of the width of the inputs, and the hidden units or filters."""

STEP_ENCODERS: dict[str, Callable[[int, int, bool], Encoder]] = {
    "sru": SRUEncoder,
    "qrnn": QRNNEncoder,
    "lstm": LSTMEncoder,
    "gru": GRUEncoder,
    "cnn": ConvolutionEncoder,
    "tcn": TCNEncoder,
}
"""Encoders with one vector per step: of the width of the inputs, the hidden units or filters, and whether the encoder is causal."""
