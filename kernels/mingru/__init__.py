"""The minGRU over ragged batches, one layer in one direction or in both: a GRU whose gates do not read the previous state.

    h[t] = f * h[t-1] + (1 - f) * g(candidate)         f = sigmoid(gate of x[t])

Feng et al. 2024; f is 1 - z of the paper. g is the positive function of its log-space form, v + 0.5 from 0 on and sigmoid(v) below, or the
identity. It is a QRNN with f-pooling over the present step, with another function of the candidate, and shares the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels import qrnn
from kernels.qrnn.types import QRNNWeights
from kernels.scan.forms import POSITIVE


@dataclass(frozen=True)
class MinGRUWeights(QRNNWeights):
    """The weights of a minGRU, as of a QRNN with a window of one step: candidate, forget."""

    gates = ("candidate", "forget")

    pooling: str = "f"
    activation: str = POSITIVE


FAMILY = replace(qrnn.FAMILY, name="mingru", weights=MinGRUWeights)
BACKENDS = FAMILY.backends
choice, mingru, bidirectional = FAMILY.choice, FAMILY.run, FAMILY.bidirectional
"""x.data: (tokens, inputs), or (tokens, 2 x hidden) gates without bias when weights.input is None, or (tokens,) ids for a table."""
