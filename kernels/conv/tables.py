"""The backend for GPUs on which `product.cu` does not run: `folded.cu` adds up folded tables, and torch's operations run other layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.backend import Problem
from kernels.conv import launch
from kernels.conv.layer_by_layer import text_cnn_of
from kernels.conv.types import ConvState, ConvWeights
from kernels.launching import device_refusal
from kernels.ragged import Encoded, Outputs, Ragged

TABLES = "folded tables"
"""The variant of a problem with tables in a layer."""


def refused(problem: Problem) -> str | None:
    """Return why this backend should not run a problem, or None."""
    return device_refusal(problem, (8, 0), halves=True) or (None if TABLES in problem.variants else f"runs only {TABLES}")


def conv(x: Ragged, weights: ConvWeights, state: ConvState | None, *, want: Outputs) -> Encoded:
    """Run one convolution. Shapes as in `kernels.conv.types`."""
    run = launch.framework_run if weights.tables is None else launch.conv
    encoded: Encoded = run(x, weights, state, want=want)
    return encoded


def text_cnn(x: Ragged, layers: Sequence[ConvWeights], classifier: tuple[Tensor, Tensor] | None) -> Encoded:
    """Run all layers of a text CNN. Shapes as in `kernels.conv.types`."""
    run = text_cnn_of(conv) if layers[0].tables is None else launch.text_cnn
    return run(x, layers, classifier)
