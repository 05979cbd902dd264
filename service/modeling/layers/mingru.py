"""The minGRU."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels import mingru
from service.modeling.layers.kind import RecurrentKind
from service.modeling.spec.layers import MinGRULayer


def _weights(layer: MinGRULayer, inputs: int, backward: int, arrays: Mapping[str, Tensor]) -> mingru.MinGRUWeights:
    return mingru.MinGRUWeights(arrays["input"][None], arrays["bias"], activation=layer.candidate)


MINGRU = RecurrentKind(MinGRULayer, mingru.FAMILY, _weights)
