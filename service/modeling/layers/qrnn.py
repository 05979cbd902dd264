"""The QRNN."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels import qrnn
from kernels.qrnn.types import QRNNWeights
from service.modeling.layers.kind import Layout, RecurrentKind
from service.modeling.spec.layers import QRNNLayer


def _weights(layer: QRNNLayer, inputs: int, backward: int, arrays: Mapping[str, Tensor]) -> QRNNWeights:
    return QRNNWeights(arrays["input"], arrays["bias"], layer.pooling)


PACKAGE = {
    "input": Layout("weight", ("direction block unit", "tap", "input"), ("direction", "tap", "input", "block unit")),
    "bias": Layout("bias", ("direction block unit",), ("direction", "block unit")),
}
"""The tensors of the linear layer in the QRNN of Salesforce and fastai, whose forget gate is the update gate."""
QRNN = RecurrentKind(QRNNLayer, qrnn.FAMILY, _weights, package=PACKAGE, negated="forget")
