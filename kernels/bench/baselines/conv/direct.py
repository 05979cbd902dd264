"""A convolution as its formula stands: a loop over rows, windows, taps and inputs that adds one product at a time.

On a CPU numba compiles the loops, on a GPU each output has a thread of its own.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.bench.baselines.baseline import Call, wanted
from kernels.bench.baselines.conv.batch import Batch, Windows, convolved
from kernels.bench.given import Given
from kernels.compile import compiled
from kernels.contract import ConvWeights
from kernels.launching import current, index_of, parts_of

Array = NDArray[np.float32]

SOURCE = Path(__file__).with_name("direct.cu")
THREADS = 256


def loops_on_cpu(given: Given) -> Call:
    """On a CPU, in float32."""
    compiled_loops = _compiled(wanted("numba", "install numba"))

    def strategy(batch: Batch, layer: ConvWeights) -> Windows:
        windows = batch.flat.new_empty(batch.rows, batch.whole(layer), layer.outputs)
        arrays = [one.numpy() for one in (batch.data, layer.filters, layer.bias, windows)]

        def run() -> Tensor:
            compiled_loops(*arrays)
            return windows

        return run

    return convolved(given, strategy)


def loops_on_cuda(given: Given) -> Call:
    """On a GPU; in float16 the sums are float32 until the last one."""
    wanted("cupy", "install cupy-cuda13x")
    return convolved(given, _thread_by_output)


def loops(data: Array, filters: Array, bias: Array, windows: Array) -> None:
    """data: (rows, steps, inputs); filters: (width, inputs, outputs); windows: (rows, whole ones, outputs) is written."""
    rows, whole, outputs = windows.shape
    width, inputs, _ = filters.shape
    for row in range(rows):
        for window in range(whole):
            sums = windows[row, window]
            for output in range(outputs):
                sums[output] = bias[output]
            for tap in range(width):
                for column in range(inputs):
                    value = data[row, window + tap, column]
                    for output in range(outputs):
                        sums[output] += value * filters[tap, column, output]


@cache
def _compiled(numba: Any) -> Any:
    return numba.njit(loops)


def _thread_by_output(batch: Batch, layer: ConvWeights) -> Windows:
    device = batch.flat.device
    kernel = compiled(SOURCE, index_of(device), threads=THREADS, HALVES=int(batch.flat.dtype == torch.float16))
    width, inputs, outputs = layer.filters.shape
    windows = batch.flat.new_empty(batch.count, outputs)
    arrays = batch.flat, layer.filters.contiguous(), layer.bias.contiguous(), windows
    blocks = parts_of(windows.numel(), THREADS), 1, 1

    def run() -> Tensor:
        with current(device):
            kernel.launch(blocks, 0, [*(one.data_ptr() for one in arrays), batch.count, width * inputs, inputs, outputs])
        return batch.by_row(windows)

    return run
