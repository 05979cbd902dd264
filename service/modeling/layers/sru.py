"""The SRU."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernels import sru
from kernels.sru.types import SRUWeights
from service.modeling.layers.kind import Layout, RecurrentKind
from service.modeling.spec.layers import SRULayer


def _weights(layer: SRULayer, inputs: int, backward: int, arrays: Mapping[str, Tensor]) -> SRUWeights:
    skip_column = backward * layer.hidden if layer.skip and layer.blocks(inputs) == 3 else None
    return SRUWeights(
        arrays["input"],
        arrays["bias"],
        arrays.get("cell"),
        arrays.get("projection"),
        skip_from=skip_column,
        scale=layer.scale,
        tanh=layer.activation == "tanh",
        norm=arrays["norm"] if layer.layer_norm == "before" else None,
    )


BLOCKS = ("block direction unit",), ("direction", "block unit")
PACKAGE = {
    "input": Layout("weight", ("input", "direction unit block"), ("direction", "input", "block unit")),
    "bias": Layout("bias", *BLOCKS),
    "cell": Layout("weight_c", *BLOCKS),
}
"""The tensors of the packages `sru` and `pytorch-sru`."""
SRU = RecurrentKind(SRULayer, sru.FAMILY, _weights, package=PACKAGE)
