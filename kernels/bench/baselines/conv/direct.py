"""A convolution as in its formula: a loop over rows, windows, taps and inputs that adds one product at a time.

On a CPU numba compiles the loops; on a GPU each output has a separate thread.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.bench.baselines.baseline import TimedCall, optional_package
from kernels.bench.baselines.conv.padded_batch import PaddedBatch, Windows, convolved
from kernels.bench.case import BenchCase
from kernels.compile import load_kernel
from kernels.conv.types import ConvWeights
from kernels.launching import ceil_div, device_index, on_device

Array = NDArray[np.float32]

SOURCE = Path(__file__).with_name("direct.cu")
THREADS = 256


def loops_on_cpu(case: BenchCase) -> TimedCall:
    """Loops on a CPU, in float32."""
    compiled_loops = _compiled(optional_package("numba", "install numba"))

    def strategy(batch: PaddedBatch, layer: ConvWeights) -> Windows:
        windows = batch.flat.new_empty(batch.rows, batch.whole(layer), layer.outputs)
        arrays = [array.numpy() for array in (batch.data, layer.filters, layer.bias, windows)]

        def run() -> Tensor:
            compiled_loops(*arrays)
            return windows

        return run

    return convolved(case, strategy)


def loops_on_cuda(case: BenchCase) -> TimedCall:
    """Loops on a GPU. Sums are float32, also over float16 data."""
    optional_package("cupy", "install cupy-cuda13x")
    return convolved(case, _thread_by_output)


def loops(data: Array, filters: Array, bias: Array, windows: Array) -> None:
    """Write `windows` (rows, whole windows, outputs). data: (rows, steps, inputs); filters: (width, inputs, outputs)."""
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


def _thread_by_output(batch: PaddedBatch, layer: ConvWeights) -> Windows:
    device = batch.flat.device
    kernel = load_kernel(SOURCE, device_index(device), threads=THREADS, HALVES=int(batch.flat.dtype == torch.float16))
    width, inputs, outputs = layer.filters.shape
    windows = batch.flat.new_empty(batch.count, outputs)
    arrays = batch.flat, layer.filters.contiguous(), layer.bias.contiguous(), windows
    blocks = ceil_div(windows.numel(), THREADS), 1, 1

    def run() -> Tensor:
        with on_device(device):
            kernel.launch(blocks, 0, [*(array.data_ptr() for array in arrays), batch.count, width * inputs, inputs, outputs])
        return batch.by_row(windows)

    return run
