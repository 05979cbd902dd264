"""The `sru` package of the paper's authors: its operator for the CPU or its kernel for the GPU."""

from __future__ import annotations

import torch

from kernels.bench.baselines.baseline import MissingError, TimedCall, last, optional_package, pad
from kernels.bench.case import BenchCase
from kernels.sru.types import SRUWeights


def sru_package(case: BenchCase) -> TimedCall:
    """The package also computes the padding. It comes after each row, so no mask is needed."""
    weights: SRUWeights = case.weights[0]
    assert weights.input is not None
    device, dtype, inputs, hidden = weights.bias.device, weights.bias.dtype, weights.input.shape[0], weights.hidden
    if device.type == "cuda" and optional_package("torch.utils.cpp_extension", "install setuptools").CUDA_HOME is None:
        raise MissingError("install the CUDA compiler nvcc, which compiles its kernel")
    sru = optional_package("sru", "install sru, ninja and a C++ compiler, with ninja on the PATH")
    first, half = weights.cell is None, dtype == torch.float16
    cell = sru.SRUCell(inputs, hidden, rescale=False, v1=first, amp_recurrence_fp16=half)
    cell = cell.to(device, dtype).eval().requires_grad_(False)
    # The package interleaves the columns of a unit; ours are in blocks.
    cell.weight.copy_(weights.input.view(inputs, 3, hidden).transpose(1, 2).reshape(inputs, 3 * hidden))
    cell.weight_c.copy_(torch.zeros_like(weights.bias) if weights.cell is None else weights.cell)
    cell.bias.copy_(weights.bias)
    data, take = pad(case), last(case)
    return TimedCall(lambda: take(cell(data)[0]))
