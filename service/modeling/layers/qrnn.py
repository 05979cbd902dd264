"""The QRNN."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels import qrnn
from kernels.qrnn.types import QRNNWeights
from service.modeling.layers.kind import RecurrentKind
from service.modeling.spec.layers import QRNNLayer


def _weights(layer: QRNNLayer, inputs: int, backward: int, arrays: Mapping[str, Tensor]) -> QRNNWeights:
    return QRNNWeights(arrays["input"], arrays["bias"], layer.pooling)


QRNN = RecurrentKind(QRNNLayer, qrnn.FAMILY, _weights)
