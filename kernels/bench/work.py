"""The least work of a workload whose rate is reported: the multiplications that its answers need, whatever a backend does.

Padding is not needed. Additions, activations and the data are not counted.
"""

from __future__ import annotations

from kernels.bench.weights import family_of
from kernels.bench.workload import ENCODER, Workload


def multiplications(workload: Workload) -> int:
    """Return the multiplications with weights of a product, an encoder of LSTMs or GRUs, or a text CNN over vectors."""
    if workload.kind == "product":
        return workload.steps * workload.inputs * workload.hidden
    if workload.kind == ENCODER:
        columns = workload.depth * workload.hidden + sum(workload.level_inputs)
        gates = len(family_of(workload).gates) * workload.hidden
        return sum(workload.row_lengths()) * workload.directions * gates * columns
    assert workload.kind == "text-cnn"
    taps = sum(max(steps - width + 1, 0) * width for steps in workload.row_lengths() for width in workload.widths)
    return taps * workload.inputs * workload.outputs
