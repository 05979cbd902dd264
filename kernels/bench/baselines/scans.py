"""A QRNN as in many projects: the gates of all steps in torch operations, then a loop over the steps that Numba compiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall, embedded, optional_package
from kernels.bench.case import BenchCase
from kernels.qrnn.types import QRNNWeights

Array = NDArray[np.float32]


def qrnn_scan(case: BenchCase) -> TimedCall:
    """Over the tokens without padding."""
    over_vectors, vectors, expected = embedded(case)
    weights: QRNNWeights = over_vectors.weights[0]
    assert weights.input is not None and weights.pooling == "fo" and weights.window <= 2 and case.want == "last"
    matrix, hidden, window = weights.input.flatten(0, 1), weights.hidden, weights.window
    pool = _compiled(optional_package("numba", "install numba"))
    offsets = case.x.offsets.numpy()
    firsts = case.x.offsets[:-1].long()

    def run() -> Tensor:
        steps = vectors(case.x.data)
        if window == 2:
            before = steps.roll(1, 0)
            before[firsts] = 0
            steps = torch.cat((steps, before), dim=1)
        gates = torch.addmm(weights.bias, steps, matrix)
        gates[:, :hidden].tanh_()
        gates[:, hidden:].sigmoid_()
        last = gates.new_empty(len(firsts), hidden)
        pool(gates.numpy(), offsets, last.numpy())
        return last

    return TimedCall(run, expected=expected)


def loops(gates: Array, offsets: NDArray[np.int32], last: Array) -> None:
    """Write the hidden vector after each row, (rows, hidden). gates: (tokens, 3 x hidden), activated: candidate, forget and output."""
    rows, hidden = last.shape
    for row in range(rows):
        cell = last[row]
        for unit in range(hidden):
            cell[unit] = 0.0
        for token in range(offsets[row], offsets[row + 1]):
            for unit in range(hidden):
                forget = gates[token, hidden + unit]
                cell[unit] = forget * cell[unit] + (1 - forget) * gates[token, unit]
        for unit in range(hidden):
            cell[unit] *= gates[offsets[row + 1] - 1, 2 * hidden + unit]


@cache
def _compiled(numba: Any) -> Any:
    return numba.njit(loops)
